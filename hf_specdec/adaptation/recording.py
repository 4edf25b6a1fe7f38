"""Records the training data of a query: its text with the target's states, and its drafted and rejected positions.

`TextRecorder` wraps a drafter's candidate generator. The target's last hidden state, which training needs, is read as
an additional tapped layer and removed before the drafter gets the features; nothing is computed twice. `QueryRecorder`
adds the positions, from SpecBlock, Section 3.4, for `adaptive_drafter.py`, and `RefusalRecorder` the refused drafts,
for `aurora.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

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
        rounds: what `TextRecorder.record` has noted of its rounds, each with the length of the text before it.
    """

    prompt_length: int
    length: int = 0
    token_ids: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    rounds: list[tuple[int, tuple[Tensor, ...]]] = field(default_factory=list)


class TextRecorder(TreeCandidateGenerator):
    """A candidate generator that delegates to another one and records the texts with the target's states.

    To keep rounds short it only stores existing tensors; they are evaluated at the end of the call.

    Args:
        inner: the drafter's own.
        width: of the drafter's features; the remaining features are the target's last hidden state.
    """

    def __init__(self, inner: TreeCandidateGenerator, width: int) -> None:
        self.inner, self.width = inner, width
        self.rows: list[Row] = []
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
            self.rows = [Row(count) for count in committed.num_committed]
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

    def finish(self) -> None:
        """Called at the end of the call, also after an error."""

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            self.finish()

    def text(self, row: Row) -> dict[str, Any]:
        """The columns of `training/data.py` that do not depend on padding, with the target's states."""
        features = torch.cat(row.features)
        return {
            "input_ids": torch.cat(row.token_ids), "first_anchor": max(1, row.prompt_length),
            "features": features[:, : self.width], "last_hidden": features[:, self.width :],
        }  # fmt: skip


class QueryRecorder(TextRecorder):
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
        super().__init__(inner, width)
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
            if count:  # otherwise finished earlier than other rows
                own = min(own, count)
                row.rounds.append((row.length, (states[index, :own], drafted[index, :own])))

    def finish(self) -> None:
        seconds = time.perf_counter() - self.started
        paths = [len(drafted) for row in self.rows for _, (_, drafted) in row.rounds]
        if not paths:
            return
        rows = [self.text(row) for row in self.rows]
        positions = [
            _positions(row, text["input_ids"], text["last_hidden"])
            for row, text in zip(self.rows, rows, strict=True)
            if row.rounds
        ]
        states, target_hidden, rejected, chosen_ids = (torch.cat(parts) for parts in zip(*positions, strict=True))
        accepted = sum(paths) - len(paths)
        self.finished(Query(rows, states, target_hidden, rejected, chosen_ids, accepted, len(paths), seconds))


def _positions(row: Row, token_ids: Tensor, last_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one row: states, the target's states, states of the rejected positions, and the target's tokens there."""
    states, drafted = (torch.cat(parts) for parts in zip(*(noted for _, noted in row.rounds), strict=True))
    positions = torch.cat([torch.arange(length, length + len(noted[0]), device="cpu") for length, noted in row.rounds])
    ends = (
        torch.tensor([len(noted[0]) for _, noted in row.rounds], device="cpu").cumsum(0) - 1
    )  # the last node of each path
    # The target's token is the next one of the text; the token after the last one is not recorded.
    ends = ends[positions[ends] + 1 < row.length].to(drafted.device)
    ends = ends[drafted[ends]]
    positions = positions.to(last_hidden.device)
    chosen_ids = token_ids[positions[ends.to(positions.device)] + 1]
    return states[drafted], last_hidden[positions[drafted.to(positions.device)]], states[ends], chosen_ids


class RefusalRecorder(TextRecorder):
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
        super().__init__(inner, width)
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
                noted = tuple(each[index].clone() for each in (tree.depths, tree.token_ids, refused))
                row.rounds.append((row.length, noted))

    def finish(self) -> None:
        rows = [self.text(row) | {"refused": _refused(row)} for row in self.rows if row.rounds]
        if rows:
            self.finished(rows)


def _refused(row: Row) -> Tensor:
    """[length, MOST_REFUSED] int64: drafts in place of each token of the text that the target refused; -1 for none."""
    text = torch.cat(row.token_ids).tolist()
    found: list[list[int]] = [[] for _ in text]
    for length, parts in row.rounds:
        for depth, token, refused in zip(*(part.tolist() for part in parts), strict=True):
            place = length + depth
            # The text may lack its last token, and a round may end before its accepted path does.
            if refused and place < len(text) and token != text[place] and len(found[place]) < MOST_REFUSED:
                found[place].append(token)
    return torch.tensor([each + [-1] * (MOST_REFUSED - len(each)) for each in found], device="cpu")
