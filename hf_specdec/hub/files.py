"""The files of a checkpoint: finding and downloading them, reading JSON and headers, and checking for damage.

Only files that the caller names are downloaded. JSON and safetensors files are read, pickles only if a format names
them, and Python files never. This module does not depend on drafter formats, and needs torch only for pickles;
`tensors.py` loads tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import constants, is_offline_mode, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is not in its __all__
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.sha import git_hash, sha_fileobj
from safetensors import SafetensorError, safe_open

from hf_specdec.hub.formats.base import StoredTensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_JSON_BYTES = 2**26  # sufficient for an index of a million tensors
MAX_JSON_DEPTH = 64


@dataclass(frozen=True)
class Source:
    """A folder or Hub repo, as the user named it.

    Attributes:
        name: a folder or a Hub id.
        revision: branch, tag or commit on the Hub.
        token: Hub token for private repos; None for the stored one.
        local_files_only: use the Hub cache only, without requests.
        cache_dir: cache folder of the Hub client.
        subfolder: of the folder or repo, in which the checkpoint lies; "" if it lies at the top.
    """

    name: str
    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    local_files_only: bool = False
    cache_dir: str | os.PathLike[str] | None = None
    subfolder: str = ""

    def locate(self, patterns: Sequence[str], revision: str | None = None) -> Path:
        """The folder with the files that match, downloaded if needed; `subfolder` is part of it.

        Args:
            patterns: patterns of file names.
            revision: the commit that an earlier call returned, so that all files are from one commit; None for the
                user's revision.

        Raises:
            OSError: the folder or repo does not exist or cannot be downloaded; names the reason and the way out.
            ValueError: the name is empty, is neither a folder nor a Hub id, or names a drafter without files; a file
                of the folder is a link out of it; or a revision was given for a folder.
        """
        if not self.name:
            raise ValueError("The name is empty; give a folder ('.' for the current one) or a Hub id 'owner/name'.")
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            if self.revision is not None:
                raise ValueError(
                    f"revision={self.revision!r} was given, but {self.name!r} is a local folder, which has none. Leave "
                    "revision out, or give a Hub id that is not also the name of a local folder."
                )
            folder = self._within(folder)
            for pattern in patterns:
                for entry in folder.glob(pattern):
                    _refuse_link(entry, folder, self.name)
            return folder
        if folder.is_file():
            raise NotADirectoryError(f"{self.name!r} is a file; give the folder of config.json and the weights.")
        if folder.is_absolute() or self.name.startswith((".", "~")) or self.name.count("/") > 1:
            raise FileNotFoundError(
                f"There is no folder {self.name!r}, and it cannot be a Hub id, which has the form 'owner/name'."
            )
        cache = Path(constants.HF_HUB_CACHE if self.cache_dir is None else self.cache_dir)
        try:
            blobs = cache / repo_folder_name(repo_id=self.name, repo_type="model") / "blobs"
            known = set(os.listdir(blobs)) if blobs.is_dir() else set()
            folder = Path(
                snapshot_download(
                    self.name,
                    revision=revision or self.revision,
                    token=self.token,
                    local_files_only=self.local_files_only,
                    cache_dir=None if self.cache_dir is None else os.fspath(self.cache_dir),
                    # The Hub client warns where no file matches, and most of the files that we ask for are optional.
                    allow_patterns=[str(Path(self.subfolder) / pattern) for pattern in (CONFIG_FILE, *patterns)],
                )
            )
            _check_hashes(folder, blobs, known)
        except HFValidationError as error:
            raise ValueError(
                f"{self.name!r} is neither a folder here nor a Hub id, which has the form 'owner/name': {error}"
            ) from error
        except (HTTPError, OSError) as error:
            raise OSError(self._explain(error)) from error
        return self._within(folder)

    def commit_of(self, folder: Path) -> str:
        """The commit of a folder that `locate` returned for a Hub repo, whose snapshots are named after theirs."""
        return (folder.parents[len(Path(self.subfolder).parts) - 1] if self.subfolder else folder).name

    def _within(self, folder: Path) -> Path:
        """The subfolder of a checkpoint's folder."""
        if self.subfolder and not (folder / self.subfolder / CONFIG_FILE).is_file():
            others = sorted(str(each.parent.relative_to(folder)) for each in folder.glob(f"*/{CONFIG_FILE}"))
            raise FileNotFoundError(
                f"{self.name!r} has no {CONFIG_FILE} in its subfolder {self.subfolder!r}: leave subfolder out, or give "
                f"one that holds a checkpoint. Found here: {', '.join(others) or 'none'}."
            )
        return folder / self.subfolder

    def _explain(self, error: Exception) -> str:
        repo = f"{self.name!r}" + (f" at revision {self.revision!r}" if self.revision else "")
        folder = "or give the path of a local folder"
        if isinstance(error, GatedRepoError):
            return (
                f"Access to {repo} is restricted on the Hub. Accept its conditions on its page, then log in with "
                f"`hf auth login` or pass token=, {folder}."
            )
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"There is no folder {self.name!r} here and no repo of that id on the Hub that you may read. Check the "
                f"spelling; for a private repo log in with `hf auth login` or pass token=, {folder}."
            )
        if isinstance(error, RevisionNotFoundError):
            return (
                f"The repo {self.name!r} is on the Hub but has no revision {self.revision!r}. Leave revision out for "
                "its main branch, or give one of its branches, tags or commits."
            )
        if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
            if self.local_files_only:
                why, way_out = "local_files_only=True was given", "leave local_files_only out"
            elif is_offline_mode():
                why, way_out = "offline mode is on (HF_HUB_OFFLINE=1)", "unset HF_HUB_OFFLINE"
            else:
                cause = error.__cause__ or error
                why = f"the Hub cannot be reached ({type(cause).__name__}: {cause})"
                way_out = "check the connection"
            return (
                f"There is no folder {self.name!r} here, the files of {repo} are not all in the Hub cache, and {why}. "
                f"To download them {way_out}, {folder}."
            )
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            return f"The Hub refused the token for {repo}. Log in with `hf auth login` or pass another one, {folder}."
        return f"{repo} could not be downloaded ({type(error).__name__}: {error}). Try again, {folder}."


