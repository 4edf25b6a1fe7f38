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

from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.target import TargetModel, TargetOutput
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
    where the target chose none of the tokens that were drafted, all rows one after the other.

    Attributes:
        rows: per row of the batch, its text with the target's states: `input_ids` [length] int64, `features`
            [length, taps * hidden], `last_hidden` [length, hidden], and `first_anchor`, the length of its prompt.
        states: [positions, hidden], see `AdaptiveStep.head_loss`.
        target_hidden: [positions, target_hidden], the target's states there.
        rejected: [rejected positions, hidden], the states where a path ended although there were children.
        chosen_ids: [rejected positions] int64, the tokens that the target chose there.
        num_accepted: drafted tokens kept, summed over rows.
        num_rounds: rounds, summed over rows.
        seconds: from the making of the candidate generator to its end.
    """

    rows: list[dict[str, Any]]
    states: Tensor
    target_hidden: Tensor
    rejected: Tensor
    chosen_ids: Tensor
    num_accepted: int
    num_rounds: int
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Tokens written, the one that came with the prefill included."""
        return self.num_accepted + self.num_rounds + len(self.rows)


@dataclass
class _Row:
    """One row while the call runs.

    Attributes:
        prompt_length: of its text.
        length: of its text so far.
        token_ids: its text in parts, as it was committed.
        features: the target's, likewise.
        states: [path, hidden] each, per round from which state the children of each node of the path were drafted.
        drafted: [path] bool each, whether there were any.
        places: the positions in the text of all these.
        ends: of each round the last of them, counted through.
        num_accepted: drafted tokens kept.
    """

    prompt_length: int
    length: int = 0
    token_ids: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    drafted: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    num_accepted: int = 0


class QueryRecorder(TreeCandidateGenerator):
    """A candidate generator that drafts as another does and keeps what can be learned from.

    A round is short, so it only keeps tensors that are there already; what they mean is worked out at the end.

    Args:
        inner: the drafter's own.
        width: of the drafter's features; the rest of what the target gives is its last hidden state.
        between_rounds: called before each draft: the only moment at which weights may change.
        finished: receives the query when the call ends, after an error too, unless it ended before its first round.
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
        self.rows: list[_Row] = []
        self.started = time.perf_counter()

    def draft(self, context: DraftContext) -> DraftTree:
        self.between_rounds()
        return self.inner.draft(context)

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        return self.inner.verify(target, tree, state)

    def observe(self, committed: Committed) -> None:
        features = committed.features
        assert features is not None
        if not self.rows:
            self.rows = [_Row(count) for count in committed.num_committed]
        if committed.tree is not None:
            self._note_path(committed)
        for index, (row, count) in enumerate(zip(self.rows, committed.num_committed, strict=True)):
            if committed.valid is None or committed.tree is not None:  # padding, if any, is behind
                row.token_ids.append(committed.token_ids[index, :count])
                row.features.append(features[index, :count])
            else:
                row.token_ids.append(committed.token_ids[index][committed.valid[index]])
                row.features.append(features[index][committed.valid[index]])
            row.length += count
        self.inner.observe(replace(committed, features=features[..., : self.width]))

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        return self.inner.describe(tree)

    def _note_path(self, committed: Committed) -> None:
        assert committed.path is not None
        states, drafted = self.giver.draft_states(committed.path)
        kept = zip(self.rows, committed.num_committed, committed.num_accepted, strict=True)
        for index, (row, count, accepted) in enumerate(kept):
            if count == 0:  # it waited for the others
                continue
            row.states.append(states[index, :count])
            row.drafted.append(drafted[index, :count])
            row.places.extend(range(row.length, row.length + count))
            row.ends.append(len(row.places) - 1)
            row.num_accepted += accepted

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            seconds = time.perf_counter() - self.started
            if any(row.ends for row in self.rows):
                self.finished(self._query(seconds))

    def _query(self, seconds: float) -> Query:
        rows, positions = [], []
        for row in self.rows:
            features, token_ids = torch.cat(row.features), torch.cat(row.token_ids)
            text, last_hidden = features[:, : self.width], features[:, self.width :]
            first = max(1, row.prompt_length)
            rows.append({"input_ids": token_ids, "first_anchor": first, "features": text, "last_hidden": last_hidden})
            if row.ends:
                positions.append(_positions(row, token_ids, last_hidden))
        states, target_hidden, rejected, chosen_ids = (torch.cat(parts) for parts in zip(*positions, strict=True))
        accepted, rounds = sum(row.num_accepted for row in self.rows), sum(len(row.ends) for row in self.rows)
        return Query(rows, states, target_hidden, rejected, chosen_ids, accepted, rounds, seconds)


def _positions(row: _Row, token_ids: Tensor, last_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, the target's states, states of the rejected positions, and what the target chose there: of one row."""
    states, drafted = torch.cat(row.states), torch.cat(row.drafted)
    places, ends = torch.tensor(row.places), torch.tensor(row.ends)
    # What the target chose is the token that comes next; after the text's last one it never entered the target.
    ends = ends[places[ends] + 1 < row.length].to(drafted.device)
    ends = ends[drafted[ends]]
    learned = drafted.to(last_hidden.device)
    places = places.to(last_hidden.device)
    return states[drafted], last_hidden[places[learned]], states[ends], token_ids[places[ends.to(places.device)] + 1]
