"""The parts of SpecBranch's drafting: how a call drafts, what crosses between its two sides, a row and its tree.

No model and no cache: those are in `drafting.py`. Source: SpecBranch, Section 5.2, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_specdec.decoding.generator import ChoiceRule

# What H-RAD says of the tokens that would be verified next (SpecBranch, Eq. 6).
ALL_REJECT, CONFIDENCE, ALL_ACCEPT = 0, 1, 2


# What the target says of a chain: how many of its tokens it accepts, and its own token after those.
Continuation = tuple[int, int]


@dataclass(frozen=True)
class DraftingPlan:
    """How a call drafts.

    Attributes:
        most_tokens: gamma, most tokens of a chain, most tokens of a branch behind its candidate, and most forwards of
            the draft model beside one verification.
        most_branches: k_max.
        most_hedges: most branches at places of the chain that is being verified; 0 for none.
        min_confidence: epsilon; a place where the draft model's likeliest token has less is a branch point.
        draw_candidates: draws the candidates of a branch point without replacement in calls that sample; else they are
            the likeliest ones.
        choice: how the call chooses tokens.
        vocab_size: columns of the target's logits.
    """

    most_tokens: int
    most_branches: int
    most_hedges: int
    min_confidence: float
    draw_candidates: bool
    choice: ChoiceRule
    vocab_size: int


@dataclass(frozen=True)
class Signals:
    """What H-RAD, or what stands in for it, says of one row.

    Attributes:
        kept_branch: how much of a branch is verified next, where the target has chosen one.
        fresh: how much is drafted before the target starts again, where it has not.
        branches: how far branches are drafted beside the target: the a-priori approach of Appendix G.2; `ALL_ACCEPT`
            where the posterior one chooses afterwards.
    """

    kept_branch: int
    fresh: int
    branches: int = ALL_ACCEPT


@dataclass(frozen=True)
class Chains:
    """What to verify next.

    Attributes:
        tokens: per row the chain below the root.
        laws: [batch, longest chain, vocab] float32, what drawn tokens were drawn from; None where none were drawn.
        finite: per row, whether the draft model's output was finite.
    """

    tokens: list[list[int]]
    laws: Tensor | None
    finite: list[bool]


@dataclass(frozen=True)
class Branches:
    """What was drafted beside the target.

    Attributes:
        busy_s: seconds it took, without waiting.
        prepared: per row what the target may say so that a branch goes on from there: `Row.prepared`.
        candidates: per row the candidates of the branch point.
        laws: [batch, most candidates, vocab] float32, the law each was drawn from, given its elder siblings; None where
            none were drawn.
    """

    busy_s: float
    prepared: list[set[Continuation]]
    candidates: list[list[int]]
    laws: Tensor | None


@dataclass
class Counters:
    """What drafting has come to so far.

    Attributes:
        path_drafts: tokens drafted in sequence, each by a forward of its own, summed over rows: `Row.count_drafts`.
        path_kept: such tokens that became text.
        peak_entries: most cache entries a row held at once.
    """

    path_drafts: int = 0
    path_kept: int = 0
    peak_entries: int = 0


@dataclass
class Law:
    """What the draft model says after a node.

    Attributes:
        token_ids: the likeliest tokens, likeliest first.
        probs: theirs, at temperature 1 (Appendix E.3).
        chosen: the token drafted next: the likeliest, or the one drawn.
        drawn_from: [vocab] float32, the law of the draw; None where there was none.
    """

    token_ids: list[int]
    probs: list[float]
    chosen: int
    drawn_from: Tensor | None

    @property
    def confidence(self) -> float:
        """Probability of the likeliest token."""
        return self.probs[0]


@dataclass
class Node:
    """A token of the tree.

    Attributes:
        token: its id.
        parent: the node before it; -1 for none.
        place: where the cache holds it; -1 where it was not run.
        law: what the draft model says after it, once it was run.
        next: the node it goes on with; -1 for none.
        counted: whether running it was counted as a draft.
    """

    token: int
    parent: int
    place: int = -1
    law: Law | None = None
    next: int = -1
    counted: bool = False


@dataclass
class Row:
    """One row: its text, root included, and the tree behind it. Nodes 0 to `root` are text not yet in the cache."""

    text: list[int]
    active: bool = True
    nodes: list[Node] = field(default_factory=list)
    root: int = 0
    chain: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    hedges: list[int] = field(default_factory=list)
    finite: bool = True

    @property
    def leaf(self) -> int:
        """The last node that is verified this round."""
        return self.chain[-1] if self.chain else self.root

    def add(self, token: int, parent: int) -> int:
        """A new node; returns its index."""
        self.nodes.append(Node(token, parent))
        return len(self.nodes) - 1

    def go_on(self, node: int) -> int | None:
        """The continuation of a node that was run: the drafted token; None where the draft model has none."""
        law = self.nodes[node].law
        if law is None:
            return None
        self.nodes[node].next = self.add(law.chosen, node)
        return self.nodes[node].next

    def prepared(self) -> dict[Continuation, int]:
        """The branches, by what the target has to say to choose them."""
        path = [self.root, *self.chain]
        branches = [self.nodes[branch] for branch in (*self.branches, *self.hedges)]
        places = [(path.index(node.parent), node.token) for node in branches]
        return dict(zip(places, (*self.branches, *self.hedges), strict=True))

    def hit(self, tokens: list[int]) -> int | None:
        """The branch that the target chose, by the tokens that the round emitted; None where it chose none."""
        return self.prepared().get(continuation(tokens))

    def line(self, branch: int | None) -> list[int]:
        """A branch, from its candidate to where it ends."""
        nodes = []
        while branch is not None and branch >= 0:
            nodes.append(branch)
            branch = self.nodes[branch].next
        return nodes

    def count_drafts(self, branch: int | None) -> int:
        """How many tokens were drafted, and not counted before, on the path that goes on.

        That is the branch that the target chose, or would have been the likeliest one. What was run for other branches
        meanwhile is the price of branching and no rollback (Appendix E.3).
        """
        if branch is None and self.branches:
            branch = self.branches[0]
        line = self.line(branch)
        path = [self.root, *self.chain]
        if line:
            path = [*path[: path.index(self.nodes[line[0]].parent) + 1], *line]
        run = [node for node in (self.nodes[index] for index in path) if node.place >= 0 and not node.counted]
        for node in run:
            node.counted = True
        return len(run)

    def clear(self) -> None:
        """Forgets the tree."""
        self.nodes, self.root, self.chain, self.branches, self.hedges = [], 0, [], [], []


def continuation(emitted: list[int]) -> Continuation:
    """What the target said of a chain, from the tokens that the round emitted.

    Example:
        >>> continuation([11, 12, 40])
        (2, 40)
    """
    return len(emitted) - 1, emitted[-1]


def num_branches(most_branches: int, confidence: float) -> int:
    """K = max(1, floor(k_max (1 - q))): how many candidates a branch point gets. SpecBranch, Eq. 7.

    Example:
        >>> [num_branches(6, confidence) for confidence in (0.99, 0.5, 0.1)]
        [1, 3, 5]
    """
    return max(1, int(most_branches * (1 - confidence)))
