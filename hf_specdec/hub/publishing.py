"""PublishedDrafter: a drafter that can be saved and published, with its records and model card.

The text of the card is in `card.py`, the code published with the weights in `custom_generate.py`.
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
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.options import DrafterOptions
from hf_specdec.drafting.registry import FAMILIES, LOADERS, is_hub_id
from hf_specdec.hub.card import (
    CARD_FILE,
    MEASUREMENTS_FILE,
    TRAINING_FILE,
    Record,
    is_generated,
    model_card,
    read_record,
    write_record,
)
from hf_specdec.hub.custom_generate import write_custom_generate
from hf_specdec.hub.saving import saved_whole

_RECORDS = {
    TRAINING_FILE: ("training_record", "it describes the weights that were replaced"),
    MEASUREMENTS_FILE: ("measurements", "it was measured with the weights that were replaced"),
}


class PublishedDrafter(Drafter):
    """A drafter that is saved, described by a card and published.

    Attributes:
        measurements: measured with exactly these weights, see `card.py`; set it to None when the weights change.
        training_record: how these weights were trained, see `card.py`.
        card_summary: one or two sentences of the card on the method.
        fits: a sentence of the card that says for which targets it can draft.
    """

    # Further files of the format that hold tensors; see `PretrainedDrafter.side_tensors`.
    side_files: ClassVar[tuple[str, ...]] = ()
    # Those that a save writes anew: others of these names in its folder, which would be loaded too, are removed.
    saved_side_files: ClassVar[tuple[str, ...]] = ()
    # Files that `PretrainedDrafter.load_beside` reads after those weights are loaded.
    late_files: ClassVar[tuple[str, ...]] = ()
    measurements: Record | None = None
    training_record: Record | None = None
    card_summary: ClassVar[str]
    fits = "A drafter fits only the target it was trained for."

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads what `load_drafter` reads, with its arguments; the checkpoint has to be of this class.

        Raises:
            OSError, TypeError, ValueError: as `load_drafter`; or the drafter is of another class.
        """
        drafter = LOADERS[-1](pretrained_model_name_or_path, *args, **kwargs)
        if not isinstance(drafter, cls):
            kind, name = type(drafter).__name__, str(pretrained_model_name_or_path)
            raise ValueError(f"{name!r} is a {kind}, not a {cls.__name__}: use load_drafter, or {kind}.")
        return drafter

    @property
    @abstractmethod
    def saved_model(self) -> PreTrainedModel:
        """The model whose config and weights are saved."""

    @property
    def options_config(self) -> PreTrainedConfig:
        """The config whose `drafting_options` are the options as loaded or last saved."""
        return self.saved_model.config

    @property
    def target_name_or_path(self) -> str | None:
        """The target it was trained for, if known; the config of a plain language model does not name it."""
        return getattr(self.options_config, "target_name_or_path", None) or (self.training_record or {}).get("target")

    @property
    def target_revision(self) -> str | None:
        """The commit or branch of that target, if known."""
        named = getattr(self.options_config, "target_revision", None)
        return named or (self.training_record or {}).get("target_revision")

    @abstractmethod
    def without_adapters(self) -> PublishedDrafter:
        """This drafter, or if it has PEFT adapters a copy that drafts the same without: what is saved."""

    @abstractmethod
    def save_weights(self, folder: Path, max_shard_size: str | int | None) -> None:
        """Writes only config and weights."""

    def card_facts(self) -> dict[str, str]:
        """Rows for the table at the top of the model card."""
        return {}

    def loaded_options(self) -> Any:
        """The options as stored in the config; `options` may have been changed since.

        Raises:
            ValueError: the stored options are not valid.
        """
        saved = getattr(self.options_config, "drafting_options", None)
        return self.options_class.from_dict({} if saved is None else saved, self.options_config)

    def store_options(self) -> None:
        """Stores the current options in the config; part of every save.

        Raises:
            ValueError: an option is out of range, so the saved checkpoint could not be loaded.
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
            name: what users pass to `load_drafter`; None for the last part of the path it was loaded from.
            revision: branch of that repo; None for the main one.
            license: Hub licence id; None for the training record's.
            tags: one or several, in addition to the general ones and the family's.

        Raises:
            ValueError: the measurements lack a field.
        """
        tags = [tags] if isinstance(tags, str) else tags
        module = type(self).__module__
        return model_card(
            name=name or Path(getattr(self, "name_or_path", "")).name or type(self).__name__,
            summary=self.card_summary,
            fits=self.fits,
            facts=self.card_facts() | {"Parameters": f"{self.saved_model.num_parameters():,}"},
            tags=[*(family.name for family in FAMILIES.values() if isinstance(self, family.drafter)), *tags],
            target=self.target_name_or_path,
            target_revision=self.target_revision,
            revision=revision,
            license=license,
            training=self.training_record,
            measurements=self.measurements,
            module=None if module.startswith("hf_specdec.") else module,
        )

    @contextmanager
    def config_for(self, folder: Path | None) -> Iterator[None]:
        """While config, weights and card are written: adapts the config to the destination.

        Args:
            folder: the destination; None for the Hub.
        """
        yield

    @contextmanager
    def replacing_weights(self, folder: Path) -> Iterator[Path]:
        """While saving to a folder: gives the one to write to, see `saved_whole`; removes records of other weights.

        Records are removed with a warning, and only those that the drafter lacks: its own are written later.
        """
        old_records = [
            (folder / file, why)
            for file, (attribute, why) in _RECORDS.items()
            if getattr(self, attribute) is None and (folder / file).is_file()
        ]
        before = _weights_digest(folder) if old_records else []
        with saved_whole(folder, self.saved_side_files) as unfinished:
            yield unfinished
        if before and before != _weights_digest(folder):
            for record, why in old_records:
                record.unlink()
                warnings.warn(f"{record} was removed: {why}.", stacklevel=4)

    def write_records(
        self, folder: str | os.PathLike[str], name: str | None = None, *, license: str | None = None
    ) -> None:
        """Writes the records and the model card to a folder with saved weights, for example after a measurement.

        A record that the drafter lacks is read from the folder. A README.md that was not generated, or whose marker
        line was removed, is not changed.

        Args:
            folder: where the weights are.
            name: as for `model_card`; None for the folder as given if relative, and for its last part if absolute.
            license: Hub licence id for the card; None for the training record's.

        Raises:
            NotADirectoryError: the folder does not exist.
            ValueError: the measurements lack a field.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise NotADirectoryError(
                f"Cannot write records to {str(folder)!r}: it is not a folder. Save the drafter there first."
            )
        for file, (attribute, _) in _RECORDS.items():
            if getattr(self, attribute) is not None:
                write_record(folder, file, getattr(self, attribute))
            else:
                setattr(self, attribute, read_record(folder, file))
        card = folder / CARD_FILE
        if not card.exists() or is_generated(card):
            # An absolute path is only valid on this machine; a relative one can be valid within a project.
            relative = folder.name and not folder.is_absolute()
            name = name or (folder.as_posix() if relative else folder.resolve().name)
            with self.config_for(folder):
                card.write_text(self.model_card(name, license=license).content, encoding="utf-8")

    def push_to_hub(  # returns the commit itself, which is a str like transformers'
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
        """Publishes config, weights, records and model card as one commit; creates the repo if needed.

        A README.md in the repo that was not generated, or whose marker line was removed, is not changed. A
        `custom_generate/generate.py` is published too, see `custom_generate.py`. An interrupted upload leaves no
        commit; the same call again uploads only what is missing.

        Args:
            repo_id: `owner/name`, or a name in your own namespace.
            commit_message: subject of the commit.
            commit_description: its body.
            private: whether a newly created repo is private; None for the namespace's default.
            token: with write access; None for the stored one.
            revision: branch to commit to, created if needed; None for the main one.
            create_pr: opens a pull request instead of a commit.
            license: Hub licence id for the card; None for the training record's.
            tags: further tags for the card, one or several.
            tag: git tag for this commit, for `load_drafter(..., revision=tag)`; such as "v1".
            max_shard_size: of one weight file.

        Returns:
            The commit, as returned by the Hub.

        Raises:
            OSError: offline, not logged in, refused by the Hub, or the tag exists already; the message says which and
                what to do.
            ValueError: the measurements lack a field, or a drafting option is out of range; nothing is uploaded.
        """
        drafter = self.without_adapters()
        target = drafter.target_name_or_path
        if target is not None and not is_hub_id(target):
            warnings.warn(
                f"The target of this drafter is recorded as {target!r}, which others cannot load: set "
                "drafter.config.target_name_or_path to the target's Hub id before publishing.",
                stacklevel=2,
            )
        drafter.store_options()
        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as temporary, drafter.config_for(None), _hub_errors(repo_id):
            folder = Path(temporary) / "drafter"
            drafter.save_weights(folder, max_shard_size)
            drafter.write_records(folder, repo_id, license=license)  # validates records before a repo is created
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if tag is not None and api.revision_exists(repo_id, tag):
                raise OSError(
                    f"{repo_id!r} already has the tag {tag!r}, which will not be moved; nothing was uploaded: choose "
                    "another tag."
                )
            if revision is not None and not revision.startswith("refs/pr"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            card = folder / CARD_FILE
            if _card_is_ours(api, repo_id, revision, Path(temporary) / "published"):
                made = drafter.model_card(repo_id, revision=revision, license=license, tags=tags)
                card.write_text(made.content, encoding="utf-8")
            else:
                card.unlink()
            write_custom_generate(folder, repo_id, revision)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {type(drafter).__name__}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
                # An upload deletes nothing: without these patterns, shards of an earlier, larger upload, records of
                # other weights and files of another family would remain.
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
                api.create_tag(repo_id, tag=tag, revision=commit.oid)
            return commit


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


def _card_is_ours(api: HfApi, repo_id: str, revision: str | None, folder: Path) -> bool:
    """Whether a repo has no card yet, or one that we generated; downloads it to `folder`."""
    try:
        card = api.hf_hub_download(repo_id, CARD_FILE, revision=revision, local_dir=folder)
    except EntryNotFoundError:
        return True
    return is_generated(Path(card))


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Replaces errors of the Hub while publishing to a repo by ones that name the way out."""
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
