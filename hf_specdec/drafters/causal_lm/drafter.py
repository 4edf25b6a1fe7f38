"""CausalLMDrafter: a smaller language model with the target's tokenizer drafts, token by token."""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specdec.decoding import graphs
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.modules import is_quantised
from hf_specdec.decoding.support import check_supported
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trial import check_trees
from hf_specdec.drafters.causal_lm.candidates import ChainGenerator, TreeGenerator
from hf_specdec.drafters.causal_lm.draft_model import DraftModel, target_ids_of, with_head_rows
from hf_specdec.drafters.causal_lm.stopping import StoppingRule
from hf_specdec.drafters.fingerprint import first_difference, local_tokenizer
from hf_specdec.drafters.options import MAX_TREE_BUDGET, TreeOptions, is_number
from hf_specdec.drafters.pairing import warn_of_sizes
from hf_specdec.drafters.publishing import PublishedDrafter
from hf_specdec.drafters.registry import name_of, unknown_name
from hf_specdec.drafters.vocabulary import draftable_rows, may_be_padding
from hf_specdec.drafters.wrapped import merged_adapters, unwrapped

METHODS = ("causal_lm_chain", "causal_lm_tree")
MAX_DEPTH = 256


@dataclass(slots=True, kw_only=True)
class CausalLMOptions(TreeOptions):
    """Drafting options of a draft model.

    Attributes:
        method: `"causal_lm_tree"`, the likeliest paths, or `"causal_lm_chain"`, one path (SpS).
        max_depth: most tokens of a path, and most forwards of the draft model per round.
        tree_budget: see `TreeOptions`. An integer does not affect `"causal_lm_chain"`, which drafts max_depth tokens;
            `"auto"` shortens chains too.
        width: most expanded nodes of a level, and most continuations of each of them.
        sample_drafts: if the call samples, a chain's tokens are sampled from the draft model's distribution (after the
            call's temperature, top-k, ...) and verified by rejection sampling; if False they are its likeliest tokens.
            Both are lossless. Trees always contain the likeliest tokens.
        min_confidence: a node is not expanded if the probability of its path is lower; None for no limit.
        min_acceptance: AdaEDL's threshold: a path ends after tokens drafted from a distribution for which
            1 - sqrt(entropy_weight * entropy) is lower; None for no limit.
        entropy_weight: of the entropy (nats) in that bound.
    """

    method: str = "causal_lm_tree"
    max_depth: int = 5
    tree_budget: int | Literal["auto"] = 16
    width: int = 4
    sample_drafts: bool = True
    min_confidence: float | None = None
    min_acceptance: float | None = None
    entropy_weight: float = 0.2

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        if self.method not in METHODS:
            raise unknown_name("method", self.method, METHODS)
        self.check_integers(max_depth=MAX_DEPTH, width=MAX_TREE_BUDGET)
        self.check_switches("sample_drafts")
        for name in ("min_confidence", "min_acceptance"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value <= 1):
                raise ValueError(f"{name}={value!r} must be above 0 and at most 1, or None for no limit.")
        if not is_number(self.entropy_weight) or not 0 < self.entropy_weight < float("inf"):
            raise ValueError(f"entropy_weight={self.entropy_weight!r} must be a positive number.")


