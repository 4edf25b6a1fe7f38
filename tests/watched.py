"""Watched: a drafter around another one that drafts the same, and keeps every context and tree.

It uses nothing but `Drafter` and `TreeCandidateGenerator`, so it watches any method; `scripted.py` drafts by script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter, MarginalsGenerator

Hook = TypeVar("Hook", bound=Callable[..., Any])


def unseen(hook: Hook) -> Hook:
    """The same hook as one of the library's own: with those of others, each call begins with a trial of the target."""
    hook.__module__ = "hf_specdec.tests"
    return hook


@dataclass(frozen=True)
class WatchedRound:
    """What a round drafted.

    Attributes:
        context: that it began with; its text is a copy, since the loop goes on writing to its own.
        tree: that was drafted.
        logits: [batch, depth, vocab] float32, the marginals that the tree was built from; None for other methods.
    """

    context: DraftContext
    tree: DraftTree
    logits: Tensor | None

    def text(self, row: int) -> list[int]:
        """The tokens of a row so far, its padding and the root included."""
        tokens: list[int] = self.context.sequences[row, : self.context.lengths[row]].tolist()
        return tokens


class Watched(Drafter):
    """Drafts as another drafter does.

    Attributes:
        drafter: the other one; its options hold.
        make: makes the generator of a call; the drafter's own by default.
        rounds: of the latest call.
    """

    def __init__(
        self, drafter: Drafter, make: Callable[[Any, TargetModel], TreeCandidateGenerator] | None = None
    ) -> None:
        self.drafter, self.options = drafter, drafter.options
        self.make = type(drafter).candidate_generator if make is None else make
        self.rounds: list[WatchedRound] = []

    @property
    def method(self) -> str:  # type: ignore[override]
        return self.drafter.method

    @property
    def trees(self) -> list[DraftTree]:
        return [watched.tree for watched in self.rounds]

    def check_target(self, model: PreTrainedModel) -> None:
        self.drafter.check_target(model)

    def check_options(self) -> None:
        self.drafter.check_options()

    def check_pairing(self, model: PreTrainedModel, input_ids: Tensor | None = None) -> None:
        self.drafter.check_pairing(model, input_ids)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return self.drafter.feature_layers(model)

    def drafting_policy(self, model: PreTrainedModel, batch: int, stats: SpeculationStats) -> DraftingPolicy:
        return self.drafter.drafting_policy(model, batch, stats)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        self.rounds = []
        return _WatchedGenerator(self.make(self.drafter, target), self.rounds)


class _WatchedGenerator(TreeCandidateGenerator):
    def __init__(self, inner: TreeCandidateGenerator, rounds: list[WatchedRound]) -> None:
        self.inner, self.rounds = inner, rounds
        self.drops_rows, self.drafts_early = inner.drops_rows, inner.drafts_early
        self.reads_cache = inner.reads_cache

    def draft(self, context: DraftContext) -> DraftTree:
        tree = self.inner.draft(context)
        before = replace(
            context, sequences=context.sequences.clone(), lengths=list(context.lengths), active=list(context.active)
        )
        logits = self.inner.logits.clone() if isinstance(self.inner, MarginalsGenerator) else None
        self.rounds.append(WatchedRound(before, tree, logits))
        return tree

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        return self.inner.verify(target, tree, state)

    def observe(self, committed: Committed) -> None:
        self.inner.observe(committed)

    def count(self, stats: SpeculationStats) -> None:
        self.inner.count(stats)

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        return self.inner.describe(tree)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.inner.keep_rows(rows)

    def close(self) -> None:
        self.inner.close()
