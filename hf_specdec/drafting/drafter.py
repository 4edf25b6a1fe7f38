"""Drafter: the interface of every drafter, with or without weights, and the shared generator of block drafters."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.policies import AutoBudget, BudgetKnowledge, DraftingPolicy
from hf_specdec.decoding.relaxed import Relaxed, acceptance_rule
from hf_specdec.decoding.speed.cuda_graphs import StaticCalls
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import Trace
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.draft_logits import TargetVocabularyLogitsProcessor
from hf_specdec.drafting.growth import marginal_notes
from hf_specdec.drafting.options import DrafterOptions


class Drafter(ABC):
    """Proposes tokens for a target. Pass it as `assistant_model=` to the target's `generate`.

    A drafter holds weights and drafting options; the state of a call is in the candidate generator that it makes for
    each call. Options may be changed between calls: `drafter.options.tree_budget = 16` is validated when the next call
    begins, `drafter.set_options(tree_budget=16, ...)` immediately.

    Attributes:
        options_class: the class of its drafting options.
        mergeable: whether its trees may be merged with those of other drafters: it needs only features of the target
            and the committed entries of its cache.
        made_of: arguments of `load_drafter` without which a drafter of this name cannot be made.
        states_at_nodes: whether its verification gives the target's states at every node.
        options: the drafting options; every drafter sets them in its `__init__`.
        stats: of the latest `generate` call, filled while the call runs; None before the first.
        trace: set it to a `Trace()` to record the rounds of the next `generate` calls; None for no recording.
        acceptance: None, the default, for output that is the target's own. "typical", a `Typical` or a `Judge` accept
            tokens that the target did not choose, so the output is NOT the target's: each call warns, and
            `stats.lossless` is False. It is not saved, and no file can set it.
    """

    options_class: ClassVar[type[DrafterOptions]] = DrafterOptions
    mergeable: ClassVar[bool] = True
    states_at_nodes: ClassVar[bool] = True
    made_of: ClassVar[tuple[str, ...]] = ()

    # Classes of transformers with a `generate` of their own (Whisper) expect one of every assistant; it has no effect.
    generation_config = GenerationConfig()
    options: DrafterOptions
    stats: SpeculationStats | None = None
    trace: Trace | None = None
    acceptance: Relaxed | str | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "options" and not isinstance(value, self.options_class):
            raise TypeError(f"options={value!r} is a {type(value).__name__}; it must be {self.options_class.__name__}.")
        options: DrafterOptions | None = getattr(self, "options", None)  # None during __init__
        if options is not None and name in options.names():
            raise AttributeError(
                f"{type(self).__name__}.{name} is no attribute but a drafting option: set drafter.options.{name} = "
                f"{value!r}, or call drafter.set_options({name}={value!r})."
            )
        super().__setattr__(name, value)

    def known_of(self, model: PreTrainedModel) -> dict[Any, Any]:
        """What was found out about a pair, for later calls; neither saved nor copied. Must not refer to the two."""
        return _KNOWN.setdefault(self, weakref.WeakKeyDictionary()).setdefault(model, {})

    def known_targets(self) -> list[PreTrainedModel]:
        """The targets, of those that still exist, that it was combined with."""
        return list(_KNOWN.get(self, ()))

    @property
    def method(self) -> str:
        """Name of the drafting method; if there are several (`methods`), `options.method` sets it."""
        return self.options.method

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """The networks that draft with fixed weights; on a CPU on packed copies (`decoding/speed/packed.py`)."""
        return (self,) if isinstance(self, nn.Module) else ()

    @property
    def methods(self) -> tuple[str, ...]:
        """The drafting methods that it offers, the allowed values of `options.method`."""
        return tuple(self.options_class.METHODS) or (self.method,)

    def forget(self) -> None:
        """Clears everything learnt from the texts of earlier calls, for repeatable measurements."""

    @abstractmethod
    def check_target(self, model: PreTrainedModel) -> None:
        """Raises ValueError, naming both values and the way out, if this drafter cannot draft for `model`."""

    def validate_options(self, options: DrafterOptions) -> None:
        """Raises ValueError, naming the value and its range, if this drafter cannot draft with these options."""
        options.validate()

    def check_options(self) -> None:
        """Validates `options` and `trace`; runs at the beginning of each call.

        Raises:
            ValueError: one of them is not valid.
        """
        self.validate_options(self.options)
        acceptance_rule(self.acceptance)
        if self.trace is not None and not isinstance(self.trace, Trace):
            raise ValueError(f"trace={self.trace!r} must be a Trace, which records rounds, or None.")

    def check_pairing(self, model: PreTrainedModel, input_ids: Tensor | None = None) -> None:
        """Warns or raises ValueError about a wrong pair with fitting shapes, once per target; see `pairing.py`.

        Args:
            model: the target.
            input_ids: [batch, seq] int64, the prompts of a first call; None before the first call.
        """

    def restrict_vocabulary(self, draft_vocab: Tensor | Sequence[int]) -> None:
        """From now on drafts only these tokens of the target, so that its head has fewer rows (FR-Spec).

        The output stays the target's own; other tokens come from the target alone.

        Args:
            draft_vocab: ids of the target, such as those of `frequent_token_ids`.

        Raises:
            ValueError: this drafter has no head, or the ids do not fit.
        """
        raise ValueError(
            f"draft_vocab was given for {type(self).__name__}, which cannot be restricted to a smaller "
            "vocabulary: leave it out."
        )

    @abstractmethod
    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        """Makes the state of one `generate` call on `target`."""

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """0-based decoder layers of the target `model` whose outputs the drafter reads; none by default.

        -1 is the input of the first layer, `num_hidden_layers` the output of the final norm.
        """
        return ()

    def drafting_policy(self, model: PreTrainedModel, batch: int, stats: SpeculationStats) -> DraftingPolicy:
        """The policy of one call: if the options allow pauses, drafts while that pays, and as much as pays.

        Measured times and probabilities are shared by all calls with this target and this number of rows.
        """
        if not self.options.pauses or ALWAYS_DRAFTING.get():
            return DraftingPolicy()
        return AutoBudget(self.known_of(model).setdefault((self.method, batch), BudgetKnowledge()), stats)

    def report_tables(
        self, model: PreTrainedModel, prompts: Sequence[Mapping[str, Tensor]]
    ) -> Iterable[tuple[str, list[str], list[list[str]]]]:
        """Extra tables for a benchmark's report: title, column headings, rows. None by default.

        Args:
            model: the target.
            prompts: of the benchmark, tokenised: `input_ids` and `attention_mask`, [batch, seq] each.
        """
        return ()

    def set_options(self, **changes: Any) -> None:
        """Changes drafting options by name, after validating them together.

        Raises:
            ValueError: an option is unknown (the nearest name is suggested) or out of range; nothing is changed.
        """
        changed = self.options.replace(**changes)
        self.validate_options(changed)
        self.options = changed


class WrappingDrafter(Drafter):
    """A drafter that drafts with others.

    Attributes:
        sources: the other drafters, with options of their own.
    """

    mergeable = False
    sources: tuple[Drafter, ...]

    def forget(self) -> None:
        for source in self.sources:
            source.forget()

    def check_target(self, model: PreTrainedModel) -> None:
        for source in self.sources:
            source.check_target(model)

    def check_options(self) -> None:
        super().check_options()
        for source in self.sources:
            source.check_options()

    def check_pairing(self, model: PreTrainedModel, input_ids: Tensor | None = None) -> None:
        for source in self.sources:
            source.check_pairing(model, input_ids)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return tuple(layer for source in self.sources for layer in source.feature_layers(model))


@contextmanager
def always_drafting() -> Iterator[None]:
    """In this context, all rounds draft complete trees, with all sources, whatever options say and a clock shows."""
    before = ALWAYS_DRAFTING.set(True)
    try:
        yield
    finally:
        ALWAYS_DRAFTING.reset(before)


ALWAYS_DRAFTING: ContextVar[bool] = ContextVar("always_drafting", default=False)


def check_is_drafter(given: object, order: str = "") -> None:
    """Raises TypeError, with the given type, if an object is not a drafter.

    Args:
        given: what was passed as a drafter.
        order: a sentence on the order of the arguments, for functions that take other objects first.
    """
    if not isinstance(given, Drafter):
        shown = f"={given!r}" if isinstance(given, (str, os.PathLike)) else ""
        message = f"drafter{shown} is a {type(given).__name__}; it must be what load_drafter returns."
        raise TypeError(f"{message} {order}".rstrip())


_KNOWN: weakref.WeakKeyDictionary[Drafter, weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, Any]]] = (
    weakref.WeakKeyDictionary()
)


class BlockMarginals(ABC):
    """The state of one `generate` call of a drafter that predicts all positions of a block in one forward.

    Methods that build trees (`ddtree`) or chains (`dflash`) from independent per-position distributions use it.

    Attributes:
        calls: the captured computations of a round; None if nothing is captured.
        drafts_early: see `TreeCandidateGenerator`.
    """

    calls: StaticCalls | None = None
    drafts_early: bool = False

    @abstractmethod
    def marginals(self, context: DraftContext) -> Tensor:
        """[batch, depth, vocab] float32 logits; entry d-1 is for the token d positions after the root.

        `vocab` may differ from the target's: id i is the same token in both.
        """

    @abstractmethod
    def observe(self, committed: Committed) -> None:
        """Observes what the prefill or a round committed."""

    @abstractmethod
    def keep_rows(self, rows: Sequence[int]) -> None:
        """Selects these rows, in this order, and drops all others."""

    @abstractmethod
    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        """See `TreeCandidateGenerator.join`."""

    def close(self) -> None:
        """Ends the call; the next call may then reuse the captured computations."""
        if self.calls is not None:
            self.calls.workspace.release()


class MarginalsGenerator(TreeCandidateGenerator):
    """A generator whose trees come from the marginals of one forward; subclasses build the tree.

    Args:
        source: computes the marginals of each round.

    Attributes:
        logits: [batch, depth, vocab] float32, the marginals of the latest round, in the columns of the target's logits.
    """

    logits: Tensor
    vocabulary: TargetVocabularyLogitsProcessor

    def __init__(self, source: BlockMarginals) -> None:
        self.source = source
        self.drafts_early = source.drafts_early

    @abstractmethod
    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        """The tree of a round; `logits` [batch, depth, vocab] float32, as from `BlockMarginals.marginals`."""

    def draft(self, context: DraftContext) -> DraftTree:
        self.logits = self.vocabulary(None, self.source.marginals(context))
        context.lap("draft")
        tree = self.tree(context, self.logits)
        context.lap("tree")
        return tree

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            self.vocabulary = TargetVocabularyLogitsProcessor(committed.target_logits.shape[-1])
        self.source.observe(committed)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.source.keep_rows(rows)

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        self.source.join([other.source for other in others], places)

    def close(self) -> None:
        self.source.close()

    def describe(self, tree: DraftTree) -> NodeNotes:
        return marginal_notes(tree, self.logits)
