"""Observers of a call: what happened in each round, once the host has read it.

They do not change the output. A policy is one of them, and uses what it sees for the next drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_specdec.decoding.accept import HostVerdict, Verdict
from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.exchange import Committed, NodeNotes
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.target import TargetOutput
from hf_specdec.decoding.tree import DraftTree


@dataclass(frozen=True)
class Round:
    """A round, or the prefill, that the host has read; its nodes are not committed yet where `lag` is 0.

    Attributes:
        tree: that was verified; a root alone for the prefill.
        output: of the target.
        verdict: on the device.
        host: the verdict, read; its lists have an entry per live row.
        sequences: with the tokens of the round.
        kept: per row of the batch, how many of its tokens are in the output: fewer than all where a stopping criterion
            cut the round short.
        cache: of the target.
        describe: what the drafter knows of the nodes.
    """

    tree: DraftTree
    output: TargetOutput
    verdict: Verdict
    host: HostVerdict
    sequences: Sequences
    kept: list[int]
    cache: TreeCache
    describe: Callable[[DraftTree], NodeNotes | None]


class Observer:
    """Looks at every round of a call.

    Attributes:
        waits: whether it must see a round before the next one is drafted.
    """

    waits: bool = False

    def on_prefill(self, prefill: Round) -> None:
        """The prompt was run and the first token chosen."""

    def on_round(self, step: Round) -> None:
        """A round was read: its tokens are in the sequences, and not streamed yet."""

    def on_commit(self, committed: Committed) -> None:
        """A round was committed to the target's cache.

        The only call that transformers' own loop makes too; there, the call's last round is not reported. `tree` may
        then have more nodes than `target_logits`, which are those of its best path.
        """
