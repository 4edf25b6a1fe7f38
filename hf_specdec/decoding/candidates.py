"""What the loop and a drafter say to each other: the interface that every method implements.

A drafter makes one `TreeCandidateGenerator` per `generate` call; all state of the call lives in it. Each round the loop
asks `draft(context)` for a tree and then reports with `observe(outcome)` what was committed. The same outcome object
reports the prefill, whose committed tokens are the prompt's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree


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


@dataclass(frozen=True)
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
        lap: `lap("draft")` after the drafter's last forward and `lap("tree")` after building the tree let the
            statistics tell the two apart; without, all of `draft()` counts as drafting. Costs no sync.
    """

    root_ids: Tensor
    root_positions: Tensor
    sequences: Tensor
    lengths: list[int]
    active: list[bool]
    choice: ChoiceRule = GREEDY
    lap: Callable[[str], None] = _untimed


@dataclass(frozen=True)
class RoundOutcome:
    """What a round, or the prefill, committed to the target's cache: for a round the root and the accepted nodes.

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
        path: [batch, steps] int64, the node of each token in `tree`; None for the prefill.
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


class TreeCandidateGenerator(ABC):
    """Drafts trees for one `generate` call.

    Not a `transformers.generation.CandidateGenerator`: that interface hands out flat candidates of one row and reads
    hidden states from the host's outputs, so a subclass could not draft in the host's loop anyway.
    """

    @abstractmethod
    def draft(self, context: DraftContext) -> DraftTree:
        """Proposes continuations of every row's root. Must not wait for the device more than its method needs."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Takes note of what the prefill or a round committed. The default needs no such knowledge."""

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        """What the drafter knows of the nodes of `tree`, the one it drafted last; asked only where a trace is kept."""
        return None

    def close(self) -> None:
        """Releases what outlives a round (threads, streams, hooks); called once, also after an error."""
