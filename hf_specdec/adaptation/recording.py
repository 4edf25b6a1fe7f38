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

    def draft_states(self, nodes: list[int]) -> Tensor:
        """[batch, hidden]: of the latest tree, what the heads read for the children of each row's node.

        Args:
            nodes: per row a node that has children.
        """


@dataclass
class Query:
    """One `generate` call.

    Attributes:
        rows: per row of the batch, its text with the target's states: `input_ids` [length] int64, `features`
            [length, taps * hidden], `last_hidden` [length, hidden], and `first_anchor`, the length of its prompt.
        states: [hidden] each, see `AdaptiveStep.head_loss`: of the rejected positions.
        target_hidden: [hidden] each, the target's states there.
        chosen_ids: the tokens that the target chose there, 0-dimensional.
        num_accepted: drafted tokens kept, summed over rows.
        num_rounds: rounds, summed over rows.
        seconds: from the making of the candidate generator to its end.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    target_hidden: list[Tensor] = field(default_factory=list)
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
    rejected: tuple[Tensor, Tensor] | None = None  # drafter's and target's state, until the chosen token is known


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
        self.active: list[bool] = []
        self.started = time.perf_counter()

    def draft(self, context: DraftContext) -> DraftTree:
        for row, root in zip(self.rows, context.root_ids, strict=True):
            if row.rejected is not None:
                self.query.states.append(row.rejected[0])
                self.query.target_hidden.append(row.rejected[1])
                self.query.chosen_ids.append(root.clone())
                row.rejected = None
        self.active = context.active
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
            self._note_rejections(outcome, features)
        self.inner.observe(replace(outcome, features=features[..., : self.width]))

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        return self.inner.describe(tree)

    def _note_rejections(self, outcome: RoundOutcome, features: Tensor) -> None:
        """Where the target chose none of the tokens that were drafted: the end of a path that has children."""
        tree, path = outcome.tree, outcome.path
        assert tree is not None
        assert path is not None
        going = [index for index, count in enumerate(outcome.num_committed) if count > 0]
        self.query.num_rounds += len(going)
        self.query.num_accepted += sum(outcome.num_accepted[index] for index in going)
        last = path.gather(1, torch.tensor(outcome.num_accepted, device=path.device).unsqueeze(1))
        below = ((tree.parents == last) & tree.valid).any(1)
        # One transfer for both; on the CPU a look.
        nodes, drafted = torch.stack([last.squeeze(1), below.long()]).tolist()
        rejected = [index for index in going if drafted[index]]
        if not rejected:
            return
        for index in range(len(nodes)):
            if index not in rejected:
                nodes[index] = 0  # any node that has children, or none if nothing was drafted
        states = self.giver.draft_states(nodes)
        for index in rejected:
            hidden = features[index, outcome.num_accepted[index], self.width :]
            # Copies: drafting may use memory again, and its tensors know no gradients.
            self.rows[index].rejected = states[index].clone(), hidden.clone()

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
