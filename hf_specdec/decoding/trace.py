"""Trace: what happened round by round in a `generate` call, for those who want to look at it.

Off by default, and then nothing is recorded or copied. Set `drafter.trace = Trace()` before `generate`; afterwards it
holds that call. It copies every tree to the host, so a traced call is no call to measure.
Drawing it is the business of `hf_specdec.visualize`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_specdec.decoding.observers import Observer, Round


@dataclass(frozen=True)
class NodeNotes:
    """What a drafter knows of the nodes of a tree beyond the tree itself.

    Attributes:
        probs: [batch, nodes] floating, the drafter's probability of each node's token after its parent's path; None
            where it has none. Anything at the root and at invalid nodes.
        forwards: [batch, nodes] int64, which of the round's drafter forwards made each node, counted from 1; None
            where nodes come from no forward.
        sources: [batch][nodes], names of those that proposed each node, joined by "+"; None where there is one alone.
    """

    probs: Tensor | None = None
    forwards: Tensor | None = None
    sources: list[list[str]] | None = None


@dataclass(frozen=True)
class TracedRound:
    """One round of one row. Node 0 is the root; only valid nodes are listed, parents before their children.

    Attributes:
        row: of the batch.
        position: where the root stands in the row, prompt included, its padding too.
        token_ids: of the nodes.
        parents: index of each node's parent, -1 at the root.
        path: the accepted nodes in order, root left out.
        bonus_id: the target's own choice after the last accepted node.
        num_kept: how many of the accepted tokens and the bonus token are in the output; fewer than all where a
            stopping criterion cut the round short.
        probs: see `NodeNotes`; the root's is 1.
        forwards: see `NodeNotes`; the root's is 0.
        sources: see `NodeNotes`; the root's is empty.
    """

    row: int
    position: int
    token_ids: list[int]
    parents: list[int]
    path: list[int]
    bonus_id: int
    num_kept: int
    probs: list[float] | None = None
    forwards: list[int] | None = None
    sources: list[str] | None = None

    @property
    def depths(self) -> list[int]:
        """Of the nodes; 0 at the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def origins(self) -> list[int] | None:
        """Where nodes come from, as numbers from 1, and 0 at the root; None where it is not known.

        That is who proposed them, where several drafters do, and else in which forward they were made.
        """
        if self.sources is None:
            return self.forwards
        names = sorted(set(self.sources[1:]))
        return [0, *(1 + names.index(name) for name in self.sources[1:])]

    @property
    def tokens(self) -> list[tuple[int, bool]]:
        """What the round added to the output: tokens, and whether each was drafted (else it is the bonus token)."""
        tokens = [(self.token_ids[node], True) for node in self.path] + [(self.bonus_id, False)]
        return tokens[: self.num_kept]


@dataclass
class Trace(Observer):
    """Rounds of the latest call that it was used in.

    Attributes:
        prompt_ids: per row the prompt as it was given, padding included.
        first_ids: per row the token chosen after the prefill, which nothing drafted.
        rounds: of all rows, in the order they happened.
    """

    prompt_ids: list[list[int]] = field(default_factory=list)
    first_ids: list[int] = field(default_factory=list)
    rounds: list[TracedRound] = field(default_factory=list)

    waits = True  # drafters know what they drafted last

    def on_prefill(self, prefill: Round) -> None:
        """Forgets the call before."""
        sequences = prefill.sequences
        self.prompt_ids = sequences.ids[:, : sequences.prompt_length].tolist()
        self.first_ids = [tokens[-1] for tokens in prefill.host.tokens]
        self.rounds = []

    def on_round(self, each: Round) -> None:
        tree, notes = each.tree, NodeNotes()
        if tree.num_nodes > 1:
            notes = each.describe(tree) or notes
        for place, row in enumerate(each.sequences.rows):
            tokens, num_kept = each.host.tokens[place], each.kept[row]
            if not tokens or not num_kept:  # it took no part, or had ended
                continue
            valid = tree.valid[place].nonzero().squeeze(1).tolist()
            index = {node: at for at, node in enumerate(valid)}
            parents = tree.parents[place].tolist()
            path = each.verdict.path[place, 1 : len(tokens)].tolist()
            probs = forwards = None
            if notes.probs is not None:
                probs = [1.0, *notes.probs[place, valid[1:]].tolist()]
            if notes.forwards is not None:
                forwards = [0, *notes.forwards[place, valid[1:]].tolist()]
            self.rounds.append(
                TracedRound(
                    row=row,
                    position=each.sequences.lengths[row] - num_kept - 1,
                    token_ids=tree.token_ids[place, valid].tolist(),
                    parents=[-1, *(index[parents[node]] for node in valid[1:])],
                    path=[index[node] for node in path],
                    bonus_id=tokens[-1],
                    num_kept=num_kept,
                    probs=probs,
                    forwards=forwards,
                    sources=None if notes.sources is None else [notes.sources[place][node] for node in valid],
                )
            )

    def output(self, row: int = 0) -> list[tuple[int, bool]]:
        """What a row wrote: tokens, and whether each was drafted and accepted (else it is the target's own)."""
        tokens = [(self.first_ids[row], False)]
        for traced in self.rounds:
            if traced.row == row:
                tokens += traced.tokens
        return tokens
