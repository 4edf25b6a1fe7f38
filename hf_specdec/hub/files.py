"""The files of a checkpoint: where they are, what they hold, and whether they can be trusted to be whole.

Only JSON and safetensors files are downloaded or opened, and no Python; pickles only where a format asks for one by
name, and then without running anything in it. Nothing here knows a drafter format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode, snapshot_download
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# safetensors' names of the types a drafter may be stored in.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of tables that a network looks things up in; such a tensor must be of the very type.
WHOLE_DTYPES = {"I64": torch.int64, "BOOL": torch.bool}


@dataclass(frozen=True)
class Source:
    """What the user asked for.

    Attributes:
        name: a folder or a Hub id.
        revision: branch, tag or commit on the Hub.
        token: for private repos; None for the stored one.
        local_files_only: never asks the Hub.
        cache_dir: of the Hub client.
    """

    name: str
    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    local_files_only: bool = False
    cache_dir: str | os.PathLike[str] | None = None

    def locate(self, patterns: Sequence[str], revision: str | None = None) -> Path:
        """The folder with the files that match, downloaded where needed.

        Args:
            patterns: of file names.
            revision: the commit of an earlier call, so that all files are of one state; None for the user's.

        Raises:
            OSError: there is no such folder or repo, or it cannot be had; says what was tried and the way out.
            ValueError: the name is neither a folder nor a Hub id, or a revision was given for a folder.
        """
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            if self.revision is not None:
                raise ValueError(
                    f"revision={self.revision!r} was given, but {self.name!r} is a local folder, which has none. Leave "
                    "revision out, or give a Hub id that no folder here is named like."
                )
            return folder
        if folder.is_file():
            raise NotADirectoryError(f"{self.name!r} is a file; give the folder of config.json and the weights.")
        if folder.is_absolute() or self.name.startswith((".", "~")) or self.name.count("/") > 1:
            raise FileNotFoundError(
                f"There is no folder {self.name!r}, and it cannot be a Hub id, which has the form 'owner/name'."
            )
        try:
            return Path(
                snapshot_download(
                    self.name,
                    revision=revision or self.revision,
                    token=self.token,
                    local_files_only=self.local_files_only,
                    cache_dir=None if self.cache_dir is None else os.fspath(self.cache_dir),
                    allow_patterns=list(patterns),
                )
            )
        except HFValidationError as error:
            raise ValueError(
                f"{self.name!r} is neither a folder here nor a Hub id, which has the form 'owner/name': {error}"
            ) from error
        except (HTTPError, OSError) as error:
            raise OSError(self._explain(error)) from error

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
        name: what the user asked for, for the message.

    Raises:
        FileNotFoundError: it is not there; lists what is.
        ValueError: it is no JSON object.
    """
    if not file.is_file():
        present = ", ".join(_present(file.parent)) or "none that a drafter consists of"
        raise FileNotFoundError(
            f"{name!r} has no {file.name}, so it is not a drafter checkpoint. Files there: {present}."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name} of {name!r} is not valid JSON ({error}); copy or download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} of {name!r} holds a {type(content).__name__}, but must hold a JSON object.")
    return content


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of a safetensors file describes it."""

    shape: tuple[int, ...]
    dtype: str
    file: Path

    @classmethod
    def beside(cls, tensor: Tensor, file: Path) -> StoredTensor:
        """The same description of a tensor that a file beside the weights held."""
        names = {dtype: name for name, dtype in (DTYPES | WHOLE_DTYPES).items()}
        return cls(tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)), file)


def weight_files(folder: Path, name: str, pickles: Sequence[str] = ()) -> list[Path]:
    """The weight files of a checkpoint: one, or the shards that its index lists.

    Args:
        folder: where they are.
        name: what the user asked for, for messages.
        pickles: names of files that the format may have in place of safetensors.

    Raises:
        FileNotFoundError: there are none, or a shard is missing; says what is there.
        ValueError: the index names a file outside the folder.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        if known := [folder / pickle for pickle in pickles if (folder / pickle).is_file()]:
            return known[:1]
        present = _present(folder)
        pickled = [file for file in present if file.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        why = (
            f" {', '.join(pickled)} would have to be unpickled, which can run code: convert it to safetensors first."
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
        # The index is data from elsewhere: it may name files of its own folder, nothing else.
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{INDEX_FILE} of {name!r} names the shard {shard!r}; shards must be safetensors files in the same "
                "folder. The checkpoint is damaged or hostile: nothing was opened."
            )
        if not (folder / shard).is_file():
            raise FileNotFoundError(
                f"{name!r} lacks the shard {shard!r}, one of {len(shards)} that its index lists; copy or download it."
            )
    return [folder / shard for shard in shards]


def read_headers(files: Sequence[Path], name: str) -> dict[str, StoredTensor]:
    """What the weight files hold, without reading the weights.

    Raises:
        ValueError: a file is no safetensors file, is truncated, or repeats a tensor.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if file.suffix != ".safetensors":
            stored |= {key: StoredTensor.beside(tensor, file) for key, tensor in load_tensors(file, name).items()}
            continue
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (it is no mapping)
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


def load_tensors(file: Path, name: str) -> dict[str, Tensor]:
    """Loads a weight file to host memory; a pickle with `weights_only`, which runs nothing that is in it.

    Tensors of a pickle may be views that claim any shape: check shapes before copying one.

    Raises:
        ValueError: a pickle is damaged or holds anything but tensors by name.
    """
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damage shows as errors of many kinds; whatever it is, nothing was run
        raise ValueError(
            f"{file.name} of {name!r} ({file.stat().st_size} bytes) cannot be read as plain tensors: it is damaged, or "
            f"holds objects whose loading would run code ({type(error).__name__}). Nothing in it was run: use a "
            "drafter saved as safetensors."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ValueError(f"{file.name} of {name!r} must hold tensors by name, but holds something else.")
    return {str(key): tensor for key, tensor in content.items()}


def check_tensors(expected: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], name: str, kind: str) -> None:
    """Compares what a network needs with what the files hold.

    Args:
        expected: the network's state dict, on any device.
        stored: headers, without those that the format lets a file have in addition.
        name: what the user asked for.
        kind: what it was recognised as.

    Raises:
        ValueError: a tensor is missing, not expected, or of another shape or an unsupported type; names them.
    """
    problems = []
    if missing := [key for key in expected if key not in stored]:
        problems.append(f"missing: {_some(missing)}")
    if unexpected := [key for key in stored if key not in expected]:
        problems.append(f"not part of it: {_some(unexpected)}")
    shapes = [
        f"{key} is {list(stored[key].shape)} in {stored[key].file.name}, but config.json makes it {list(tensor.shape)}"
        for key, tensor in expected.items()
        if key in stored and stored[key].shape != tuple(tensor.shape)
    ]
    if shapes:
        problems.append(f"of another shape: {_some(shapes)}")
    tables = {key: tensor for key, tensor in expected.items() if key in stored and not tensor.is_floating_point()}
    wrong = [
        f"{key} is {stored[key].dtype}, not {tensor.dtype}"
        for key, tensor in tables.items()
        if WHOLE_DTYPES.get(stored[key].dtype) != tensor.dtype
    ]
    if wrong:
        problems.append(f"of another type: {_some(wrong)}")
    types = [
        f"{key} is {tensor.dtype}" for key, tensor in stored.items() if key not in tables and tensor.dtype not in DTYPES
    ]
    if types:
        problems.append(f"not of a floating-point type that can be loaded ({', '.join(DTYPES)}): {_some(types)}")
    if problems:
        raise ValueError(
            f"The weights of {name!r} are not those of the {kind} drafter that its config.json describes. "
            f"{'; '.join(problems)}. Nothing was loaded: check that weights and config.json are of one checkpoint."
        )


def _present(folder: Path) -> list[str]:
    """Names of what is in a folder; a snapshot of which no file was wanted has none."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _some(items: Sequence[str], most: int = 5) -> str:
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")
