"""What a query leaves behind for learning: its text with the target's states, its rejected positions, and the signal.

`QueryRecorder` stands between the loop and a drafter's own candidate generator. The target's last hidden state, which
training needs, travels as one more tapped layer and is taken off before the drafter sees the features; nothing is
computed twice. Source: SpecBlock, Section 3.4. What becomes of it is in `drafter.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_specdec.decoding.candidates import DraftContext, RoundOutcome, TreeCandidateGenerator
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree


@runtime_checkable
class GivesDraftStates(Protocol):
    """A candidate generator that can say from which of the drafter's states the children of a node were drafted."""

    def draft_states(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Of the latest tree, what the heads read for the children of some nodes.

        Args:
            nodes: [batch, count] int64.

        Returns:
            states [batch, count, hidden] and which of the nodes have children, [batch, count] bool; the state of one
            that has none is any. Tensors of their own, on the drafter's device.
        """


@dataclass
class Query:
    """One `generate` call.

    Positions are those that the drafter drafted for on the way that the target then took: along each accepted path, and
    where the target chose none of the tokens that were drafted. What there is of them comes in parts, one per round.

    Attributes:
        rows: per row of the batch, its text with the target's states: `input_ids` [length] int64, `features`
            [length, taps * hidden], `last_hidden` [length, hidden], and `first_anchor`, the length of its prompt.
        states: [positions, hidden] each, see `AdaptiveStep.head_loss`.
        target_hidden: [positions, hidden] each, the target's states there.
        rejected: [rejected positions, hidden] each, the states where the path ended although there were children.
        chosen_ids: [rejected positions] int64 each, the tokens that the target chose there.
        num_accepted: drafted tokens kept, summed over rows.
        num_rounds: rounds, summed over rows.
        seconds: from the making of the candidate generator to its end.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    target_hidden: list[Tensor] = field(default_factory=list)
    rejected: list[Tensor] = field(default_factory=list)
    chosen_ids: list[Tensor] = field(default_factory=list)
    num_accepted: int = 0
    num_rounds: int = 0
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens written, the one that came with the prefill included."""
        return self.num_accepted + self.num_rounds + len(self.rows)


@dataclass
class _Row:
    """One row while the call runs."""

    prompt_length: int = 0
    token_ids: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)


class QueryRecorder(TreeCandidateGenerator):
    """A candidate generator that drafts as another does and keeps what can be learned from.

    Args:
        inner: the drafter's own.
        width: of the drafter's features; the rest of what the target gives is its last hidden state.
        between_rounds: called before each draft: the only moment at which weights may change.
        finished: receives the query when the call ends, after an error too.
    """

    def __init__(
        self,
        inner: TreeCandidateGenerator,
        width: int,
        *,
        between_rounds: Callable[[], None],
        finished: Callable[[Query], None],
    ) -> None:
        assert isinstance(inner, GivesDraftStates)
        self.inner, self.giver, self.width = inner, inner, width
        self.between_rounds, self.finished = between_rounds, finished
        self.query = Query()
        self.rows: list[_Row] = []
        self.ended: tuple[Tensor, Tensor] | None = None  # states of rejections and their rows, until the choice is known
        self.started = time.perf_counter()

    def draft(self, context: DraftContext) -> DraftTree:
        if self.ended is not None:
            states, rows = self.ended
            self.query.rejected.append(states)
            self.query.chosen_ids.append(context.root_ids[rows])
            self.ended = None
        self.between_rounds()
        return self.inner.draft(context)

    def observe(self, outcome: RoundOutcome) -> None:
        features = outcome.features
        assert features is not None
        if not self.rows:
            self.rows = [_Row(count) for count in outcome.num_committed]
        for index, (row, count) in enumerate(zip(self.rows, outcome.num_committed, strict=True)):
            if outcome.valid is None or outcome.tree is not None:  # padding, if any, is behind
                row.token_ids.append(outcome.token_ids[index, :count])
                row.features.append(features[index, :count])
            else:
                row.token_ids.append(outcome.token_ids[index][outcome.valid[index]])
                row.features.append(features[index][outcome.valid[index]])
        if outcome.tree is not None:
            self._note_positions(outcome, features)
        self.inner.observe(replace(outcome, features=features[..., : self.width]))

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        return self.inner.describe(tree)

    def _note_positions(self, outcome: RoundOutcome, features: Tensor) -> None:
        path, kept = outcome.path, outcome.num_from_tree
        assert path is not None
        self.query.num_rounds += sum(count > 0 for count in kept)
        self.query.num_accepted += sum(outcome.num_accepted[row] for row, count in enumerate(kept) if count > 0)
        states, drafted = self.giver.draft_states(path)
        steps = torch.arange(path.shape[1], device=drafted.device)
        left = torch.tensor(kept, device=drafted.device).unsqueeze(1) - steps  # 1 at the end of a row's path
        learned = drafted & (left > 0)
        ended = drafted & (left == 1)
        self.query.states.append(states[learned])
        self.query.target_hidden.append(features[:, : path.shape[1], self.width :][learned.to(features.device)])
        self.ended = states[ended], ended.any(1)

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            self.query.seconds = time.perf_counter() - self.started
            for row in self.rows:
                features = torch.cat(row.features)
                self.query.rows.append(
                    {
                        "input_ids": torch.cat(row.token_ids),
                        "first_anchor": max(1, row.prompt_length),
                        "features": features[:, : self.width],
                        "last_hidden": features[:, self.width :],
                    }
                )
            self.finished(self.query)