class CausalLMDrafter(PublishedDrafter):
    """A causal language model as drafter: speculative sampling as first published, and a tree version of it.

    It needs no training; any model with the target's tokenizer works, and the more often the two agree, the more is
    accepted. It runs one forward per drafted level, while the drafters that read the target's hidden states (`dflash`,
    `ddtree`) draft all levels in one. Unlike transformers' assisted generation it drafts trees, supports batches, and
    keeps its cache between the rounds of a call.

    Its embedding may have more rows than the target's, or fewer, because of padding or added tokens. A token that the
    target lacks is never drafted; a token that the draft model lacks is read as its last row.

    Args:
        model: the draft model, also one with PEFT adapters, which draft too; shared, not copied. Saving it as a drafter
            stores the options in its config; nothing else changes it.
        drafting_options: of `CausalLMOptions`; they override the `drafting_options` of the draft model's config.

    Attributes:
        tokenizer_folder: where its tokenizer is; None for the folder or repo of the model.
    """

    fits = "It can draft for any target with the same tokenizer; the one it was trained for accepts most."
    options_class = CausalLMOptions
    options: CausalLMOptions

    def __init__(self, model: PreTrainedModel, **drafting_options: Any) -> None:
        self.model: PreTrainedModel = unwrapped(model)
        self.tokenizer_folder: Path | None = None
        self.draft_rows: Tensor | None = None  # of its head, if it drafts only some of its tokens; not saved
        self._head_rows: tuple[Any, PreTrainedModel] | None = None
        self._compared: weakref.ref[PreTrainedModel] | None = None
        self.options = self.loaded_options()
        self.set_options(**drafting_options)

    @property
    def name_or_path(self) -> str:
        """Folder or Hub id of the draft model; its class if unknown."""
        return name_of(self.model)

    @property
    def device(self) -> torch.device:
        """Of the draft model; may differ from the target's."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the draft model; may differ from the target's."""
        return self.model.dtype

    def to(self, *args: Any, **kwargs: Any) -> CausalLMDrafter:
        """Moves the draft model, as `torch.nn.Module.to` does."""
        self.model.to(*args, **kwargs)
        return self

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves the draft model as an ordinary language model, with records and card; `load_drafter` reads it."""
        if (plain := self.without_adapters()) is not self:
            plain.save_pretrained(save_directory, **kwargs)
            return
        self.store_options()
        with self.replacing_weights(Path(save_directory)):
            self.model.save_pretrained(save_directory, **kwargs)
        self.write_records(save_directory)

    def without_adapters(self) -> CausalLMDrafter:
        model = merged_adapters(self.model)
        if model is self.model:
            return self
        plain = copy.copy(self)
        plain.model, plain.measurements = model, None
        return plain

    def save_weights(self, folder: Path, max_shard_size: str | int | None) -> None:
        self.model.save_pretrained(folder, max_shard_size=max_shard_size)

    @property
    def target_ids(self) -> Tensor | None:
        """[rows] int64, the target's id of each row of its embedding, ascending; None if the ids are equal."""
        return target_ids_of(self.model)

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        own = self._row_ids()
        rows = draftable_rows(own, draft_vocab, int(own[-1]) + 1, self.name_or_path)
        with_head_rows(self.model, rows)  # raises where that is not possible
        self.draft_rows = rows

    def _row_ids(self) -> Tensor:
        """[rows] int64, the target's id of each row of its head."""
        ids = self.target_ids
        return torch.arange(self.model.get_input_embeddings().num_embeddings) if ids is None else ids

    def _with_draft_rows(self) -> tuple[PreTrainedModel, Tensor | None]:
        """The model that drafts, and the target's ids of the rows of its head; None if it drafts all of its tokens."""
        if self.draft_rows is None:
            return self.model, None
        weight = self.model.get_output_embeddings().weight
        key = (id(self.model), id(self.draft_rows), weight.device, weight.data_ptr(), weight._version)
        if self._head_rows is None or self._head_rows[0] != key:
            self._head_rows = key, with_head_rows(self.model, self.draft_rows)
        return self._head_rows[1], self._row_ids()[self.draft_rows]

    def set_vocabulary(self, target_ids: Tensor | None) -> None:
        """Stores in the config, as `draft_token_ids`, which of the target's tokens the rows of its embedding are.

        Args:
            target_ids: [rows] int64, ascending; None if the ids are equal.
        """
        if target_ids is None:
            self.model.config.__dict__.pop("draft_token_ids", None)
        else:
            self.model.config.draft_token_ids = target_ids.tolist()

    @property
    def options_config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def target_name_or_path(self) -> str | None:
        return (self.training_record or {}).get("target")

    @property
    def target_revision(self) -> str | None:
        return (self.training_record or {}).get("target_revision")

    def count_parameters(self) -> int:
        return self.model.num_parameters()

    def card_summary(self) -> str:
        return (
            "A plain language model as drafter: it drafts token by token, either the likeliest tree "
            '(`method="causal_lm_tree"`, the default) or one chain (`method="causal_lm_chain"`).'
        )

    def card_facts(self) -> dict[str, str]:
        config = self.model.config.get_text_config(decoder=True)
        return {
            "Method": self.loaded_options().method,
            "Model": f"{type(self.model).__name__}, {config.num_hidden_layers} layers, hidden size "
            f"{config.hidden_size}",
            "Vocabulary": str(self.model.get_input_embeddings().num_embeddings)
            + ("" if self.target_ids is None else " of the target's tokens"),
        }

    @property
    def methods(self) -> tuple[str, ...]:
        return METHODS

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        options = self.options
        # On a CPU these models are too small to gain from compilation.
        compile_mode: graphs.CompileMode = options.compile_mode if graphs.can_capture(self.device) else "none"
        model, head_ids = self._with_draft_rows()
        drafter = DraftModel(model, compile_mode=compile_mode, head_ids=head_ids)
        stopping = StoppingRule(options.min_confidence, options.min_acceptance, options.entropy_weight)
        if self.method == "causal_lm_chain":
            return ChainGenerator(drafter, target, options.max_depth, stopping, options.sample_drafts)
        return TreeGenerator(drafter, target, options.max_depth, stopping, options.node_limit, options.width)

    def check_target(self, model: PreTrainedModel) -> None:
        target_name = name_of(model)
        try:
            check_supported(self.model)
            if self.device.type != "meta":  # without weights there is nothing to run
                check_trees(self.model)
        except ValueError as error:
            raise ValueError(f"{self.name_or_path!r} cannot draft for {target_name!r}: {error}") from error
        self._check_vocabulary(model, target_name)
        if self._compared is None or self._compared() is not model:
            self._compare_once(model, target_name)
            self._compared = weakref.ref(model)

    def _check_vocabulary(self, model: PreTrainedModel, target_name: str) -> None:
        target_ids, rows = self.target_ids, self.model.get_input_embeddings().num_embeddings
        size = model.get_input_embeddings().num_embeddings
        if self.draft_rows is not None and (most := int(self._row_ids()[self.draft_rows[-1]])) >= size:
            raise ValueError(
                f"draft_vocab of draft model {self.name_or_path!r} has ids up to {most}, but target {target_name!r} "
                f"has {size} embeddings: give ids of the target's tokenizer."
            )
        if target_ids is None:
            return
        ascending = bool((target_ids.diff() > 0).all())
        if len(target_ids) != rows or not ascending or int(target_ids[0]) < 0 or int(target_ids[-1]) >= size:
            raise ValueError(
                f"draft_token_ids in the config.json of draft model {self.name_or_path!r} must be {rows} ascending ids "
                f"of target {target_name!r}, one for each row of its embedding, from 0 to {size - 1}; they are "
                f"{len(target_ids)}, from {int(target_ids.min())} to {int(target_ids.max())}, "
                f"{'' if ascending else 'not '}ascending. Save the draft model again with the vocabulary that it was "
                "trained with, or use the target that it was trained for."
            )

    def _compare_sizes(self, model: PreTrainedModel, target_name: str) -> None:
        """Compares the sizes of the vocabularies, for pairs without two local tokenizers."""
        if self.target_ids is not None:  # a draft vocabulary is smaller on purpose
            return
        own, other = (each.get_input_embeddings().num_embeddings for each in (self.model, model))
        if not may_be_padding(own, other):
            raise ValueError(
                f"Draft model {self.name_or_path!r} has a vocabulary of {own}, but target {target_name!r} has one of "
                f"{other}: more than padding or added tokens explain, and there are no two local tokenizers to "
                "compare. A draft model must use the target's tokens: choose one with the target's tokenizer, or, if "
                "it has that, put the tokenizers' files into the folders of both models."
            )
        warn_of_sizes(self.name_or_path, own, model)

    def _compare_once(self, model: PreTrainedModel, target_name: str) -> None:
        """The checks that take too long for every call."""
        tokenizer = local_tokenizer(str(self.tokenizer_folder or self.model.name_or_path))
        other = local_tokenizer(model.name_or_path)
        if tokenizer is None or other is None:
            self._compare_sizes(model, target_name)
        elif (difference := first_difference(tokenizer, other)) is not None:
            token_id, own_token, target_token = difference
            raise ValueError(
                f"Draft model {self.name_or_path!r} and target {target_name!r} have different tokenizers: id "
                f"{token_id} is {own_token!r} in the draft model's and {target_token!r} in the target's. A draft "
                "model must use the target's tokens: choose one with the target's tokenizer."
            )
        own_size, size = self.model.num_parameters(), model.num_parameters()
        # The weights of a quantised model may be packed, or not be parameters at all.
        if own_size > size and not (is_quantised(self.model) or is_quantised(model)):
            warnings.warn(
                f"Draft model {self.name_or_path!r} has {own_size:,} parameters, more than the {size:,} of target "
                f"{target_name!r}: drafting will cost more than it saves. Check that the two are not swapped.",
                stacklevel=3,
            )
