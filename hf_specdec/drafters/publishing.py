"""PublishedDrafter: a drafter with a folder or repo of its own, its records, model card and way to the Hub.

What the card says is in `card.py`, the code that goes with the weights in `custom_generate.py`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
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
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.card import (
    CARD_FILE,
    MEASUREMENTS_FILE,
    TRAINING_FILE,
    Record,
    is_generated,
    is_hub_id,
    model_card,
    read_record,
    write_record,
)
from hf_specdec.drafters.custom_generate import write_custom_generate
from hf_specdec.drafters.options import DrafterOptions
from hf_specdec.drafters.registry import FAMILIES

_RECORDS = {
    TRAINING_FILE: ("training_record", "it tells of the weights that were replaced"),
    MEASUREMENTS_FILE: ("measurements", "it was measured with the weights that were replaced"),
}


class PublishedDrafter(Drafter):
    """A drafter that is saved, described by a card and published.

    Attributes:
        measurements: what was measured of these very weights, see `card.py`; set it to None when they change.
        training_record: how these weights were trained, see `card.py`.
        fits: which targets it can draft for, a sentence of the card.
    """

    # Files of the format that hold tensors, beside the main weights; see `PretrainedDrafter.side_tensors`.
    side_files: ClassVar[tuple[str, ...]] = ()
    # Files that `PretrainedDrafter.load_beside` asks for, once those weights are loaded.
    late_files: ClassVar[tuple[str, ...]] = ()
    measurements: Record | None = None
    training_record: Record | None = None
    fits = "A drafter fits only the target it was trained for."

    @property
    @abstractmethod
    def target_name_or_path(self) -> str | None:
        """The target it was trained for, if known."""

    @property
    @abstractmethod
    def target_revision(self) -> str | None:
        """The commit or branch of that target, if known."""

    @abstractmethod
    def count_parameters(self) -> int:
        """Numbers in its weights."""

    @abstractmethod
    def save_weights(self, folder: Path, max_shard_size: str | int | None) -> None:
        """Writes config and weights and nothing else."""

    @abstractmethod
    def card_summary(self) -> str:
        """One or two sentences on the method, for the model card."""

    def card_facts(self) -> dict[str, str]:
        """Rows for the table at the top of the model card."""
        return {}

    @property
    @abstractmethod
    def options_config(self) -> PreTrainedConfig:
        """The config whose `drafting_options` are the options that were loaded or last saved."""

    def loaded_options(self) -> Any:
        """The options that the checkpoint loads with; those in use may have been changed since.

        Raises:
            ValueError: those of the config are none, or out of range.
        """
        saved = getattr(self.options_config, "drafting_options", None)
        return self.options_class.from_dict({} if saved is None else saved, self.options_config)

    def keep_options(self) -> None:
        """The options of this moment become those that the checkpoint loads with; part of every save.

        Raises:
            ValueError: one is out of range, so that what would be saved could not be loaded.
        """
        self.validate_options(self.options)
        saved = self.options.to_dict(self.options_config)
        if saved or hasattr(self.options_config, "drafting_options"):
            self.options_config.drafting_options = saved

    def validate_options(self, options: DrafterOptions) -> None:
        options.validate(self.options_config)

    def model_card(
        self,
        name: str | None = None,
        *,
        revision: str | None = None,
        license: str | None = None,
        tags: str | Iterable[str] = (),
    ) -> ModelCard:
        """The card that `save_pretrained` and `push_to_hub` write.

        Args:
            name: what users will give to `load_drafter`; the last part of where it was loaded from if None.
            revision: branch of that repo; None for the main one.
            license: Hub licence id; the training record's where None.
            tags: beside the general ones and the family's; one or several.

        Raises:
            ValueError: the measurements lack a field.
        """
        tags = [tags] if isinstance(tags, str) else tags
        return model_card(
            name=name or Path(getattr(self, "name_or_path", "")).name or type(self).__name__,
            summary=self.card_summary(),
            fits=self.fits,
            facts=self.card_facts() | {"Parameters": f"{self.count_parameters():,}"},
            tags=[*(family.name for family in FAMILIES.values() if isinstance(self, family.drafter)), *tags],
            target=self.target_name_or_path,
            target_revision=self.target_revision,
            revision=revision,
            license=license,
            training=self.training_record,
            measurements=self.measurements,
        )

    @contextmanager
    def config_for(self, folder: Path | None) -> Iterator[None]:
        """Around writing config, weights and card: the config says what it is to say there.

        Args:
            folder: where they go; None for the Hub.
        """
        yield

    @contextmanager
    def replacing_weights(self, folder: Path) -> Iterator[None]:
        """Around saving to a folder: nothing is left of other weights that were there, shards and records included.

        Records go with a warning, and only those that the drafter does not have: its own are written later.
        """
        theirs = [
            (folder / file, why)
            for file, (attribute, why) in _RECORDS.items()
            if getattr(self, attribute) is None and (folder / file).is_file()
        ]
        before = _weights_digest(folder) if theirs else []
        with one_layout(folder):
            yield
        if before and before != _weights_digest(folder):
            for record, why in theirs:
                record.unlink()
                warnings.warn(f"{record} was removed: {why}.", stacklevel=4)

    def write_records(
        self, folder: str | os.PathLike[str], name: str | None = None, *, license: str | None = None
    ) -> None:
        """Writes the records and the model card beside weights that are saved already, as after a measurement.

        A record that the drafter does not have is taken from the folder. A README.md that was not generated, or whose
        marker line was removed, is left as it is.

        Args:
            folder: where the weights are.
            name: as for `model_card`; if None, a relative folder as it is given, of an absolute one the last part.
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
        for file, (attribute, _) in _RECORDS.items():
            if getattr(self, attribute) is not None:
                write_record(folder, file, getattr(self, attribute))
            else:
                setattr(self, attribute, read_record(folder, file))
        card = folder / CARD_FILE
        if not card.exists() or is_generated(card):
            # Where a folder of this machine lies means nothing to a reader; one within a project can be followed.
            within = folder.name and not folder.is_absolute()
            name = name or (folder.as_posix() if within else folder.resolve().name)
            with self.config_for(folder):
                card.write_text(self.model_card(name, license=license).content, encoding="utf-8")

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
        tags: str | Iterable[str] = (),
        tag: str | None = None,
        max_shard_size: str | int | None = "50GB",
    ) -> CommitInfo:
        """Publishes config, weights, records and model card, as one commit; creates the repo where needed.

        A README.md in the repo that was not generated, or whose marker line was removed, is left as it is. With the
        drafter goes a `custom_generate/generate.py`, see `custom_generate.py`. An upload that breaks off leaves no
        commit; the same call again sends what is missing.

        Args:
            repo_id: `owner/name`, or a name in your own namespace.
            commit_message: subject of the commit.
            commit_description: its body.
            private: whether a repo that has to be created is private; None for the namespace's default.
            token: with write access; None for the stored one.
            revision: branch to commit to, made where needed; None for the main one.
            create_pr: opens a pull request in place of a commit.
            license: Hub licence id for the card; the training record's where None.
            tags: further tags for the card, one or several.
            tag: git tag for this commit, for `load_drafter(..., revision=tag)`; such as "v1".
            max_shard_size: of one weight file.

        Returns:
            The commit, as the Hub answered.

        Raises:
            OSError: offline, not logged in, the Hub refused, or it has this tag already; the message says which and
                what to do.
            ValueError: the measurements lack a field, or a drafting option is out of range; nothing is uploaded.
        """
        target = self.target_name_or_path
        if target is not None and not is_hub_id(target):
            warnings.warn(
                f"The target of this drafter is recorded as {target!r}, which others cannot load: set "
                "drafter.config.target_name_or_path to the target's Hub id before publishing.",
                stacklevel=2,
            )
        self.keep_options()
        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as temporary, self.config_for(None), _hub_errors(repo_id):
            folder = Path(temporary) / "drafter"
            self.save_weights(folder, max_shard_size)
            self.write_records(folder, repo_id, license=license)  # a record that cannot be used creates no repo
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/pr"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            card = folder / CARD_FILE
            if _card_is_ours(api, repo_id, revision, Path(temporary) / "published"):
                made = self.model_card(repo_id, revision=revision, license=license, tags=tags)
                card.write_text(made.content, encoding="utf-8")
            else:
                card.unlink()
            write_custom_generate(folder, repo_id, revision)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
                # What is uploaded is not deleted. Shards of an earlier, larger upload, records of other weights and
                # files of another family would otherwise stay beside the new ones.
                delete_patterns=[
                    "model*.safetensors",
                    "model.safetensors.index.json",
                    TRAINING_FILE,
                    MEASUREMENTS_FILE,
                    *(
                        pattern
                        for family in FAMILIES.values()
                        for pattern in (*family.drafter.side_files, *family.drafter.late_files)
                    ),
                ],
            )
            if tag is not None:
                _set_tag(api, repo_id, tag, commit.oid)
            return commit


