"""Records the training data of a query: its text with the target's states, and its drafted and rejected positions.

`TextRecorder` wraps a drafter's candidate generator. The target's last hidden state, which training needs, is read as
an additional tapped layer and removed before the drafter gets the features; nothing is computed twice. `QueryRecorder`
adds the positions, from SpecBlock, Section 3.4, for `drafter.py`, and `RefusalRecorder` the refused drafts, for
`aurora.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.tree import DraftTree

MOST_REFUSED = 8  # drafts of a position that are recorded


@runtime_checkable
class GivesDraftStates(Protocol):
    """A candidate generator that gives the drafter's states from which the children of a node were drafted."""

    def draft_states(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the heads for the children of some nodes of the latest tree.

        Args:
            nodes: [batch, count] int64.

        Returns:
            states [batch, count, hidden], undefined for nodes without children, and whether the nodes have children,
            [batch, count] bool. New tensors, on the drafter's device.
        """


@dataclass
class Query:
    """One `generate` call.

    Positions are the nodes of each accepted path, including the last one, that have drafted children; those of all rows
    are concatenated.

    Attributes:
        rows: per row of the batch, its text with the target's states: `input_ids` [length] int64, `features`
            [length, taps * hidden], `last_hidden` [length, hidden], and `first_anchor`, the length of its prompt.
        states: [positions, hidden], see `AdaptiveStep.head_loss`.
        target_hidden: [positions, target_hidden], the target's states at these positions.
        rejected: [rejected positions, hidden], the states at the end of paths whose drafted children were all rejected.
        chosen_ids: [rejected positions] int64, the target's tokens there.
        num_accepted: accepted drafted tokens, summed over rows.
        num_rounds: rounds, summed over rows.
        seconds: from the creation of the candidate generator to its end.
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
        """Tokens written, including the one of the prefill."""
        return self.num_accepted + self.num_rounds + len(self.rows)


@dataclass
class Row:
    """The text of one row during the call.

    Attributes:
        prompt_length: of its text.
        length: of its text so far.
        token_ids: its text, in parts as committed.
        features: the target's, in the same parts.
    """

    prompt_length: int
    length: int = 0
    token_ids: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)


@dataclass
class _Row(Row):
    """One row of a query.

    Attributes:
        states: [path, hidden] per round, the states from which the children of the path's nodes were drafted.
        drafted: [path] bool per round, whether there are children.
        positions: of all these nodes in the text.
        ends: per round the index in `positions` of the path's last node.
        num_accepted: accepted drafted tokens.
    """

    states: list[Tensor] = field(default_factory=list)
    drafted: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    num_accepted: int = 0


AnyRow = TypeVar("AnyRow", bound=Row)


class TextRecorder(TreeCandidateGenerator, Generic[AnyRow]):
    """A candidate generator that delegates to another one and records the texts with the target's states.

    To keep rounds short it only stores existing tensors; they are evaluated at the end of the call.

    Args:
        inner: the drafter's own.
        width: of the drafter's features; the remaining features are the target's last hidden state.
        row: the class of the rows.
    """

    def __init__(self, inner: TreeCandidateGenerator, width: int, row: type[AnyRow]) -> None:
        self.inner, self.width, self.row = inner, width, row
        self.rows: list[AnyRow] = []
        self.drafted = False  # since the latest commit: as one of several sources, it is skipped in some rounds

    def draft(self, context: DraftContext) -> DraftTree:
        self.drafted = True
        return self.inner.draft(context)

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        return self.inner.verify(target, tree, state)

    def record(self, committed: Committed) -> None:
        """Called with each round in which this drafter has drafted, before its text is added to the rows."""

    def observe(self, committed: Committed) -> None:
        features = committed.features
        assert features is not None
        if not self.rows:
            self.rows = [self.row(count) for count in committed.num_committed]
        if committed.tree is not None and committed.path is not None and self.drafted:
            self.record(committed)
        self.drafted = False
        for index, (row, count) in enumerate(zip(self.rows, committed.num_committed, strict=True)):
            if committed.valid is None or committed.tree is not None:  # padding, if any, is at the end
                row.token_ids.append(committed.token_ids[index, :count])
                row.features.append(features[index, :count])
            else:
                row.token_ids.append(committed.token_ids[index][committed.valid[index]])
                row.features.append(features[index][committed.valid[index]])
            row.length += count
        self.inner.observe(replace(committed, features=features[..., : self.width]))

    def count(self, stats: SpeculationStats) -> None:
        self.inner.count(stats)

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        return self.inner.describe(tree)

    def text(self, row: AnyRow) -> dict[str, Any]:
        """The columns of `training/data.py` that do not depend on padding, with the target's states."""
        features = torch.cat(row.features)
        return {
            "input_ids": torch.cat(row.token_ids), "first_anchor": max(1, row.prompt_length),
            "features": features[:, : self.width], "last_hidden": features[:, self.width :],
        }  # fmt: skip


