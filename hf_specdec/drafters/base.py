"""Drafter: what every method gives the integration, whether it is a network or a lookup."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.graphs import StaticCalls
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.policies import Always, AutoBudget, BudgetKnowledge
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import NodeNotes, Trace
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.options import DrafterOptions, TreeOptions


class Drafter(ABC):
    """Proposes tokens for a target. Pass it as `assistant_model=` to the target's `generate`.

    A drafter holds weights and drafting options; what a call needs to remember lives in the candidate generator that
    it makes per call. Options may be changed between calls: `drafter.options.tree_budget = 16` is checked when the next
    call begins, `drafter.set_options(tree_budget=16, ...)` at once.

    Attributes:
        options_class: what holds the drafting options of this kind of drafter.
        mergeable: whether its trees may be merged with those of others: it asks nothing of the target but features
            and what its cache holds of committed tokens.
        options: the drafting options; every drafter sets them in its `__init__`.
        stats: of the latest `generate` call, filled while the call runs; None before the first.
        trace: set it to a `Trace()`, and the next `generate` calls record their rounds there; None to record nothing.
    """

    options_class: ClassVar[type[DrafterOptions]] = DrafterOptions
    mergeable: ClassVar[bool] = True

    options: DrafterOptions
    stats: SpeculationStats | None = None
    trace: Trace | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "options" and not isinstance(value, self.options_class):
            raise TypeError(f"options={value!r} is a {type(value).__name__}; it must be {self.options_class.__name__}.")
        options: DrafterOptions | None = getattr(self, "options", None)  # None while the drafter is being made
        if options is not None and name in options.names():
            raise AttributeError(
                f"{type(self).__name__}.{name} is no attribute but a drafting option: set drafter.options.{name} = "
                f"{value!r}, or call drafter.set_options({name}={value!r})."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        def weak(value: object) -> bool:
            return isinstance(value, weakref.ref) or (isinstance(value, tuple) and any(map(weak, value)))

        # Which targets it has met, kept by weak references, is no part of a drafter that is pickled or copied.
        return {name: None if weak(value) else value for name, value in vars(self).items()}

    @property
    def method(self) -> str:
        """Name of the way it drafts; where there is a choice (`methods`), `options.method` sets it."""
        return self.options.method

    @property
    def methods(self) -> tuple[str, ...]:
        """The ways of drafting that it offers: what the option `method` may be set to, where there is a choice."""
        return (self.method,)

    def forget(self) -> None:
        """Forgets the texts of earlier calls, so that a prompt which is measured twice is as new each time."""

    @abstractmethod
    def check_target(self, model: PreTrainedModel) -> None:
        """Raises ValueError, naming both values and the way out, if this drafter cannot draft for `model`."""

    def validate_options(self, options: DrafterOptions) -> None:
        """Raises ValueError, naming the value and its range, if this drafter cannot draft with these options."""
        options.validate()

    def check_options(self) -> None:
        """Validates `options` and `trace` as they are; each call begins with it.

        Raises:
            ValueError: one of them is not what it must be.
        """
        self.validate_options(self.options)
        if self.trace is not None and not isinstance(self.trace, Trace):
            raise ValueError(f"trace={self.trace!r} must be a Trace, which rounds are recorded into, or None.")

    def check_pairing(self, model: PreTrainedModel, input_ids: Tensor | None = None) -> None:
        """Warns, or raises ValueError, about what shapes cannot show; see `pairing.py`. Once for each target.

        Args:
            model: the target.
            input_ids: [batch, seq] int64, the prompts of a first call; None before there are any.
        """

    @abstractmethod
    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        """Makes the state of one `generate` call on `target`."""

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """0-based decoder layers of the target `model` whose outputs the drafter reads; none by default.

        -1 is what enters the first layer, `num_hidden_layers` what leaves the decoder after its final norm.
        """
        return ()

    def drafting_policy(self, model: PreTrainedModel, batch: int, stats: SpeculationStats) -> Always:
        """Chooses how much of each tree is verified in one call: all of it unless `tree_budget` is "auto".

        What calls learn about times and probabilities is kept for later ones with this target and this many rows.
        """
        if not isinstance(self.options, TreeOptions) or self.options.tree_budget != "auto":
            return Always()
        by_target = _KNOWLEDGE.setdefault(self, weakref.WeakKeyDictionary())
        knowledge = by_target.setdefault(model, {}).setdefault((self.method, batch), BudgetKnowledge())
        return AutoBudget(knowledge, stats)

    def report_tables(
        self, model: PreTrainedModel, prompts: Sequence[Mapping[str, Tensor]]
    ) -> Iterable[tuple[str, list[str], list[list[str]]]]:
        """Tables of its own that a benchmark's report shows: title, column headings, rows. None by default.

        Args:
            model: the target.
            prompts: of the benchmark, tokenised: `input_ids` and `attention_mask`, [batch, seq] each.
        """
        return ()

    def set_options(self, **changes: Any) -> None:
        """Changes drafting options by name, once they are validated together.

        Raises:
            ValueError: an option is unknown (the nearest name is suggested) or out of range; all stay as they were.
        """
        changed = self.options.replace(**changes)
        self.validate_options(changed)
        self.options = changed


def check_is_drafter(given: object, order: str = "") -> None:
    """Raises TypeError, naming what it is, if something is passed as a drafter that is none.

    Args:
        given: what was passed.
        order: a sentence on the order of arguments, where another object may have come first.
    """
    if not isinstance(given, Drafter):
        shown = f"={given!r}" if isinstance(given, (str, os.PathLike)) else ""
        message = f"drafter{shown} is a {type(given).__name__}; it must be what load_drafter returns."
        raise TypeError(f"{message} {order}".rstrip())


# Beside the drafters, not in them: it is nothing to be saved or copied.
_KNOWLEDGE: weakref.WeakKeyDictionary[
    Drafter, weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[str, int], BudgetKnowledge]]
] = weakref.WeakKeyDictionary()


class BlockMarginals(ABC):
    """One `generate` call of a drafter that predicts all positions of a block in one forward.

    Methods that build trees from independent per-position distributions (`ddtree`) or chains (`dflash`) need no more.

    Attributes:
        calls: captures what is computed in each round; None where it runs as it is.
        drafts_early: see `TreeCandidateGenerator`.
    """

    calls: StaticCalls | None = None
    drafts_early: bool = False

    @abstractmethod
    def marginals(self, context: DraftContext) -> Tensor:
        """[batch, depth, vocab] float32 logits; entry d-1 is for the token d places after the root.

        `vocab` may differ from the target's: id i is the same token in both.
        """

    @abstractmethod
    def observe(self, committed: Committed) -> None:
        """Takes note of what the prefill or a round committed."""

    @abstractmethod
    def keep_rows(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only, in this order."""

    def close(self) -> None:
        """Ends the call; the next one may use what this one has captured."""
        if self.calls is not None:
            self.calls.workspace.release()


