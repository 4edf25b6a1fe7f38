"""What loop and drafter tell each other: where a round starts, what it committed, and notes on drafted nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec.decoding.accept import Verdict
from hf_specdec.decoding.state import Counts, RoundState, with_rows
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.tree import DraftTree, from_host, pick
from hf_specdec.decoding.user_code import PREFIX_FREE


@dataclass(frozen=True)
class ChoiceRule:
    """How the target's tokens are chosen in this call. Drafts that are chosen in the same way are accepted more often.

    Attributes:
        do_sample: True: tokens are sampled. False: argmax.
        warpers: the processors of the call that depend on the logits only (temperature, top-k, ...), in their order.
            They have no state, so a drafter may apply them too. Drafts are verified under all processors.
    """

    do_sample: bool
    warpers: LogitsProcessorList

    @classmethod
    def of(cls, do_sample: bool, processors: LogitsProcessorList) -> ChoiceRule:
        """The rule of a call with these processors."""
        return cls(do_sample, LogitsProcessorList(each for each in processors if type(each) in PREFIX_FREE))


GREEDY = ChoiceRule(do_sample=False, warpers=LogitsProcessorList())


def _untimed(stage: str) -> None:
    """No-op for `DraftContext.lap`."""


@dataclass
class DraftContext:
    """Where a round starts.

    Attributes:
        root_ids: [batch] int64, the last committed token of each row; the target has not seen it yet.
        root_positions: [batch] int64, its position id in the target.
        sequences: [batch, capacity] int64, all tokens so far, prompt and root included; columns beyond a row's length
            are undefined.
        lengths: tokens in each row of `sequences`, root included.
        active: per row, whether its tokens can still become part of the output. Drafts of other rows are ignored.
        choice: how the call chooses tokens, the same in every round.
        node_limit: at most this many nodes of the tree will be verified; None for no limit. A smaller tree saves time,
            but a larger one is allowed.
        least_prob: descendants of a node that is drafted with a lower probability, given the path to its parent, will
            not be verified; None for no limit. Stopping there saves time, but a larger tree is allowed.
        read_texts: gives `texts`; None to read them from `sequences`.
        lap: call `lap("draft")` after the drafter's last forward and `lap("tree")` after building the tree, so that the
            statistics separate the two. Without these calls all of `draft()` counts as drafting. Needs no device sync.
    """

    root_ids: Tensor
    root_positions: Tensor
    sequences: Tensor
    lengths: list[int]
    active: list[bool]
    choice: ChoiceRule = GREEDY
    node_limit: int | None = None
    least_prob: float | None = None
    read_texts: Callable[[], list[list[int]]] | None = None
    lap: Callable[[str], None] = _untimed

    def at_most(self, nodes: int) -> int:
        """`nodes`, or `node_limit` if that is less."""
        return nodes if self.node_limit is None else min(nodes, self.node_limit)

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of each row on the host, to be read only; not for generators with `drafts_early`."""
        if self.read_texts is not None:
            return self.read_texts()
        return [row[:length] for row, length in zip(self.sequences.tolist(), self.lengths, strict=True)]


