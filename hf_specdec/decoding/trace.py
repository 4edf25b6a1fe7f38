"""Trace: a record of every round of a `generate` call, for inspection.

Off by default. Set `drafter.trace = Trace()` before `generate`; afterwards it contains that call. It copies every tree
to the host, so do not measure the time of a traced call. `hf_specdec.visualize` draws it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_specdec.decoding.exchange import NodeNotes
from hf_specdec.decoding.observers import Observer, Round


@dataclass(frozen=True)
class TracedRound:
    """One round of one row. Node 0 is the root; only valid nodes are listed, parents before their children.

    Attributes:
        row: of the batch.
        position: index of the root in the row; prompt and padding count.
        token_ids: of the nodes.
        parents: index of each node's parent, -1 at the root.
        path: the accepted nodes in order, root excluded.
        bonus_id: the target's own choice after the last accepted node.
        num_kept: how many of the accepted tokens and the bonus token are in the output; fewer than all if a stopping
            criterion ended the text within the round.
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
        """Depth of each node; 0 at the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def origins(self) -> list[int] | None:
        """A number from 1 for the origin of each node, 0 at the root; None if unknown.

        With several drafters the origin is the drafter, otherwise the forward that made the node.
        """
        if self.sources is None:
            return self.forwards
        names = sorted(set(self.sources[1:]))
        return [0, *(1 + names.index(name) for name in self.sources[1:])]

    @property
    def tokens(self) -> list[tuple[int, bool]]:
        """The tokens that the round added to the output, and whether each was drafted (or is the bonus token)."""
        tokens = [(self.token_ids[node], True) for node in self.path] + [(self.bonus_id, False)]
        return tokens[: self.num_kept]


@dataclass
class Trace(Observer):
    """The rounds of the last call that it was used in.

    Attributes:
        prompt_ids: the prompt of each row, padding included.
        first_ids: the token of each row chosen after the prefill, which was not drafted.
        rounds: of all rows, in order.
    """

    prompt_ids: list[list[int]] = field(default_factory=list)
    first_ids: list[int] = field(default_factory=list)
    rounds: list[TracedRound] = field(default_factory=list)

    waits = True  # drafters describe only the tree that they drafted last

    def on_prefill(self, prefill: Round) -> None:
        """Discards the previous call."""
        sequences = prefill.sequences
        self.prompt_ids = sequences.ids[:, : sequences.prompt_length].tolist()
        self.first_ids = [tokens[-1] for tokens in prefill.host.tokens]
        self.rounds = []

    def on_round(self, step: Round) -> None:
        tree, notes = step.tree, NodeNotes()
        if tree.num_nodes > 1:
            notes = step.describe(tree) or notes
        for batch_index, row in enumerate(step.sequences.rows):
            tokens, num_kept = step.host.tokens[batch_index], step.kept[row]
            if not tokens or not num_kept:  # inactive, or its text has ended
                continue
            valid = tree.valid[batch_index].nonzero().squeeze(1).tolist()
            index = {node: at for at, node in enumerate(valid)}
            parents = tree.parents[batch_index].tolist()
            path = step.verdict.path[batch_index, 1 : len(tokens)].tolist()
            probs = forwards = None
            if notes.probs is not None:
                probs = [1.0, *notes.probs[batch_index, valid[1:]].tolist()]
            if notes.forwards is not None:
                forwards = [0, *notes.forwards[batch_index, valid[1:]].tolist()]
            self.rounds.append(
                TracedRound(
                    row=row,
                    position=step.sequences.lengths[row] - num_kept - 1,
                    token_ids=tree.token_ids[batch_index, valid].tolist(),
                    parents=[-1, *(index[parents[node]] for node in valid[1:])],
                    path=[index[node] for node in path],
                    bonus_id=tokens[-1],
                    num_kept=num_kept,
                    probs=probs,
                    forwards=forwards,
                    sources=None if notes.sources is None else [notes.sources[batch_index][node] for node in valid],
                )
            )

    def output(self, row: int = 0) -> list[tuple[int, bool]]:
        """The generated tokens of a row, and whether each was drafted and accepted (or is the target's own)."""
        tokens = [(self.first_ids[row], False)]
        for traced in self.rounds:
            if traced.row == row:
                tokens += traced.tokens
        return tokens

    def _repr_html_(self) -> str:
        """A table for notebooks: a line per round, in token ids. `hf_specdec.visualize` draws them."""
        names = ("round", "row", "position", "drafted nodes", "accepted", "bonus token")
        lines = ["".join(f"<th>{name}</th>" for name in names)]
        for number, traced in enumerate(self.rounds):
            accepted = " ".join(str(traced.token_ids[node]) for node in traced.path)
            values = (number, traced.row, traced.position, len(traced.token_ids) - 1, accepted, traced.bonus_id)
            lines.append("".join(f"<td>{value}</td>" for value in values))
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