def read_json(file: Path, name: str) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        file: the file.
        name: the checkpoint's name, for messages.

    Raises:
        FileNotFoundError: the file does not exist; lists the files that do.
        ValueError: the file is not a JSON object, or too large.
    """
    if not file.is_file():
        present = ", ".join(_present(file.parent)) or "none of a drafter"
        raise FileNotFoundError(
            f"{name!r} has no {file.name}, so it is not a drafter checkpoint. Files there: {present}."
        )
    if (size := file.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(
            f"{file.name} of {name!r} has {size} bytes, more than the {MAX_JSON_BYTES} that are read. The checkpoint "
            "is damaged or hostile: nothing was loaded."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_constant, object_hook=_number)
    except (ValueError, RecursionError) as error:  # RecursionError: too many nested brackets
        raise ValueError(f"{file.name} of {name!r} is not valid JSON ({error}); copy or download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} of {name!r} holds a {type(content).__name__}, but must hold a JSON object.")
    _check_depth(content, file.name, name)
    return content


def _check_depth(content: dict[str, Any], file: str, name: str) -> None:
    """Raises ValueError if objects and lists are nested so deeply that recursive code would fail."""
    level: list[Any] = [content]
    for _ in range(MAX_JSON_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [entry for part in parts for entry in part if isinstance(entry, (dict, list))]
        if not level:
            return
    raise ValueError(
        f"{file} of {name!r} nests objects and lists deeper than the {MAX_JSON_DEPTH} levels that are read. The "
        "checkpoint is damaged or hostile: nothing was loaded."
    )


def _constant(name: str) -> float:
    """The value of Infinity or -Infinity, which some configs have though JSON has not; NaN is refused."""
    if name == "NaN":
        raise ValueError("NaN is not a number")
    return float(name)


def _number(content: dict[str, Any]) -> Any:
    """The object, or the number if transformers wrote it as an object, such as {"__float__": "Infinity"}."""
    return _constant(str(content["__float__"])) if content.keys() == {"__float__"} else content


def read_utf8(file: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it is not UTF-8; names the line.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"Line {line} of {str(file)!r} is not UTF-8: byte 0x{error.object[error.start]:02x}. Convert the file "
            "first, for example with iconv."
        ) from error


def weight_files(folder: Path, name: str, others: Sequence[str] = ()) -> list[Path]:
    """The weight files of a checkpoint: one, or the shards that its index lists.

    Args:
        folder: the checkpoint's folder.
        name: the checkpoint's name, for messages.
        others: names of files that the format may have instead.

    Raises:
        FileNotFoundError: there are none, or a shard is missing; lists the files that exist.
        ValueError: the index names a file outside the folder, or a link to one.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        if known := [folder / other for other in others if (folder / other).is_file()]:
            return known[:1]
        present = _present(folder)
        pickled = [file for file in present if file.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        why = (
            f" {', '.join(pickled)} is a pickle, whose loading can run code: convert it to safetensors first."
            if pickled
            else ""
        )
        raise FileNotFoundError(
            f"{name!r} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, so there are no weights to load.{why} Files "
            f"there: {', '.join(present)}."
        )
    weight_map = read_json(folder / INDEX_FILE, name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{INDEX_FILE} of {name!r} has no weight_map naming the shards; copy or download it again.")
    shards = sorted(set(map(str, weight_map.values())))
    for shard in shards:
        # The index is not trusted: it may name files of its own folder only.
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{INDEX_FILE} of {name!r} names the shard {shard!r}; shards must be safetensors files in the same "
                "folder. The checkpoint is damaged or hostile: nothing was opened."
            )
        if not (folder / shard).is_file():
            raise FileNotFoundError(
                f"{name!r} lacks the shard {shard!r}, one of {len(shards)} that its index lists; copy or download it."
            )
        _refuse_link(folder / shard, folder, name)  # `Source.locate` may not have checked this name
    return [folder / shard for shard in shards]


def safetensors_headers(files: Sequence[Path], name: str) -> dict[str, StoredTensor]:
    """Shapes and dtypes of the tensors in safetensors files, without their values.

    Raises:
        ValueError: a file is damaged or has another format, or two files hold a tensor of the same name.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if key in stored:
                        raise ValueError(f"{name!r} holds {key} twice, in {stored[key].file.name} and {file.name}.")
                    part = tensors.get_slice(key)
                    stored[key] = StoredTensor(tuple(part.get_shape()), part.get_dtype(), file)
        except SafetensorError as error:
            with file.open("rb") as data:
                pointer = data.read(64).startswith(b"version https://git-lfs")
            why = (
                "it is a git-lfs pointer: run `git lfs pull` in the folder"
                if pointer
                else f"{error}. It is truncated, damaged or of another kind: copy or download it again"
            )
            raise ValueError(
                f"{file.name} of {name!r} ({file.stat().st_size} bytes) cannot be read as safetensors: {why}."
            ) from error
    return stored


def _check_hashes(folder: Path, blobs: Path, known: set[str]) -> None:
    """Compares files that were just downloaded with their hashes on the Hub; the client compares sizes only.

    A blob in the cache is named after its hash: SHA-256, or for small files git's SHA-1.

    Raises:
        OSError: a file has another hash; it is removed from the cache.
    """
    for entry in folder.rglob("*"):
        blob = entry.resolve()
        if blob.parent != blobs.resolve() or blob.name in known:
            continue
        with blob.open("rb") as data:
            digest = sha_fileobj(data).hex() if len(blob.name) == 64 else git_hash(data.read())
        if digest != blob.name:
            entry.unlink()
            blob.unlink()
            raise OSError(
                f"{entry.name} was downloaded with the hash {digest[:12]}..., but has the hash "
                f"{blob.name[:12]}... on the Hub: it was damaged or changed during the download, and was removed"
            )


def _refuse_link(entry: Path, folder: Path, name: str) -> None:
    """Raises ValueError if a file of a checkpoint, or one of its parent folders, is a link out of the checkpoint.

    The Hub cache has a snapshot in `<repo>/snapshots/<commit>`, whose files are links to `<repo>/blobs`.
    """
    inside, real = folder.resolve(), entry.resolve()
    blobs = [parent.parent / "blobs" for parent in inside.parents if parent.name == "snapshots"][:1]
    if not any(place in real.parents for place in (inside, *blobs)):
        raise ValueError(
            f"{entry.relative_to(folder)} of {name!r} is a link to {str(real)!r}, outside the folder, and such files "
            "are not opened. Copy the file into the folder, or give the folder that contains it."
        )


def _present(folder: Path) -> list[str]:
    """Names of the files in a folder; none if the folder does not exist, as for a snapshot without matching files."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