@dataclass
class Committed:
    """What a round, or the prefill, committed to the target's cache: for a round the root and the accepted nodes.

    Attributes:
        token_ids: [batch, steps] int64. Zeros where the prompt was given as embeddings.
        features: [batch, steps, taps * hidden], the target's hidden states at these tokens, or None without taps.
        position_ids: [batch, steps] int64.
        valid: [batch, steps] bool, or None for all True. False for padding: left padding of the prompt, the end of
            shorter rows of a round.
        counts: valid entries of each row. Known on the host, except for generators with `drafts_early`.
        target_logits: [batch, nodes, vocab], the target's raw logits of the whole tree.
        tree: the tree that was verified; None for the prefill.
        path: [batch, steps] int64, the node of each token in `tree`; None for the prefill. Of a drafter whose tree was
            merged with others it is in host memory, and -1 for a token that this drafter has not drafted.
        tokens: per row the accepted tokens, root excluded, then the bonus token; empty for the prefill, and where the
            host has not read them yet. The bonus token is the row's next root. It may have been drafted: a round may
            end before its accepted path does.
    """

    token_ids: Tensor
    features: Tensor | None
    position_ids: Tensor
    valid: Tensor | None
    counts: Counts
    target_logits: Tensor
    tree: DraftTree | None = None
    path: Tensor | None = None
    tokens: list[list[int]] = field(default_factory=list)

    @classmethod
    def of_prompt(cls, prompt_ids: Tensor, target: TargetModel, output: TargetOutput) -> Committed:
        """The commit of the prefill, for [batch, seq] int64 prompts."""
        positions, valid = target.prompt_positions()
        new = positions.shape[1]  # fewer than the prompt if a cache was continued
        token_ids = prompt_ids[:, -new:]
        # More positions than ids: the prompt was given as embeddings, and its tokens are unknown.
        token_ids = torch.nn.functional.pad(token_ids, (new - token_ids.shape[1], 0))
        counts = [new] * len(prompt_ids) if valid is None else valid.sum(1).tolist()
        return cls(token_ids, output.features, positions, valid, Counts.of(counts, prompt_ids.device), output.logits)

    @classmethod
    def of_round(cls, tree: DraftTree, output: TargetOutput, verdict: Verdict, state: RoundState) -> Committed:
        """The commit of a round that began with `state`."""
        path, counts, features = verdict.path, verdict.counts, output.features
        steps = torch.arange(path.shape[1], device=path.device)
        valid = None
        if counts.known is None or min(counts.known) < path.shape[1]:
            valid = steps < counts.tensor.unsqueeze(1)
        return cls(
            token_ids=verdict.path_ids,
            features=None if features is None else _picked(features, path, valid),
            position_ids=state.root_positions.unsqueeze(1) + steps,
            valid=valid,
            counts=counts,
            target_logits=output.logits,
            tree=tree,
            path=path,
            tokens=[] if verdict.host is None else verdict.host.tokens,
        )

    @property
    def num_committed(self) -> list[int]:
        """Valid entries of each row, on the host."""
        assert self.counts.known is not None, "the host has not read the verdict of this round yet"
        return self.counts.known

    @property
    def num_accepted(self) -> list[int]:
        """Drafted tokens kept per row; zeros for the prefill."""
        return [0 if self.tree is None else max(0, count - 1) for count in self.num_committed]

    def of_rows(self, rows: Sequence[int]) -> Committed:
        """Selects rows."""
        index = from_host(rows, self.token_ids.device)

        def some(part: Tensor | None, steps: slice = slice(None)) -> Any:
            return None if part is None else part[index.to(part.device)][:, steps]

        counts = self.counts.of_rows(rows)
        width = max(1, counts.most)  # at least one step, of padding if no row committed anything
        steps = slice(0, width) if self.tree is not None else slice(None)
        return replace(
            self,
            token_ids=some(self.token_ids, steps),
            features=some(self.features, steps),
            position_ids=some(self.position_ids, steps),
            valid=some(self.valid, steps),
            counts=counts,
            target_logits=some(self.target_logits),
            tree=None if self.tree is None else self.tree.of_rows(rows),
            path=some(self.path, steps),
            tokens=[self.tokens[row] for row in rows] if self.tokens else [],
        )

    def columns(self, start: int, stop: int) -> Committed:
        """The entries from a column to another, of a commit whose padding is on the right."""
        part = slice(start, stop)
        width = self.token_ids[:, part].shape[1]
        counts = Counts.of(
            [min(max(0, count - start), width) for count in self.num_committed], self.counts.tensor.device
        )
        return replace(
            self,
            token_ids=self.token_ids[:, part],
            features=None if self.features is None else self.features[:, part],
            position_ids=self.position_ids[:, part],
            valid=None if self.valid is None else self.valid[:, part],
            counts=counts,
        )

    def followed_by(self, later: Committed) -> Committed:
        """Joins this commit and that of the next round, for drafters that did not draft in between."""
        token_ids = torch.cat([self.token_ids, later.token_ids], 1)
        position_ids = torch.cat([self.position_ids, later.position_ids], 1)
        features = None
        if self.features is not None and later.features is not None:
            features = torch.cat([self.features, later.features], 1)
        present = torch.cat(
            [
                torch.ones_like(part.token_ids, dtype=torch.bool) if part.valid is None else part.valid
                for part in (self, later)
            ],
            1,
        )
        joined = replace(
            later,
            token_ids=token_ids,
            features=features,
            position_ids=position_ids,
            valid=present,
            counts=self.counts.plus(later.counts),
            path=None,
        )
        return joined.aligned()

    @classmethod
    def of_nothing(cls, prompt: Committed, state: RoundState) -> Committed:
        """The commit of a round that kept nothing, after the prefill of one row, `prompt`."""
        root, features = DraftTree.root_only(state.root_ids), prompt.features
        nothing = torch.zeros_like(root.valid)
        return cls(
            token_ids=root.token_ids,
            features=None if features is None else torch.zeros_like(features[:, :1]),
            position_ids=state.root_positions.unsqueeze(1),
            valid=nothing,
            counts=Counts.of([0], nothing.device),
            target_logits=prompt.target_logits,
            tree=replace(root, valid=nothing),  # so that nothing is learnt from it
            path=torch.zeros_like(root.token_ids),
            tokens=[[]],
        )

    def joined(self, others: Sequence[Committed], places: Sequence[int]) -> Committed:
        """With the rows of others at `places`, padded on the right; without what describes a drafted tree."""
        parts = [
            (part if part.valid is not None else replace(part, valid=torch.ones_like(part.token_ids, dtype=torch.bool)))
            for part in (self, *others)
        ]
        parts = [part.aligned() for part in parts]
        width, order = max(part.token_ids.shape[1] for part in parts), with_rows(len(self.token_ids), places)

        def rows(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            missing = [(*[0, 0] * (each.dim() - 2), 0, width - each.shape[1]) for each in values]
            padded = [torch.nn.functional.pad(each, pad) for each, pad in zip(values, missing, strict=True)]
            return torch.cat(padded)[from_host(order, values[0].device)]

        known = [count for part in parts for count in part.num_committed]
        return replace(
            self,
            token_ids=rows("token_ids"),
            features=None if self.features is None else rows("features"),
            position_ids=rows("position_ids"),
            valid=rows("valid"),
            counts=Counts.of([known[row] for row in order], self.counts.tensor.device),
            tree=None,
            path=None,
            tokens=[],
        )

    def aligned(self) -> Committed:
        """With the valid entries of each row in front, in order, and features of 0 behind them."""
        assert self.valid is not None
        order = (~self.valid).to(torch.int8).argsort(dim=1, stable=True)[:, : max(1, self.counts.most)]
        valid = torch.arange(order.shape[1], device=order.device) < self.counts.tensor.unsqueeze(1)
        return replace(
            self,
            token_ids=self.token_ids.gather(1, order),
            features=None if self.features is None else _picked(self.features, order, valid),
            position_ids=self.position_ids.gather(1, order),
            valid=valid,
        )


def _picked(features: Tensor, order: Tensor, valid: Tensor | None) -> Tensor:
    """Selects steps of features; padding, which may be NaN, gets 0: a drafter's additive masks do not stop NaN."""
    features = pick(features, order.to(features.device))
    return features if valid is None else features.masked_fill(~valid.unsqueeze(-1).to(features.device), 0)


@dataclass(frozen=True)
class NodeNotes:
    """The drafter's information on the nodes of a tree.

    Attributes:
        probs: [batch, nodes] floating, the drafter's probability of each node's token given the path to its parent;
            None if unknown. Undefined at the root and at invalid nodes.
        forwards: [batch, nodes] int64, which of the round's drafter forwards made each node, counted from 1; None for
            drafters without forwards.
        sources: [batch][nodes], names of the drafters that proposed each node, joined by "+"; None for one drafter.
    """

    probs: Tensor | None = None
    forwards: Tensor | None = None
    sources: list[list[str]] | None = None


def path_notes(tree: DraftTree, forwards: Tensor | None = None) -> NodeNotes | None:
    """The draft probabilities of a tree's nodes from its path scores; None if it has none, as without drafts.

    Args:
        tree: the latest one, or a part of it.
        forwards: [batch, nodes] int64, see `NodeNotes`; None for one forward per level.
    """
    if tree.path_logprobs is None:
        return None
    above = tree.path_logprobs.gather(1, tree.parents.to(tree.path_logprobs.device).clamp(min=0))
    return NodeNotes((tree.path_logprobs - above).exp(), tree.depths if forwards is None else forwards)
