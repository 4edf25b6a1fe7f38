"""TreeCandidateGenerator: the interface that every method implements.

A drafter makes one generator per `generate` call; the generator owns all drafting state of that call. In each round the
loop calls `draft(context)` for a tree, `verify` to run the target on it, and `observe(committed)` to report what was
committed. The prefill is reported in the same form: the prompt is what it committed.

Generators are also `CandidateGenerator`s of transformers: in transformers' own loop they draft chains
(`chains.py`). What loop and generator pass to each other is in `exchange.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.generation import CandidateGenerator

from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes, path_notes
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.tree import DraftTree


class TreeCandidateGenerator(CandidateGenerator, ABC):
    """Drafts trees for one `generate` call.

    Attributes:
        drops_rows: whether `keep_rows` can be called: by default, whether it is implemented.
        drafts_early: whether `draft` depends only on `observe` and the roots, on the device, and samples nothing. The
            loop may then call it before the host has read the last verdict; `sequences`, `lengths` and `active` of the
            context are then one or two rounds old.
        reads_cache: whether it drafts from the target's own cache.
        joins_rows: whether `join` can be called: by default, whether it is implemented.
        assisted: its state in transformers' own loop (`AssistedChains`); None in ours.
    """

    drops_rows: bool
    joins_rows: bool
    drafts_early: bool = False
    reads_cache: bool = False
    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}  # noqa: RUF012  (transformers only reads it; features come from taps)
    assisted: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.drops_rows = cls.keep_rows is not TreeCandidateGenerator.keep_rows
        cls.joins_rows = cls.join is not TreeCandidateGenerator.join

    @abstractmethod
    def draft(self, context: DraftContext) -> DraftTree:
        """Proposes continuations of every row's root. Avoid device synchronisation."""

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        """Runs the target on a tree. Overridden by methods that run its layers while drafting, or draft in parallel.

        Args:
            target: of the call.
            tree: the last result of `draft`, or a part of it.
            state: at the start of the round.
        """
        return target.verify(tree, state.root_positions)

    def observe(self, committed: Committed) -> None:
        """Receives what the prefill or a round committed. The default ignores it."""

    def count(self, stats: SpeculationStats) -> None:
        """Adds the drafter's own counts to the statistics; called once, before `close`."""

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        """The drafter's notes on the nodes of `tree`, the last one it drafted, for traces and thresholds.

        The default has the probabilities of a tree with `path_logprobs`.
        """
        return path_notes(tree)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Continues with these rows only, in this order: the others have finished. Called between rounds.

        Called only if `drops_rows`. Otherwise finished rows stay in the batch and are still computed.
        """

    def why_apart(self) -> str | None:
        """After the target's prefill: why its row cannot share rounds with rows of other calls; None if it can."""
        return None if self.joins_rows else f"{type(self).__name__} drafts for the rows of one call"

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        """The rows of others take these places; called between rounds, and only if `joins_rows`.

        Args:
            others: generators of the same drafter with one row each, which have drafted once, and observed a round that
                kept nothing. They must not be used afterwards.
            places: rows that have ended, or further rows, see `state.with_rows`.
        """

    def close(self) -> None:
        """Releases threads, processes, streams and hooks; called once, also after an error."""

    def get_candidates(
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Called by transformers' loop: the text so far and the best path of the next tree.

        Args:
            input_ids: [1, length] int64, the text so far.
            model_kwargs: of transformers' call.
            model_outputs: of its last forward.
            is_first_iteration: whether nothing has been run yet.
            n_last_matches: drafted tokens that the last round kept.
            kwargs: reserved for later versions of transformers.

        Returns:
            [1, length + drafted] int64, and the logits [1, drafted, vocab] of the draft distributions if the path was
            sampled.
        """
        if self.assisted is None:
            raise RuntimeError(
                f"{type(self).__name__}.get_candidates needs the target of the call, which is known only in calls "
                "of model.generate(assistant_model=drafter). Pass the drafter to generate."
            )
        return self.assisted.candidates(self, input_ids, model_kwargs or {}, model_outputs, n_last_matches)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Called by transformers' loop: passes the number of kept drafted tokens to policy and statistics."""
        if self.assisted is not None:
            self.assisted.note(num_matches)