class MarginalsGenerator(TreeCandidateGenerator):
    """A generator whose trees come from the marginals of one forward; subclasses say which tree.

    Args:
        source: gives the marginals of each round.

    Attributes:
        logits: [batch, depth, vocab] float32, the marginals of the latest round, in the columns of the target's logits.
    """

    drops_rows = True
    logits: Tensor
    vocabulary: TargetVocabularyLogitsProcessor

    def __init__(self, source: BlockMarginals) -> None:
        self.source = source
        self.drafts_early = source.drafts_early

    @abstractmethod
    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        """The tree for a round; `logits` [batch, depth, vocab] float32, as `BlockMarginals.marginals` gives them."""

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

    def close(self) -> None:
        self.source.close()

    def describe(self, tree: DraftTree) -> NodeNotes:
        return marginal_notes(tree, self.logits)


_TENSORS = ("token_ids", "parents", "depths", "ancestor_mask", "valid", "finite", "path_logprobs")


def captured_tree(
    calls: StaticCalls, budget: int, max_depth: int, build: Callable[..., DraftTree], *values: Tensor
) -> DraftTree:
    """`build(*values)` as one launch, for trees that are built on the device; good until the next one.

    Args:
        calls: of the drafter.
        budget: what, besides the values' shapes and `max_depth`, the tree depends on.
        max_depth: of the tree.
        build: makes a tree from the values, with `finite` and `path_logprobs`.
        values: [batch, ...] each.
    """

    def tensors(owner: object, *values: Tensor) -> tuple[Tensor, ...]:
        tree = build(*values)
        return tuple(getattr(tree, name) for name in _TENSORS)

    parts: dict[str, Any] = dict(zip(_TENSORS, calls(("tree", budget, max_depth), tensors, *values), strict=True))
    return DraftTree(**parts, max_depth=max_depth)


def marginal_notes(tree: DraftTree, logits: Tensor) -> NodeNotes:
    """What per-position marginals say of the nodes of a tree that was built from them, all in one forward.

    Args:
        tree: no deeper than there are positions.
        logits: [batch, depth, vocab] float32; entry d-1 is for nodes of depth d.
    """
    places = tree.depths.to(logits.device).sub(1).clamp(min=0)
    token_ids = tree.token_ids.to(logits.device).clamp(0, logits.shape[-1] - 1)
    rows = torch.arange(len(places), device=logits.device).unsqueeze(1)
    return NodeNotes(logits.softmax(-1)[rows, places, token_ids], tree.depths.clamp(max=1))


def path_notes(tree: DraftTree, path_logprobs: Tensor, forwards: Tensor) -> NodeNotes:
    """The same for drafters that score whole paths.

    Args:
        tree: whose nodes are the first of those that follow: it may have been cut since it was drafted.
        path_logprobs: [batch, nodes] floating, nats, of the path to each node; 0 at the root.
        forwards: [batch, nodes] int64, see `NodeNotes`.
    """
    path_logprobs, forwards = path_logprobs[:, : tree.num_nodes], forwards[:, : tree.num_nodes]
    above = path_logprobs.gather(1, tree.parents.to(path_logprobs.device).clamp(min=0))
    return NodeNotes((path_logprobs - above).exp(), forwards)
