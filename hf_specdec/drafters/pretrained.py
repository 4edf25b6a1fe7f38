"""PretrainedDrafter: a drafter with weights. Loads strictly, saves with a model card, publishes to the Hub.

Finding and checking files is the business of `hub/loading.py`; what the card says is in `card.py`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is not in its __all__
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.card import (
    CARD_FILE,
    MEASUREMENTS_FILE,
    TRAINING_FILE,
    Record,
    is_hub_id,
    may_overwrite,
    model_card,
    read_record,
    write_record,
)
from hf_specdec.drafters.registry import FAMILIES


class PretrainedDrafter(PreTrainedModel, Drafter):
    """A drafter that is a network.

    Its config has `target_name_or_path`, `target_revision` and `target_tokenizer_sha256` (see `fingerprint.py`), None
    where unknown.

    Attributes:
        measurements: what was measured of these very weights, see `card.py`; set it to None when they change.
        training_record: how these weights were trained, see `card.py`.
    """

    measurements: Record | None = None
    training_record: Record | None = None
    # Further files of the format that hold tensors; see `side_tensors`.
    side_files: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def side_tensors(cls, folder: Path, name: str) -> dict[str, Tensor]:
        """Tensors that `side_files` hold, by their names in the state dict; they win over those among the weights.

        Args:
            folder: where the checkpoint is; the files may be missing.
            name: what the user asked for, for messages.

        Raises:
            ValueError: a file is damaged or holds something else.
        """
        return {}

    def load_beside(self, folder: Path, locate: Callable[[list[str]], Path]) -> None:
        """Loads what a checkpoint names but does not hold among its weights; called once they are loaded.

        Args:
            folder: where the checkpoint is.
            locate: brings further files of the checkpoint, by patterns, and says in which folder they are.

        Raises:
            OSError, ValueError: it is not there, or does not fit.
        """

    def card_summary(self) -> str:
        """One or two sentences on the method, for the model card."""
        raise NotImplementedError(f"{type(self).__name__}.card_summary")

    def card_facts(self) -> dict[str, str]:
        """Rows for the table at the top of the model card."""
        return {}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but a weight that is missing, unexpected or of another shape is an error.

        Raises:
            ValueError: the checkpoint is not of this architecture; names the weights.
        """
        return_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        drafter, info = loaded
        for kind in ("missing", "unexpected", "mismatched"):
            if info[f"{kind}_keys"]:
                names = sorted(str(key) for key in info[f"{kind}_keys"])
                raise ValueError(
                    f"{str(pretrained_model_name_or_path)!r} is no {cls.__name__} checkpoint: {kind} weights "
                    f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}. Nothing was loaded; load_drafter() "
                    "says what the files are."
                )
        return (drafter, info) if return_info else drafter

    def save_pretrained(  # the host's further arguments are in kwargs
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Saves config, weights (safetensors only), records and a generated model card.

        A README.md that is there already and was not generated, or whose marker line was removed, is left as it is.

        Args:
            save_directory: where to; made if needed.
            is_main_process: whether this process writes what belongs to no process in particular.
            state_dict: weights to save in place of the drafter's own.
            push_to_hub: also publishes, as `push_to_hub` does, to `repo_id` or the folder's name.
            kwargs: for transformers (`max_shard_size`, ...) or, with `push_to_hub`, for `push_to_hub`.

        Raises:
            NotADirectoryError: `save_directory` is a file.
            ValueError: the measurements lack a field; weights and config are saved by then.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise NotADirectoryError(f"Cannot save a drafter to {str(folder)!r}: it is a file. Give a folder.")
        hub = {}
        if push_to_hub:
            hub = {name: kwargs.pop(name) for name in list(kwargs) if name in _HUB_ARGUMENTS}
        measured = folder / MEASUREMENTS_FILE
        replaced = _weights_digest(folder) if self.measurements is None and measured.is_file() else None
        super().save_pretrained(folder, is_main_process=is_main_process, state_dict=state_dict, **kwargs)
        if not is_main_process:
            return
        if replaced is not None and replaced != _weights_digest(folder):
            measured.unlink()
            warnings.warn(f"{measured} was removed: it was measured with the weights that were replaced.", stacklevel=2)
        self.write_records(folder)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", folder.resolve().name), **hub)

    def model_card(self, name: str | None = None, *, license: str | None = None, tags: Iterable[str] = ()) -> ModelCard:
        """The card that `save_pretrained` and `push_to_hub` write.

        Args:
            name: what users will give to `load_drafter`; the last part of where it was loaded from if None.
            license: Hub licence id; the training record's where None.
            tags: beside the general ones and the family's.

        Raises:
            ValueError: the measurements lack a field.
        """
        return model_card(
            name=name or Path(self.name_or_path or "").name or type(self).__name__,
            summary=self.card_summary(),
            facts=self.card_facts() | {"Parameters": f"{self.num_parameters():,}"},
            tags=[*(family.name for family in FAMILIES.values() if isinstance(self, family.drafter)), *tags],
            target=self.config.target_name_or_path,
            target_revision=self.config.target_revision,
            license=license,
            training=self.training_record,
            measurements=self.measurements,
        )

    def write_records(
        self, folder: str | os.PathLike[str], name: str | None = None, *, license: str | None = None
    ) -> None:
        """Writes the records and the model card beside weights that are saved already, as after a measurement.

        A record that the drafter does not have is taken from the folder. A README.md that was not generated, or whose
        marker line was removed, is left as it is.

        Args:
            folder: where the weights are.
            name: as for `model_card`; the folder's if None.
            license: Hub licence id for the card; the training record's where None.

        Raises:
            NotADirectoryError: there is no such folder.
            ValueError: the measurements lack a field.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise NotADirectoryError(
                f"Cannot write records to {str(folder)!r}: it is no folder. Save the drafter there."
            )
        for file, attribute in ((TRAINING_FILE, "training_record"), (MEASUREMENTS_FILE, "measurements")):
            if getattr(self, attribute) is not None:
                write_record(folder, file, getattr(self, attribute))
            else:
                setattr(self, attribute, read_record(folder, file))
        card = folder / CARD_FILE
        if not card.exists() or may_overwrite(card.read_text(encoding="utf-8")):
            card.write_text(self.model_card(name or folder.resolve().name, license=license).content, encoding="utf-8")

    def push_to_hub(  # gives the commit itself, a str as the host's
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        license: str | None = None,
        tags: Iterable[str] = (),
        max_shard_size: str | int | None = "50GB",
    ) -> CommitInfo:
        """Publishes config, weights, records and model card, as one commit; creates the repo where needed.

        A README.md in the repo that was not generated, or whose marker line was removed, is left as it is.

        Args:
            repo_id: `owner/name`, or a name in your own namespace.
            commit_message: subject of the commit.
            commit_description: its body.
            private: whether a repo that has to be created is private; None for the namespace's default.
            token: with write access; None for the stored one.
            revision: branch to commit to, made where needed; None for the main one.
            create_pr: opens a pull request in place of a commit.
            license: Hub licence id for the card; the training record's where None.
            tags: further tags for the card.
            max_shard_size: of one weight file.

        Returns:
            The commit, as the Hub answered.

        Raises:
            OSError: offline, not logged in, or the Hub refused; the message says which and what to do.
            ValueError: the measurements lack a field; nothing is uploaded.
        """
        target = self.config.target_name_or_path
        if target is not None and not is_hub_id(target):
            warnings.warn(
                f"The target of this drafter is recorded as {target!r}, which others cannot load: set "
                "drafter.config.target_name_or_path to the target's Hub id before publishing.",
                stacklevel=2,
            )
        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as temporary, _hub_errors(repo_id):
            folder = Path(temporary) / "drafter"
            super().save_pretrained(folder, max_shard_size=max_shard_size)
            self.write_records(folder, repo_id, license=license)  # a record that cannot be used creates no repo
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/pr"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            card = folder / CARD_FILE
            if _card_is_ours(api, repo_id, revision, Path(temporary) / "published"):
                card.write_text(self.model_card(repo_id, license=license, tags=tags).content, encoding="utf-8")
            else:
                card.unlink()
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
                # Shards of an earlier, larger upload would otherwise stay beside the new weights.
                delete_patterns=["model*.safetensors", "model.safetensors.index.json"],
            )


def _card_is_ours(api: HfApi, repo_id: str, revision: str | None, folder: Path) -> bool:
    """Whether a repo has no card yet, or one that we generated; downloads it to `folder`."""
    try:
        card = api.hf_hub_download(repo_id, CARD_FILE, revision=revision, local_dir=folder)
    except EntryNotFoundError:
        return True
    return may_overwrite(Path(card).read_text(encoding="utf-8"))


def _weights_digest(folder: Path) -> list[tuple[str, str]]:
    """Name and SHA-256 of every weight file in a folder."""
    digests = []
    for file in sorted(folder.glob("*.safetensors")):
        digest = hashlib.sha256()
        with file.open("rb") as data:
            while part := data.read(1 << 24):
                digest.update(part)
        digests.append((file.name, digest.hexdigest()))
    return digests


_HUB_ARGUMENTS = frozenset(
    ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "license", "tags")
)


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Says what went wrong with the Hub, and the way out, while publishing to a repo."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise OSError(
            f"Cannot publish to {repo_id!r}: offline mode is on (HF_HUB_OFFLINE=1). Unset it, or use "
            "save_pretrained(folder) and upload later."
        ) from error
    except LocalTokenNotFoundError as error:
        raise OSError(
            f"Cannot publish to {repo_id!r}: no token is stored. Run `hf auth login`, or pass token=."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403) or isinstance(error, RepositoryNotFoundError):
            said = f" The Hub said: {error.server_message}" if error.server_message else ""
            raise OSError(
                f"Cannot publish to {repo_id!r}: the Hub refused with status {status}. Log in with `hf auth login` or "
                f"pass token=, with write access to {repo_id!r}.{said}"
            ) from error
        raise OSError(f"Cannot publish to {repo_id!r}: the Hub answered {error}") from error
    except HTTPError as error:
        raise OSError(
            f"Cannot publish to {repo_id!r}: the Hub cannot be reached ({error}). Try again online, or use "
            "save_pretrained(folder) and upload later."
        ) from error