@contextmanager
def one_layout(folder: Path) -> Iterator[None]:
    """Around saving weights to a folder: one file or shards that an earlier save left there in the other layout go.

    transformers removes no index and no single file, and readers take the latter before they look for shards.
    """
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    earlier = index.read_bytes() if index.is_file() else None
    index.unlink(missing_ok=True)
    try:
        yield
    finally:
        if index.is_file():
            single.unlink(missing_ok=True)
        elif earlier is not None and not single.is_file():
            index.write_bytes(earlier)  # nothing was written


def _weights_digest(folder: Path) -> list[tuple[str, str]]:
    """Name and SHA-256 of every weight file in a folder."""
    digests = []
    for file in sorted(folder.rglob("*.safetensors")):
        digest = hashlib.sha256()
        with file.open("rb") as data:
            while part := data.read(1 << 24):
                digest.update(part)
        digests.append((file.relative_to(folder).as_posix(), digest.hexdigest()))
    return digests


def _set_tag(api: HfApi, repo_id: str, tag: str, commit: str) -> None:
    try:
        api.create_tag(repo_id, tag=tag, revision=commit)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        raise OSError(
            f"The drafter was uploaded to {repo_id!r} as commit {commit}, but the tag {tag!r} is there already, at an "
            "earlier commit. Tags stay where they are: choose another."
        ) from error


def _card_is_ours(api: HfApi, repo_id: str, revision: str | None, folder: Path) -> bool:
    """Whether a repo has no card yet, or one that we generated; downloads it to `folder`."""
    try:
        card = api.hf_hub_download(repo_id, CARD_FILE, revision=revision, local_dir=folder)
    except EntryNotFoundError:
        return True
    return is_generated(Path(card))


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
