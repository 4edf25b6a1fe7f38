"""Drafter: what every method gives the integration, whether it is a network or a lookup."""

from __future__ import annotations

import difflib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.graphs import StaticCalls
from hf_specdec.decoding.logits_process import TargetVocabularyLogitsProcessor
from hf_specdec.decoding.policies import MOST_NODES, Always, AutoBudget, BudgetKnowledge
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import NodeNotes, Trace
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.registry import unknown_name


class Drafter(ABC):
    """Proposes tokens for a target. Pass it as `assistant_model=` to the target's `generate`.

    A drafter holds weights and drafting options; what a call needs to remember lives in the candidate generator that
    it makes per call. Drafting options are plain attributes and may be changed between calls.

    Attributes:
        method: name of the way it drafts.
        stats: of the latest `generate` call, filled while the call runs; None before the first.
        trace: set it to a `Trace()`, and the next `generate` calls record their rounds there; None to record nothing.
        compile_mode: "reduce-overhead" has the target's forwards captured in CUDA graphs, and the drafter's where its
            shapes allow; on a CPU it has the target's compiled by `torch.compile`. "none", the default, runs all as
            they are.
        option_names: drafting options that `load_drafter` accepts, all of them attributes.
        common_options: those that all drafters have.
    """

    option_names: ClassVar[tuple[str, ...]] = ("method",)
    common_options: ClassVar[tuple[str, ...]] = ("compile_mode",)

    method: str
    tree_budget: Any
    stats: SpeculationStats | None = None
    trace: Trace | None = None
    compile_mode: Any = "none"  # `compile` is a method of every torch module

    def __setattr__(self, name: str, value: Any) -> None:
        # Options are plain attributes, and one that is misspelt would be an attribute that nobody reads.
        if not hasattr(type(self), name) and name not in vars(self):
            known = (*self.option_names, *self.common_options)
            if name not in known and difflib.get_close_matches(name, known, n=1, cutoff=0.8):
                raise unknown_name("drafting option", name, known)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        def weak(value: object) -> bool:
            return isinstance(value, weakref.ref) or (isinstance(value, tuple) and any(map(weak, value)))

        # Which targets it has met, kept by weak references, is no part of a drafter that is pickled or copied.
        return {name: None if weak(value) else value for name, value in vars(self).items()}

    @property
    def methods(self) -> tuple[str, ...]:
        """The ways of drafting that it offers: what the option `method` may be set to, where there is a choice."""
        return (self.method,)

    @abstractmethod
    def check_target(self, model: PreTrainedModel) -> None:
        """Raises ValueError, naming both values and the way out, if this drafter cannot draft for `model`."""

    @abstractmethod
    def check_options(self) -> None:
        """Raises ValueError, naming the value and its range, if a drafting option is out of range."""

    def check_all_options(self) -> None:
        """`check_options`, and the attributes that every drafter has; each call begins with it."""
        if self.compile_mode not in COMPILE_MODES:
            raise ValueError(f"compile_mode={self.compile_mode!r} must be one of {list(COMPILE_MODES)}.")
        if self.trace is not None and not isinstance(self.trace, Trace):
            raise ValueError(f"trace={self.trace!r} must be a Trace, which rounds are recorded into, or None.")
        self.check_options()

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

    @property
    def node_limit(self) -> int:
        """Most nodes of a tree: `tree_budget` itself, or what "auto" may choose from."""
        budget: int | Literal["auto"] = self.tree_budget  # of those that draft trees
        return MOST_NODES if budget == "auto" else budget

    def check_tree_budget(self, most: int) -> None:
        """Raises ValueError unless `tree_budget` is "auto" or an integer from 1 to `most`."""
        budget: int | Literal["auto"] = self.tree_budget
        if budget != "auto" and (type(budget) is not int or not 1 <= budget <= most):
            raise ValueError(f"tree_budget={budget!r} must be an integer from 1 to {most}, or 'auto'.")

    def policy(self, model: PreTrainedModel, batch: int, stats: SpeculationStats) -> Always:
        """Chooses how much of each tree is verified in one call: all of it unless `tree_budget` is "auto".

        What calls learn about times and probabilities is kept for later ones with this target and this many rows.
        """
        if "tree_budget" not in self.option_names or self.tree_budget != "auto":
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

    def take_options(self, config: PreTrainedConfig) -> None:
        """Sets the options that were found to suit these weights, if their config has any (`drafting_options`).

        Raises:
            ValueError: they are no options by name, or as `set_options`.
        """
        options = getattr(config, "drafting_options", None)
        if options is None:
            return
        if not isinstance(options, dict):
            raise ValueError(f"drafting_options is {options!r}; it must hold options by name.")
        self.set_options(**options)

    def set_options(self, **options: Any) -> None:
        """Sets drafting options by name, then checks them together.

        Raises:
            ValueError: an option is unknown (the nearest name is suggested) or out of range; all stay as they were.
        """
        known = (*self.option_names, *self.common_options)
        for name in options:
            if name not in known:
                raise unknown_name("drafting option", name, known)
        before = {name: getattr(self, name) for name in options}
        try:
            for name, value in options.items():
                setattr(self, name, value)
            self.check_all_options()
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            raise


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


COMPILE_MODES = ("none", "reduce-overhead")
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
