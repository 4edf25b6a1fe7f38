"""What the loop and a drafter say to each other: the interface that every method implements.

A drafter makes one `TreeCandidateGenerator` per `generate` call; all state of the call lives in it. Each round the loop
asks `draft(context)` for a tree, may let it draft on while the target verifies (`draft_ahead`), and then reports with
`observe(outcome)` what was committed. The same outcome object reports the prefill, whose committed tokens are the
prompt's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree, from_host, pick


@dataclass(frozen=True)
class ChoiceRule:
    """How the target's tokens are chosen in this call; drafts that are drawn alike are accepted more often.

    Attributes:
        do_sample: whether they are drawn, or are the likeliest ones.
        warpers: those processors of the call that look at logits alone (temperature, top-k, ...), in their order. They
            have no state, so a drafter may apply them too. What it drafts is verified under all processors.
    """

    do_sample: bool
    warpers: LogitsProcessorList


GREEDY = ChoiceRule(do_sample=False, warpers=LogitsProcessorList())


def _untimed(stage: str) -> None:
    """A lap that nobody takes."""


@dataclass
class DraftContext:
    """Where a round starts.

    Attributes:
        root_ids: [batch] int64, the last committed token of each row; the target has not seen it yet.
        root_positions: [batch] int64, its position id in the target.
        sequences: [batch, capacity] int64, all tokens so far, prompt and root included; columns beyond a row's length
            hold anything.
        lengths: tokens in each row of `sequences`, root included.
        active: per row, whether its tokens still matter; rows that have finished are drafted for but not read.
        choice: how the call chooses tokens, the same in every round.
        node_limit: no more nodes than these of the tree will be verified, so that drafting more is of no use; None
            where all will be. Smaller trees save time, but none has to be.
        lap: `lap("draft")` after the drafter's last forward and `lap("tree")` after building the tree let the
            statistics tell the two apart; without, all of `draft()` counts as drafting. Costs no sync.
    """

    root_ids: Tensor
    root_positions: Tensor
    sequences: Tensor
    lengths: list[int]
    active: list[bool]
    choice: ChoiceRule = GREEDY
    node_limit: int | None = None
    lap: Callable[[str], None] = _untimed


@dataclass
class RoundOutcome:
    """What a round, or the prefill, committed to the target's cache: for a round the root and the accepted nodes.

    Rounds that drafted nothing are reported together with the drafted one before them: `num_committed` then counts
    their tokens too, `num_from_tree` does not.

    Attributes:
        token_ids: [batch, steps] int64. Zeros where a prompt came as embeddings.
        features: [batch, steps, taps * hidden], the target's at exactly these tokens, or None without taps.
        position_ids: [batch, steps] int64.
        valid: [batch, steps] bool, or None for all True. False for padding: left padding of the prompt, the end of
            shorter rows of a round.
        num_committed: valid entries of each row, as the host knows them.
        num_accepted: drafted tokens kept per row; zeros for the prefill.
        target_logits: [batch, nodes, vocab], the target's raw logits of the whole tree.
        tree: the tree that was verified; None for the prefill.
        path: [batch, steps] int64, the node of each token in `tree`, for as many as came from it; None for the prefill.
        tokens: the same for the host: per row the accepted tokens, root excluded, then the bonus token; empty for the
            prefill. The bonus token is the next root of rows that go on.
        counts: [batch] int64, `num_committed` on the device, where the host has not read it yet: the lists are then
            empty, and filled when it has. Only generators that draft early see such an outcome.
    """

    token_ids: Tensor
    features: Tensor | None
    position_ids: Tensor
    valid: Tensor | None
    num_committed: list[int]
    num_accepted: list[int]
    target_logits: Tensor
    tree: DraftTree | None = None
    path: Tensor | None = None
    tokens: list[list[int]] = field(default_factory=list)
    counts: Tensor | None = None

    def counts_on(self, device: torch.device) -> Tensor:
        """[batch] int64: `num_committed` on a device, whether the host knows it already or not."""
        return from_host(self.num_committed, device) if self.counts is None else self.counts.to(device)

    @property
    def num_from_tree(self) -> list[int]:
        """Committed entries per row that are nodes of `tree`, root included; the others came from later rounds."""
        return [min(all_, kept + 1) for all_, kept in zip(self.num_committed, self.num_accepted, strict=True)]

    def lasting(self) -> RoundOutcome:
        """The same in tensors of its own, where a captured forward will write over its outputs before it is read."""
        features = None if self.features is None else self.features.clone()
        return replace(self, features=features, target_logits=self.target_logits.clone())

    def of_rows(self, rows: Sequence[int]) -> RoundOutcome:
        """The same for some of the rows."""
        index = from_host(rows, self.token_ids.device)

        def pick(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[index.to(part.device)]

        counts = [self.num_committed[row] for row in rows]
        width = max(1, *counts)  # rows that all have waited keep a step, of padding
        steps = slice(0, width)
        features, valid, path = pick(self.features), pick(self.valid), pick(self.path)
        return replace(
            self,
            token_ids=self.token_ids[index][:, steps],
            features=None if features is None else features[:, steps],
            position_ids=self.position_ids[index][:, steps],
            valid=None if valid is None or min(counts) == width else valid[:, steps],
            num_committed=counts,
            num_accepted=[self.num_accepted[row] for row in rows],
            tokens=[self.tokens[row] for row in rows] if self.tokens else [],
            target_logits=self.target_logits[index.to(self.target_logits.device)],
            tree=None if self.tree is None else self.tree.of_rows(rows),
            path=path,
        )

    def followed_by(self, later: Sequence[RoundOutcome]) -> RoundOutcome:
        """This outcome and those of rounds after it that drafted nothing, as one."""
        if not later:
            return self
        parts = [self, *later]
        token_ids = torch.cat([part.token_ids for part in parts], 1)
        position_ids = torch.cat([part.position_ids for part in parts], 1)
        features = None
        if self.features is not None:
            features = torch.cat([part.features for part in parts if part.features is not None], 1)
        counts = [sum(numbers) for numbers in zip(*(part.num_committed for part in parts), strict=True)]
        valid = None
        if min(counts) < token_ids.shape[1]:
            there = [
                torch.ones_like(part.token_ids, dtype=torch.bool) if part.valid is None else part.valid
                for part in parts
            ]
            # What a row waited out lies in the middle of it now: bring what it has to the front, in order.
            order = (~torch.cat(there, 1)).to(torch.int8).argsort(dim=1, stable=True)[:, : max(counts)]
            token_ids, position_ids = token_ids.gather(1, order), position_ids.gather(1, order)
            if features is not None:
                features = pick(features, order.to(features.device))
            if min(counts) < max(counts):
                steps = torch.arange(max(counts), device=order.device)
                valid = steps < from_host(counts, order.device).unsqueeze(1)
        return replace(
            self,
            token_ids=token_ids,
            features=features,
            position_ids=position_ids,
            valid=valid,
            num_committed=counts,
            tokens=[
                [token for new in row for token in new] for row in zip(*(part.tokens for part in parts), strict=False)
            ],
        )


@dataclass(frozen=True)
class DrawnCandidates:
    """Tokens drawn at random for what may follow a verified tree; the bonus token can then be coupled with them.

    Attributes:
        nodes: [batch] int64, the leaf of the verified tree that the tokens would follow.
        token_ids: [batch, siblings] int64, candidates for the token after that leaf, in the order they were drawn.
        draft_probs: [batch, siblings, vocab] float32, the law each was drawn from, given its elder siblings.
        drafted: [batch, siblings] bool, False where a row has fewer candidates.
    """

    nodes: Tensor
    token_ids: Tensor
    draft_probs: Tensor
    drafted: Tensor


@dataclass(frozen=True)
class DraftsAhead:
    """What was drafted while the target verified a tree. What the drafter makes of it is its own business.

    Attributes:
        busy_s: seconds that drafting took of its own time, waiting left aside.
        drawn: what the rule of acceptance needs to know of candidates that were drawn; None where none were.
    """

    busy_s: float
    drawn: DrawnCandidates | None = None


class PendingDrafts(Protocol):
    """Drafting that goes on beside the target; a `concurrent.futures.Future` will do."""

    def result(self) -> DraftsAhead:
        """Waits for the end; raises what drafting raised."""


class TreeCandidateGenerator(ABC):
    """Drafts trees for one `generate` call.

    Not a `transformers.generation.CandidateGenerator`: that interface hands out flat candidates of one row and reads
    hidden states from the host's outputs, so a subclass could not draft in the host's loop anyway.

    Attributes:
        drops_rows: whether `keep_rows` is implemented.
        drafts_early: whether it drafts from `observe` and the roots alone, on the device: the loop may then ask for the
            next tree before the host has read what came of the last one. Of the context, `sequences`, `lengths` and
            `active` are those of a round or two before.
    """

    drops_rows: bool = False
    drafts_early: bool = False

    @abstractmethod
    def draft(self, context: DraftContext) -> DraftTree:
        """Proposes continuations of every row's root. Must not wait for the device more than its method needs."""

    def draft_ahead(self, tree: DraftTree) -> PendingDrafts | None:
        """Starts to draft what may follow `tree`, beside the target that verifies it, and returns at once.

        The loop asks for the result when the target is done; no other method is called in between but, where the
        target fails, `close`. The default does nothing beside the target.
        """
        return None

    def observe(self, outcome: RoundOutcome) -> None:
        """Takes note of what the prefill or a round committed. The default needs no such knowledge."""

    def count(self, stats: SpeculationStats) -> None:
        """Adds what only the drafter knows to the statistics; called once, before `close`."""

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        """What the drafter knows of the nodes of `tree`, the one it drafted last; asked only where a trace is kept."""
        return None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only, in this order: the others have finished. Called between rounds.

        Only generators with `drops_rows` are asked; for the others finished rows stay in the batch, and cost.
        """

    def close(self) -> None:
        """Releases what outlives a round (threads, processes, streams, hooks); called once, also after an error."""
