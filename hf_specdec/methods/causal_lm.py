"""Causal language models as drafters: any model with the target's tokenizer, drafting chains or trees.

The draft model is run as targets are (`DraftModel` is a `TargetModel`): one forward per level verifies the unfinished
draft (captured, if the target's are), and its cache holds the earlier levels. A round first runs the root; if the last
accepted token was a leaf of the tree, which the draft model has not run yet, it runs that token too.
`hub/loading.py` finds the files and checks that they are complete.

Source: chains: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. Trees: the shape of EAGLE-2, arXiv
2406.16858, Section 4 (`growth.py`), with a complete language model as drafter. Stopping by entropy: AdaEDL, arXiv
2410.18351.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.noise import draw
from hf_specdec.decoding.speed import cuda_graphs
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import is_quantised, num_tokens
from hf_specdec.decoding.targets.support import check_supported, keeps_states
from hf_specdec.decoding.targets.trial import check_trees
from hf_specdec.decoding.tree import DraftTree, from_host, pick
from hf_specdec.decoding.upstream import keep_names
from hf_specdec.drafting.draft_model import DraftModel, target_ids_of, with_head_rows, with_whole_vocabulary
from hf_specdec.drafting.fingerprint import first_difference, local_tokenizer
from hf_specdec.drafting.growth import best_tree, grow_levels, path_notes
from hf_specdec.drafting.options import MAX_TREE_BUDGET, TreeOptions, is_number
from hf_specdec.drafting.pairing import warn_of_sizes
from hf_specdec.drafting.pretrained import check_numbers, loading_differences
from hf_specdec.drafting.registry import Serving, name_of, register
from hf_specdec.drafting.vocabulary import draftable_rows, may_be_padding
from hf_specdec.drafting.wrapped import merged_adapters, unwrapped
from hf_specdec.hub.publishing import PublishedDrafter

__all__ = ["CausalLMDrafter", "CausalLMOptions"]

logger = logging.getLogger(__name__)


MAX_DEPTH = 256


@dataclass(slots=True, kw_only=True)
class CausalLMOptions(TreeOptions):
    """Drafting options of a draft model.

    Attributes:
        method: `"causal_lm_tree"`, the likeliest paths, or `"causal_lm_chain"`, one path (SpS).
        depth: most tokens of a path, and most forwards of the draft model per round.
        tree_budget: see `TreeOptions`. An integer does not affect `"causal_lm_chain"`, which drafts `depth` tokens;
            `"auto"` shortens chains too.
        top_k: most nodes of a level that are extended, and most continuations of each of them.
        sample_drafts: if the call samples, a chain's tokens are sampled from the draft model's distribution (after the
            call's temperature, top-k, ...) and verified by rejection sampling; if False they are its likeliest tokens.
            Both are lossless. Trees always contain the likeliest tokens, and so do chains with `tree_budget="auto"`.
        min_confidence: a node is not expanded if the probability of its path is lower; None for no limit.
        min_acceptance: AdaEDL's threshold: a path ends after tokens drafted from a distribution for which
            1 - sqrt(entropy_weight * entropy) is lower; None for no limit.
        entropy_weight: of the entropy (nats) in that bound.
    """

    METHODS = ("causal_lm_chain", "causal_lm_tree")

    method: str = "causal_lm_tree"
    depth: int = 5
    top_k: int = 4
    sample_drafts: bool = True
    min_confidence: float | None = None
    min_acceptance: float | None = None
    entropy_weight: float = 0.2

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(depth=MAX_DEPTH, top_k=MAX_TREE_BUDGET)
        self.check_switches("sample_drafts")
        for name in ("min_confidence", "min_acceptance"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value <= 1):
                raise ValueError(f"{name}={value!r} must be above 0 and at most 1, or None for no limit.")
        if not is_number(self.entropy_weight) or not 0 < self.entropy_weight < float("inf"):
            raise ValueError(f"entropy_weight={self.entropy_weight!r} must be a positive number.")

    @property
    def least_log_path(self) -> float:
        """Log of `min_confidence`, nats; minus infinity for None."""
        return math.log(self.min_confidence) if self.min_confidence else -math.inf

    def certain(self, log_probs: Tensor) -> Tensor:
        """[..., vocab] -> [...] bool: whether tokens from these distributions are likely enough to be accepted."""
        if self.min_acceptance is None:
            return torch.ones(log_probs.shape[:-1], dtype=torch.bool, device=log_probs.device)
        return acceptance_bound(log_probs, self.entropy_weight) >= self.min_acceptance


def acceptance_bound(log_probs: Tensor, entropy_weight: float) -> Tensor:
    """A lower bound of a token's acceptance probability, from its draft distribution's entropy H: 1 - sqrt(weight H).

    AdaEDL (arXiv 2410.18351). The bound holds for targets that are close enough to the drafter, which the weight
    expresses.

    Args:
        log_probs: [..., vocab] float32, nats.
        entropy_weight: a larger weight assumes less agreement.

    Returns:
        [...] float32, at most 1; may be negative.

    Examples:
        >>> acceptance_bound(torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]).log(), 0.2)
        tensor([0.4734, 1.0000])
    """
    terms = (log_probs.exp() * log_probs).nan_to_num(nan=0.0)  # 0 log 0 is 0
    return 1 - (-entropy_weight * terms.sum(-1)).clamp(min=0).sqrt()


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
    card_summary = (
        "A plain language model as drafter: it drafts token by token, either the likeliest tree "
        '(`method="causal_lm_tree"`, the default) or one chain (`method="causal_lm_chain"`).'
    )

    def __init__(self, model: PreTrainedModel, **drafting_options: Any) -> None:
        self.model: PreTrainedModel = unwrapped(model)
        self.tokenizer_folder: Path | None = None
        self.draft_rows: Tensor | None = None  # of its head, if it drafts only some of its tokens; not saved
        self._head_rows: tuple[Any, PreTrainedModel] | None = None
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
        drafter = self.without_adapters()
        drafter.store_options()
        with drafter.replacing_weights(Path(save_directory)) as unfinished:
            drafter.model.save_pretrained(unfinished, **kwargs)
        drafter.write_records(save_directory)

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
        return torch.arange(num_tokens(self.model), device="cpu") if ids is None else ids

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
    def saved_model(self) -> PreTrainedModel:
        return self.model

    def card_facts(self) -> dict[str, str]:
        config = self.model.config.get_text_config(decoder=True)
        return {
            "Method": self.loaded_options().method,
            "Model": f"{type(self.model).__name__}, {config.num_hidden_layers} layers, hidden size "
            f"{config.hidden_size}",
            "Vocabulary": str(num_tokens(self.model)) + ("" if self.target_ids is None else " of the target's tokens"),
        }

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        # On a CPU these models are too small to gain from compilation.
        compile_mode = self.options.compile_mode if cuda_graphs.can_capture(self.device) else "none"
        kind = ChainGenerator if self.method == "causal_lm_chain" else TreeGenerator
        model, head_ids = self._with_draft_rows()
        drafter = DraftModel(model, compile_mode=compile_mode, head_ids=head_ids)
        return kind(drafter, target, replace(self.options))

    def check_target(self, model: PreTrainedModel) -> None:
        target_name = name_of(model)
        try:
            check_supported(self.model)
            if self.device.type != "meta":  # without weights there is nothing to run
                check_trees(self.model)
        except ValueError as error:
            raise ValueError(f"{self.name_or_path!r} cannot draft for {target_name!r}: {error}") from error
        self._check_vocabulary(model, target_name)
        if "pairing" not in (known := self.known_of(model)):
            self._compare_once(model, target_name)
            known["pairing"] = True

    def _check_vocabulary(self, model: PreTrainedModel, target_name: str) -> None:
        target_ids, rows = self.target_ids, num_tokens(self.model)
        size = num_tokens(model)
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
        own, other = (num_tokens(each) for each in (self.model, model))
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


class DraftModelGenerator(TreeCandidateGenerator):
    """Common part of chains and trees: keeps the draft model's cache in step with the committed tokens.

    Args:
        drafter: the draft model, for this call.
        target: the target of this call; its prompt's padding is also the draft model's.
        options: of this call.
    """

    drops_rows = joins_rows = True

    def __init__(self, drafter: DraftModel, target: TargetModel, options: CausalLMOptions) -> None:
        self.drafter, self.target, self.options = drafter, target, options
        self.num_prefilled = 0  # tokens of each row, padding included
        self.overrun = False
        self.has_nodes = False  # whether its cache holds nodes of the latest round
        self.pending: Committed | None = None  # the result of that round
        # None for models without a limit in their config.
        self.num_positions: int | None = getattr(drafter.config, "max_position_embeddings", None)

    def observe(self, committed: Committed) -> None:
        self.drafter.vocab_size = committed.target_logits.shape[-1]
        # The draft model has run nothing in skipped rounds; their tokens are run with the next root.
        if self.has_nodes and self.pending is None:
            self.pending = committed

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.end_round()
        if self.num_prefilled:
            self.drafter.keep_rows(rows, permanent=True)

    def why_apart(self) -> str | None:
        most = self.target.last_entry + 1
        if self.num_positions is None or most + self.options.depth <= self.num_positions:
            return None
        return (
            f"the draft model has {self.num_positions} positions, and this text may have {most} tokens, with up to "
            f"{self.options.depth} drafted ones"
        )

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        for each in (self, *others):
            each.end_round()
        self.drafter.join([other.drafter for other in others], places)
        self.num_prefilled = 1  # no row has padding

    def end_round(self) -> None:
        """Commits what the latest round has kept."""
        if self.num_prefilled and self.pending is not None:  # else the nodes of the latest round would be lost
            self.keep_accepted(self.pending)
        self.pending, self.has_nodes = None, False

    def close(self) -> None:
        if self.num_prefilled:
            self.drafter.cache.release()

    @property
    def rewinds(self) -> bool:
        """Whether a text that is not committed can be dropped again; recurrent states cannot be cut."""
        return not keeps_states(self.drafter.model)

    def draft_text(self, context: DraftContext, certain: Sequence[int]) -> DraftTree:
        """The tree for a text of which only the first tokens are committed, `certain` of each row; it is not kept.

        The tokens that it has in addition are run with the root, in one forward.
        """
        if self.num_prefilled:
            self.drafter.cache.rollback()
        self.pending, self.has_nodes = None, False
        tree = self.draft(context)
        if self.num_prefilled:
            cache = self.drafter.cache
            cache.rollback([min(own, known) for own, known in zip(cache.row_lengths, certain, strict=True)])
        self.pending, self.has_nodes = None, False
        return tree

    @abstractmethod
    def keep_accepted(self, committed: Committed) -> None:
        """Commits the accepted nodes that the draft model has run to its cache."""

    def run_root(self, context: DraftContext) -> Tensor | None:
        """Runs all tokens that the draft model's cache lacks, up to the root, which becomes node 0 of the round.

        Returns:
            [batch, vocab] float32 logits after the root; None if the draft model cannot draft here.
        """
        lengths = context.lengths
        if self.num_positions is not None and max(lengths) + self.options.depth > self.num_positions:
            if not self.overrun:
                self.overrun = True
                logger.warning(
                    "The draft model has %d positions and the text is longer: the rest is decoded without drafts.",
                    self.num_positions,
                )
            return None
        if not self.num_prefilled:
            if min(lengths) < 2:  # the prompt was passed as embeddings, which the draft model cannot read
                return None
            self._prefill(context.sequences[:, : min(lengths) - 1])
            self.num_prefilled = min(lengths) - 1
        elif self.pending is not None:
            self.keep_accepted(self.pending)
        self.pending, self.has_nodes = None, True

        cache = self.drafter.cache
        lags = [max(1, length - known) for length, known in zip(lengths, cache.row_lengths, strict=True)]
        if cache.keeps_states and min(lags) < max(lags):
            return self._catch_up(context, lags)
        # Rows lack different numbers of tokens; running a cached token again costs less than a mask for padding.
        if min(lengths) - max(lags) < self.num_prefilled:  # but a row has too few: it ended, and others went on
            self.drafter.verify(self._missing(context, lags), self.drafter.root_positions(), logits=False)
            cache.commit_first(Counts.of([lag - 1 for lag in lags], cache.device))
            lags = [1] * len(lags)
        steps = max(lags)
        starts = [length - steps for length in lengths]
        if starts != cache.row_lengths:
            cache.rollback(starts)
        if min(starts) == max(starts):
            token_ids = context.sequences[:, starts[0] : lengths[0]]
        else:
            columns = from_host([list(range(start, start + steps)) for start in starts], context.sequences.device)
            token_ids = context.sequences.gather(1, columns)
        chain = DraftTree.chain(token_ids.to(self.drafter.model.device))
        # The root is the last of these nodes, and becomes node 0 of the round.
        logits = self.drafter.verify(chain, self.drafter.root_positions(), lead=steps - 1).logits[:, -1]
        cache.commit_and_continue(steps - 1)
        cache.continue_round(1)
        return logits

    def _missing(self, context: DraftContext, lags: Sequence[int]) -> DraftTree:
        """A chain of the last `lags` tokens of each row, with its last one repeated behind them."""
        columns = [
            [min(length - 1, length - lag + step) for step in range(max(lags))]
            for length, lag in zip(context.lengths, lags, strict=True)
        ]
        token_ids = context.sequences.gather(1, from_host(columns, context.sequences.device))
        return DraftTree.chain(token_ids.to(self.drafter.model.device))

    def _catch_up(self, context: DraftContext, lags: Sequence[int]) -> Tensor:
        """Runs the missing tokens of each row, `lags` of them; with recurrent states no token can be run again."""
        logits = self.drafter.verify(self._missing(context, lags), self.drafter.root_positions()).logits
        self.drafter.cache.regroup([range(lag - 1) for lag in lags], [[lag - 1] for lag in lags])
        return pick(logits, from_host(list(lags), logits.device).unsqueeze(1) - 1)[:, 0]

    def _prefill(self, token_ids: Tensor) -> None:
        drafter = self.drafter
        length, device = token_ids.shape[1], drafter.model.device
        mask = self.target.text_mask(length)
        # Drafted nodes may use all positions of the model.
        drafter.prefill_for_drafting(
            token_ids.to(device), None if mask is None else mask.to(device), self.num_positions or sys.maxsize
        )
        room = length + 256
        if drafter.compile_mode != "none":  # buffers with the target's capacity suffice for the whole call
            room = max(room, self.target.cache.capacity - 1 - cuda_graphs.DRAFT_SIZES[-1])
        drafter.begin_rounds(room)


class ChainGenerator(DraftModelGenerator):
    """One path: the likeliest tokens, or drawn ones with their distribution if the call samples and `sample_drafts`."""

    def __init__(self, drafter: DraftModel, target: TargetModel, options: CausalLMOptions) -> None:
        super().__init__(drafter, target, options)
        self.num_run = 0  # nodes of the chain, root included, that the draft model has run
        # [batch] each, the probabilities of the latest chain's tokens; empty if nothing asked for them.
        self.own_probs: list[Tensor] = []

    def keep_accepted(self, committed: Committed) -> None:
        assert committed.path is not None
        counts = [min(count, self.num_run) for count in committed.num_committed]
        if abilities(committed.path.device).host_memory:
            own = (committed.path >= 0).sum(1).tolist()
            counts = [min(both) for both in zip(counts, own, strict=True)]
        self.drafter.cache.commit_first(Counts.of(counts, self.drafter.cache.device))

    def draft(self, context: DraftContext) -> DraftTree:
        logits = self.run_root(context)
        if logits is None:
            return DraftTree.root_only(context.root_ids)
        device = logits.device
        root_positions = self.drafter.root_positions()
        token_ids = context.root_ids.to(device).unsqueeze(1)
        top = logits.max(-1, keepdim=True)
        finite = top.values.squeeze(1).isfinite()
        valid, draft_probs, active = [torch.ones_like(finite), finite], [], finite
        log_path = torch.zeros_like(logits[:, 0])
        options, least, self.own_probs = self.options, context.least_prob, []
        most = context.at_most(options.depth)
        sampled = context.choice.do_sample and options.sample_drafts
        needs_probs = any(limit is not None for limit in (options.min_confidence, options.min_acceptance, least))
        while True:
            if sampled:
                # Rows with non-finite logits get no draft, but must have a distribution.
                scores = logits.where(top.values.isfinite(), 0.0)
                scores = context.choice.warpers(token_ids[:, -1:], scores)
                probs = scores.softmax(-1)
                chosen = draw(probs).unsqueeze(1)
                draft_probs.append(probs)
            else:
                scores, chosen = logits, top.indices
            token_ids = torch.cat([token_ids, chosen], dim=1)
            self.num_run = token_ids.shape[1] - 1
            if needs_probs:
                log_probs = scores.log_softmax(-1)
                own = log_probs.gather(1, chosen).squeeze(1)
                self.own_probs.append(own.exp())
            if self.num_run == most:
                break
            # The decision to continue must not depend on the next token: else the remaining drafts would have another
            # distribution than the recorded one.
            if needs_probs:
                log_path = log_path + own
                active = active & (log_path >= options.least_log_path) & options.certain(log_probs)
                active = active & (own.exp() >= (least or 0.0))
                if not bool(active.any()):
                    break
            chain = DraftTree.chain(token_ids)
            logits = self.drafter.verify(chain, root_positions, first=self.num_run).logits[:, -1]
            self.drafter.cache.continue_round(1)
            self.num_run += 1
            top = logits.max(-1, keepdim=True)
            active = active & top.values.squeeze(1).isfinite()
            valid.append(active)
        return DraftTree.chain(
            token_ids,
            valid=torch.stack(valid, dim=1),
            finite=finite,
            draft_probs=torch.stack(draft_probs, dim=1) if draft_probs else None,
        )

    def describe(self, tree: DraftTree) -> NodeNotes:
        probs = None
        if tree.draft_probs is not None:
            probs = tree.draft_probs.gather(-1, tree.token_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        elif self.own_probs:
            probs = torch.stack(self.own_probs, dim=1)[:, : tree.num_nodes - 1].to(tree.token_ids.device)
        if probs is not None:
            probs = pad(probs, (1, 0), value=1.0)
        return NodeNotes(probs, tree.depths)  # one forward per token


class TreeGenerator(DraftModelGenerator):
    """The likeliest `tree_budget` paths, found by expanding the best `top_k` nodes of each level.

    A path's probability is the product of its tokens', so no node is likelier than its parent. A node that is not among
    the best so far will never be, and is not expanded.
    """

    def __init__(self, drafter: DraftModel, target: TargetModel, options: CausalLMOptions) -> None:
        super().__init__(drafter, target, options)
        # [batch, nodes] of the latest tree: each node's index in the draft model's cache, -1 if it has not run it.
        self.cache_indices: Tensor

    def keep_accepted(self, committed: Committed) -> None:
        assert committed.path is not None
        path = committed.path.to(self.cache_indices.device)
        steps = torch.arange(path.shape[1], device=path.device)
        mine = (path >= 0) & (steps < committed.counts.to(path.device).tensor.unsqueeze(1))
        indices = self.cache_indices.gather(1, path.clamp(min=0)).where(mine, -1)  # only leaves have none
        counts = Counts.of((indices >= 0).sum(1).tolist(), path.device)
        self.drafter.cache.commit(indices.clamp(min=0), counts)

    def draft(self, context: DraftContext) -> DraftTree:
        logits = self.run_root(context)
        options = self.options
        budget = context.at_most(options.node_limit)
        if logits is None:
            return DraftTree.root_only(context.root_ids)
        batch, device = len(logits), logits.device
        roots = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.cache_indices = roots
        if not budget:
            return DraftTree.root_only(context.root_ids)
        ranks = min(options.top_k, budget, logits.shape[-1])
        least = -math.inf if context.least_prob is None else math.log(context.least_prob)
        # Captured levels have a fixed width.
        fixed = 0 if self.drafter.static is None else min(options.top_k, options.node_limit)
        run = DraftTree.root_only(context.root_ids.to(device))  # the nodes in the cache
        indices, root_positions = [roots[0]], self.drafter.root_positions()

        def extend(level: int, token_ids: Tensor, above: Tensor) -> Tensor:
            nonlocal run
            first, count = run.num_nodes, token_ids.shape[1]
            missing = max(0, fixed - count)
            parents = pad(indices[-1][above], (0, missing))
            own = torch.eye(count + missing, dtype=torch.bool, device=device).expand(batch, -1, -1)
            sees = run.ancestor_mask.gather(1, parents.unsqueeze(-1).expand(-1, -1, first))
            run = DraftTree(
                torch.cat([run.token_ids, pad(token_ids, (0, missing))], 1),
                torch.cat([run.parents, parents], 1),
                pad(run.depths, (0, count + missing), value=level),
                torch.cat([pad(run.ancestor_mask, (0, count + missing)), torch.cat([sees, own], -1)], 1),
                pad(run.valid, (0, count + missing), value=True),
                level,
            )
            indices.append(torch.arange(first, first + count, device=device))
            logits = self.drafter.verify(run, root_positions, first=first).logits
            self.drafter.cache.continue_round(count + missing)
            return logits[:, :count]

        def extendable(scores: Tensor, log_probs: Tensor, candidates: Tensor, best: Tensor) -> Tensor:
            """Which nodes of a level may have descendants in the tree."""
            able = candidates >= scores.topk(min(budget, scores.shape[1])).values[:, -1:]
            able &= (candidates > -torch.inf) & (candidates >= options.least_log_path)
            if least > -math.inf:
                able &= (best >= least).flatten(1)
            if options.min_acceptance is not None:
                able &= options.certain(log_probs).repeat_interleave(ranks, dim=1)
            return able

        start = roots.to(torch.float64 if abilities(device).float64 else torch.float32)
        start[from_host([not active for active in context.active], device)] = -math.inf
        scores, token_ids, parents, finite = grow_levels(
            logits, extend, options.depth, options.top_k, lambda ids: ids, ranks, start, extendable
        )
        context.lap("draft")
        # Every `ranks` candidates have one parent: these are the nodes that were run, the root first.
        where = 1 + parents[:, ::ranks]
        cached = parents.new_full((batch, 1 + parents.shape[1]), -1).scatter(
            1, where, torch.cat(indices).expand_as(where)
        )
        root_ids = context.root_ids.to(device)
        tree = best_tree(root_ids, scores, token_ids, parents, finite, depth=run.max_depth + 1, budget=budget)
        assert tree.path_logprobs is not None
        drafted = int((tree.path_logprobs > -torch.inf).sum(1).max()) - 1
        chosen = scores.argsort(dim=1, descending=True, stable=True)[:, :drafted]
        self.cache_indices = cached.gather(1, pad(1 + chosen, (1, 0)))
        tree = tree.first_nodes(drafted)
        context.lap("tree")
        return tree

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        return path_notes(tree)


# Names of a language model's weights within an image-text model, and by themselves.
PART_KEYS = {
    r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head\.)": "model.",
    r"^(language_model|text_model)\.lm_head\.": "lm_head.",
}


def load(config: dict[str, Any], name: str, folder: Path, dtype: torch.dtype | None, weights: bool) -> CausalLMDrafter:
    """Makes the drafter. Of an image-text model the language model drafts.

    Where transformers has no class for the language model alone, the whole model is loaded, whose other parts never
    run.

    Args:
        config: the checkpoint's `config.json`.
        name: what the user has passed.
        folder: of its files.
        dtype: of the weights; None for the stored one.
        weights: whether to load them; if not, the drafter is on the meta device, with its options and vocabulary.

    Raises:
        OSError: as `from_pretrained`.
        ValueError: transformers has no such model, or the weights differ from those that the config describes, or
            contain NaN.
    """
    names, model_type = config.get("architectures") or (), config.get("model_type")
    known = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if not {*names} & {each for table in known for each in _classes(table.get(str(model_type)))}:
        raise ValueError(
            f"transformers {transformers.__version__} has no language model of architectures "
            f"{config.get('architectures')!r} and model_type {model_type!r}."
        )
    parsed: Any = CONFIG_MAPPING[str(model_type)].from_dict(config)
    own = parsed.get_text_config(decoder=True)
    is_part = type(own) is not type(parsed) and type(own) in MODEL_FOR_CAUSAL_LM_MAPPING
    if is_part:
        own.tie_word_embeddings = parsed.tie_word_embeddings  # the whole model's class decides it
    else:
        own = parsed
    loader: Any = AutoModelForCausalLM if type(own) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    own.name_or_path = name
    if weights:
        model, info = loader.from_pretrained(
            folder,
            config=own,
            dtype=dtype or "auto",
            key_mapping=PART_KEYS if is_part else None,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers then reports the shapes instead of raising; we raise below
        )
        if is_part:  # the files hold other parts too, such as a vision tower
            info["unexpected_keys"] = set()
            keep_names(model)
        if differences := loading_differences(info):
            raise ValueError(
                f"The weights of {name!r} are not those of the {type(model).__name__} that its config.json describes: "
                f"{differences}. Nothing was loaded: check that weights and config.json are of one checkpoint."
            )
        check_numbers(model, name)
        model.name_or_path = model.config.name_or_path = name
    else:
        with torch.device("meta"):
            model = loader.from_config(own, trust_remote_code=False)
    drafter = CausalLMDrafter(model.eval())
    drafter.tokenizer_folder = folder
    return drafter


def _classes(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


register(
    "causal_lm",
    CausalLMDrafter,
    load=load,
    serving=Serving(
        "draft_model",
        "vLLM serves a plain language model without an export (method draft_model in --speculative-config)",
        needs_export=lambda drafter, config: drafter.target_ids is not None,
        whole_model=lambda drafter, vocab_size: with_whole_vocabulary(drafter.model, vocab_size),
    ),
)