class QueryRecorder(TextRecorder[_Row]):
    """Records the data of a query.

    Args:
        inner: the drafter's own.
        width: see `TextRecorder`.
        between_rounds: called before each draft; weights may change only then.
        finished: called with the query at the end of the call, also after an error, unless there was no round.
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
        super().__init__(inner, width, _Row)
        self.draft_states = inner.draft_states
        self.between_rounds, self.finished = between_rounds, finished
        self.started = time.perf_counter()

    def draft(self, context: DraftContext) -> DraftTree:
        self.between_rounds()
        return super().draft(context)

    def record(self, committed: Committed) -> None:
        assert committed.path is not None
        states, drafted = self.draft_states(committed.path.clamp(min=0))
        # The path may go on with tokens of other sources, which this drafter has not drafted.
        proposed = (committed.path >= 0).sum(1).tolist()
        for index, (row, count, own) in enumerate(zip(self.rows, committed.num_committed, proposed, strict=True)):
            if count == 0:  # finished earlier than other rows
                continue
            own = min(own, count)
            row.states.append(states[index, :own])
            row.drafted.append(drafted[index, :own])
            row.positions.extend(range(row.length, row.length + own))
            row.ends.append(len(row.positions) - 1)
            row.num_accepted += own - 1

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            seconds = time.perf_counter() - self.started
            if any(row.ends for row in self.rows):
                self.finished(self._query(seconds))

    def _query(self, seconds: float) -> Query:
        rows = [self.text(row) for row in self.rows]
        positions = [
            _positions(row, text["input_ids"], text["last_hidden"])
            for row, text in zip(self.rows, rows, strict=True)
            if row.ends
        ]
        states, target_hidden, rejected, chosen_ids = (torch.cat(parts) for parts in zip(*positions, strict=True))
        accepted, rounds = sum(row.num_accepted for row in self.rows), sum(len(row.ends) for row in self.rows)
        return Query(rows, states, target_hidden, rejected, chosen_ids, accepted, rounds, seconds)


def _positions(row: _Row, token_ids: Tensor, last_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one row: states, the target's states, states of the rejected positions, and the target's tokens there."""
    states, drafted = torch.cat(row.states), torch.cat(row.drafted)
    positions, ends = torch.tensor(row.positions), torch.tensor(row.ends)
    # The target's token is the next one of the text; the token after the last one is not recorded.
    ends = ends[positions[ends] + 1 < row.length].to(drafted.device)
    ends = ends[drafted[ends]]
    positions = positions.to(last_hidden.device)
    chosen_ids = token_ids[positions[ends.to(positions.device)] + 1]
    return states[drafted], last_hidden[positions[drafted.to(positions.device)]], states[ends], chosen_ids


@dataclass
class RefusedRow(Row):
    """One row of a call.

    Attributes:
        refused: per round the length of the text before it, and of each node of the tree its depth, its token, and
            whether it is a refused draft at a position of the text: [nodes] each, on the device.
    """

    refused: list[tuple[int, Tensor, Tensor, Tensor]] = field(default_factory=list)


class RefusalRecorder(TextRecorder[RefusedRow]):
    """Records the texts of a call with the drafts that were refused after the accepted part of a path.

    A draft below a refused one is not recorded: it continues another text.

    Args:
        inner: the drafter's own generator.
        width: see `TextRecorder`.
        finished: called with the recorded texts at the end of the call, also after an error.
    """

    def __init__(
        self, inner: TreeCandidateGenerator, width: int, finished: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        super().__init__(inner, width, RefusedRow)
        self.finished = finished

    def record(self, committed: Committed) -> None:
        tree, path = committed.tree, committed.path
        assert tree is not None
        assert path is not None
        steps = torch.arange(path.shape[1], device=path.device)
        kept = (path >= 0) & (steps < committed.counts.tensor.unsqueeze(1))
        nodes = torch.arange(tree.num_nodes, device=path.device)
        accepted = ((path.unsqueeze(-1) == nodes) & kept.unsqueeze(-1)).any(1)  # [batch, nodes], the root included
        refused = tree.valid & ~accepted & accepted.gather(1, tree.parents.clamp(min=0)) & (tree.parents >= 0)
        for index, row in enumerate(self.rows):
            if committed.num_committed[index]:
                # Captured rounds reuse the memory of a tree.
                depths, tokens, own = (each[index].clone() for each in (tree.depths, tree.token_ids, refused))
                row.refused.append((row.length, depths, tokens, own))

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            rows = [self.text(row) | {"refused": _refused(row)} for row in self.rows if row.refused]
            if rows:
                self.finished(rows)


def _refused(row: RefusedRow) -> Tensor:
    """[length, MOST_REFUSED] int64: drafts in place of each token of the text that the target refused; -1 for none."""
    text = torch.cat(row.token_ids).tolist()
    found: list[list[int]] = [[] for _ in text]
    for length, *parts in row.refused:
        for depth, token, refused in zip(*(part.tolist() for part in parts), strict=True):
            place = length + depth
            # The text may lack its last token, and a round may end before its accepted path does.
            if refused and place < len(text) and token != text[place] and len(found[place]) < MOST_REFUSED:
                found[place].append(token)
    return torch.tensor([each + [-1] * (MOST_REFUSED - len(each)) for each in found])
