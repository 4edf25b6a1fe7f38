"""The parts of SpecBranch's drafting: how a call drafts, what crosses between its two sides, a row and its tree.

No model and no cache: those are in `drafting.py`. Source: SpecBranch, Section 5.2, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_specdec.decoding.candidates import ChoiceRule

# What H-RAD says of the tokens that would be verified next (SpecBranch, Eq. 6).
ALL_REJECT, CONFIDENCE, ALL_ACCEPT = 0, 1, 2


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
    """

    most_tokens: int
    most_branches: int
    most_hedges: int
    min_confidence: float
    draw_candidates: bool
    choice: ChoiceRule


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
        busy_s: seconds it took, waiting left aside.
        candidates: per row the candidates of the branch point.
        laws: [batch, most candidates, vocab] float32, the law each was drawn from, given its elder siblings; None where
            none were drawn.
    """

    busy_s: float
    candidates: list[list[int]]
    laws: Tensor | None


@dataclass
class Counters:
    """What drafting has come to so far.

    Attributes:
        path_drafts: forwards that drafted a token, summed over rows; branches run in one forward count once.
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
    """A token of the tree; `place` is where the cache holds it, `next` the node it goes on with; -1 for neither."""

    token: int
    parent: int
    place: int = -1
    law: Law | None = None
    next: int = -1


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

    def hit(self, tokens: list[int]) -> int | None:
        """The branch that the target chose, by the tokens that the round emitted; None where it chose none."""
        above = [self.root, *self.chain][len(tokens) - 1]
        branches = self.branches if above == self.leaf else self.hedges
        return next(
            (node for node in branches if self.nodes[node].parent == above and self.nodes[node].token == tokens[-1]),
            None,
        )

    def clear(self) -> None:
        """Forgets the tree."""
        self.nodes, self.root, self.chain, self.branches, self.hedges = [], 0, [], [], []


def num_branches(most_branches: int, confidence: float) -> int:
    """K = max(1, floor(k_max (1 - q))): how many candidates a branch point gets. SpecBranch, Eq. 7.

    Example:
        >>> [num_branches(6, confidence) for confidence in (0.99, 0.5, 0.1)]
        [1, 3, 5]
    """
    return max(1, int(most_branches * (1 - confidence)))
