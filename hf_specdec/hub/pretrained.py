"""PretrainedDrafter: a drafter that is a neural network. Loads strictly, saves with records and a model card.

`hub/loading.py` finds and checks the files; the card and the upload are in `publishing.py`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.pairing import check_mode, check_names, check_taps, check_tokenizer, warn_of_sizes
from hf_specdec.drafting.registry import name_of
from hf_specdec.drafting.targets import check_numbers
from hf_specdec.drafting.wrapped import merged_adapters
from hf_specdec.hub.publishing import PublishedDrafter


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the checkpoint that a drafter was loaded from.

    Attributes:
        file: name of its file.
        name: its name in that file.
        own_name: its name in the drafter's state dict; None if it was not loaded, such as `t2d`.
        shape: its shape.
        dtype: the dtype that it is stored in; the drafter may compute in another one.
    """

    file: str
    name: str
    own_name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SourceLayout:
    """The published checkpoint that a drafter was loaded from; `export_drafter(..., to="source")` writes it again.

    Attributes:
        format: name of the layout.
        folder: the checkpoint's folder; for a Hub repo its snapshot in the cache, which is named after the commit.
        json_files: content of config.json, and of the index of the shards if there are shards.
        tensors: all tensors of the weight files, and of files next to them such as `vocab_mapping.pt`.
        config: a copy of the drafter's config as it was loaded.
    """

    format: str
    folder: Path
    json_files: Mapping[str, bytes]
    tensors: tuple[SourceTensor, ...]
    config: PreTrainedConfig


class PretrainedDrafter(PublishedDrafter, PreTrainedModel):
    """A drafter that is a neural network.

    `source_layout` is set by `load_drafter` for checkpoints in a published layout, and is None for all others.
    Copies of the drafter share it; it is not saved.

    Its config has `target_name_or_path`, `target_revision` and `target_tokenizer_sha256` (see `fingerprint.py`), None
    if unknown. It may have `drafting_options`: those that differed from the defaults when it was saved. They override
    the defaults, and the options given to `load_drafter` override them.
    """

    source_layout: SourceLayout | None = None
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"rotary_emb\.inv_freq$"]

    def post_init(self) -> None:
        self.options = self.loaded_options()
        super().post_init()

    @property
    def saved_model(self) -> PreTrainedModel:
        return self

    @property
    def num_tokens(self) -> int | None:
        """Size of the target's vocabulary at training; None if unknown or not to be compared."""
        size: int | None = self.config.vocab_size
        return size

    def without_adapters(self) -> PretrainedDrafter:
        plain = merged_adapters(self)
        if plain is not self:
            plain.measurements = None  # of other weights
        return plain

    def save_weights(self, folder: Path, max_shard_size: str | int | None) -> None:
        super().save_pretrained(folder, state_dict=self.main_tensors(), max_shard_size=max_shard_size)
        self.write_side_files(folder)

    def check_pairing(self, model: PreTrainedModel, input_ids: Tensor | None = None) -> None:
        known, name = self.known_of(model), name_of(self)
        if "pairing" not in known:
            compared_tokens = check_tokenizer(name, self.config, model)
            if not compared_tokens and self.num_tokens is not None:
                warn_of_sizes(name, self.num_tokens, model)
            check_names(name, self.config, model)
            if self.name_or_path:  # a drafter without a checkpoint was defined here, with our layers
                check_taps(name, self.config, self.training_record, model)
            known["pairing"] = True
        if input_ids is not None and "prompt" not in known:
            check_mode(name, self.training_record, model, input_ids)
            known["prompt"] = True

    @classmethod
    def side_tensors(cls, folder: Path, name: str) -> dict[str, Tensor]:
        """Tensors of `side_files`, by their names in the state dict; they override those in the main weights.

        Args:
            folder: of the checkpoint; the files may be missing.
            name: what the user has passed, for messages.

        Raises:
            ValueError: a file is damaged or holds something else.
        """
        return {}

    def load_beside(
        self,
        folder: Path,
        locate: Callable[[Sequence[str]], Path],
        fetch: Callable[[str], Drafter],
        *,
        from_hub: bool,
    ) -> None:
        """Loads the parts that a checkpoint refers to, after its own weights are loaded.

        Args:
            folder: of the checkpoint.
            locate: downloads further files of the checkpoint, by patterns, and returns their folder.
            fetch: loads a language model as a drafter, by folder or Hub id, with the arguments of this load.
            from_hub: whether the checkpoint is from the Hub. Such a checkpoint must not refer to local paths.

        Raises:
            OSError, ValueError: a part is missing or does not fit.
        """

    def write_side_files(self, folder: Path) -> None:
        """Writes `side_files` after the weights are saved; most formats have none."""

    def main_tensors(self) -> dict[str, Tensor] | None:
        """What goes into the main weight files; None for the whole state dict."""
        return None

    @classmethod
    def of_tensors(cls, config: PreTrainedConfig, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> Any:
        """The drafter of a config and the tensors of its state dict, in `dtype`.

        Raises:
            ValueError: a tensor contains NaN.
        """
        drafter = super(PublishedDrafter, cls).from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
        drafter.name_or_path = drafter.config.name_or_path = config.name_or_path  # transformers names it "None"
        check_numbers(drafter, drafter.name_or_path)
        return drafter

    def save_pretrained(  # kwargs hold transformers' further arguments
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Saves config, weights (safetensors only), records and a generated model card; active adapters are merged.

        All files get their names when all are written. An existing README.md that was not generated, or whose marker
        line was removed, is not changed.

        Args:
            save_directory: created if needed.
            is_main_process: whether this process writes the files that are shared by all processes.
            state_dict: weights to save instead of the drafter's own.
            push_to_hub: also publishes, as `push_to_hub` does, to `repo_id` or the folder's name.
            kwargs: for transformers (`max_shard_size`, ...) or, with `push_to_hub`, for `push_to_hub`.

        Raises:
            NotADirectoryError: `save_directory` is a file.
            OSError: the files cannot be written; what is in the folder stays as it is.
            ValueError: a drafting option is out of range, before anything is saved; or the measurements lack a field,
                after weights and config are saved.
        """
        if state_dict is None and (plain := self.without_adapters()) is not self:
            plain.save_pretrained(save_directory, is_main_process=is_main_process, push_to_hub=push_to_hub, **kwargs)
            return
        folder = Path(save_directory)
        if folder.is_file():
            raise NotADirectoryError(f"Cannot save a drafter to {str(folder)!r}: it is a file. Give a folder.")
        hub = {}
        if push_to_hub:
            hub = {name: kwargs[name] for name in kwargs.keys() & inspect.signature(self.push_to_hub).parameters}
            kwargs = {name: kwargs[name] for name in kwargs if name not in hub or name == "max_shard_size"}  # for both
        tensors = self.main_tensors() if state_dict is None else state_dict
        if not is_main_process:
            super().save_pretrained(folder, is_main_process=False, state_dict=tensors, **kwargs)
            return
        self.store_options()
        with self.config_for(folder), self.replacing_weights(folder) as unfinished:
            super().save_pretrained(unfinished, state_dict=tensors, **kwargs)
            if state_dict is None:  # one from the caller, such as `DrafterTrainer`, goes into the main files only
                self.write_side_files(unfinished)
        self.write_records(folder)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", folder.resolve().name), **hub)
