"""Data types of SpecBranch's drafting: the plan of a call, the messages of target and draft model, a row's draft tree.

The model and its cache are in `drafting.py`. Source: SpecBranch, Section 5.2, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hf_specdec.decoding.generator import ChoiceRule

# Classes of H-RAD for the tokens that would be verified next (SpecBranch, Eq. 6).
ALL_REJECT, CONFIDENCE, ALL_ACCEPT = 0, 1, 2


# The target's result for a chain: how many of its tokens it accepts, and its own token after those.
Continuation = tuple[int, int]


@dataclass(frozen=True)
class DraftingPlan:
    """The settings of a call.

    Attributes:
        most_tokens: gamma, most tokens of a chain, most tokens of a branch after its candidate, and most forwards of
            the draft model during one verification.
        most_branches: k_max.
        most_hedges: most branches from nodes within the chain that is being verified; 0 for none.
        min_confidence: epsilon; a node is a branch point if the draft model's likeliest next token has less.
        draw_candidates: whether the candidates of a branch point are sampled without replacement in calls that sample;
            if not, they are the likeliest tokens.
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
    """The decisions of H-RAD, or of its replacement, for one row.

    Attributes:
        kept_branch: how much of the branch that the target has chosen is verified next.
        fresh: how much is drafted before the next verification if the target has chosen no branch.
        branches: how far branches are drafted during verification: the a-priori approach of Appendix G.2; `ALL_ACCEPT`
            for the posterior one, which decides afterwards.
    """

    kept_branch: int
    fresh: int
    branches: int = ALL_ACCEPT


@dataclass(frozen=True)
class Chains:
    """The tokens to verify next.

    Attributes:
        tokens: per row the chain after the root.
        draft_probs: [batch, longest chain, vocab] float32, the distributions of sampled tokens; None if greedy.
        finite: per row, whether the draft model's logits were finite.
    """

    tokens: list[list[int]]
    draft_probs: Tensor | None
    finite: list[bool]


@dataclass(frozen=True)
class Branches:
    """The branches drafted during a verification.

    Attributes:
        busy_s: seconds it took, without waiting.
        prepared: per row the target's results for which a branch exists: `Row.prepared`.
        candidates: per row the candidates of the branch point.
        draft_probs: [batch, most candidates, vocab] float32, the distribution that each was sampled from, conditioned
            on the previous siblings; None if none were sampled.
    """

    busy_s: float
    prepared: list[set[Continuation]]
    candidates: list[list[int]]
    draft_probs: Tensor | None


@dataclass
class Counters:
    """Totals of a call.

    Attributes:
        path_drafts: tokens drafted in sequence, each by its own forward, summed over rows: `Row.count_drafts`.
        path_kept: those of them that became part of the text.
        peak_entries: most cache entries of a row at any time.
    """

    path_drafts: int = 0
    path_kept: int = 0
    peak_entries: int = 0


@dataclass
class Prediction:
    """The draft model's output after a node.

    Attributes:
        token_ids: the likeliest tokens, likeliest first.
        probs: their probabilities, at temperature 1 (Appendix E.3).
        chosen: the token drafted next: the likeliest, or the sampled one.
        draft_probs: [vocab] float32, the distribution that `chosen` was sampled from; None if it was not sampled.
    """

    token_ids: list[int]
    probs: list[float]
    chosen: int
    draft_probs: Tensor | None

    @property
    def confidence(self) -> float:
        """Probability of the likeliest token."""
        return self.probs[0]


@dataclass
class Node:
    """A node of the tree.

    Attributes:
        token: its id.
        parent: index of its parent; -1 for none.
        cache_index: index of its cache entry; -1 if it was not run.
        prediction: the draft model's output after it; None if it was not run.
        next: the node that continues its branch; -1 for none.
        counted: whether its forward was counted as a draft.
    """

    token: int
    parent: int
    cache_index: int = -1
    prediction: Prediction | None = None
    next: int = -1
    counted: bool = False


@dataclass
class Row:
    """One row: its text, root included, and the draft tree. Nodes 0 to `root` are text that is not yet in the cache."""

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
        """The last node that is verified in this round."""
        return self.chain[-1] if self.chain else self.root

    def add(self, token: int, parent: int) -> int:
        """Adds a node; returns its index."""
        self.nodes.append(Node(token, parent))
        return len(self.nodes) - 1

    def extend(self, node: int) -> int | None:
        """Adds the drafted token after a node that was run; None if its logits were not finite."""
        prediction = self.nodes[node].prediction
        if prediction is None:
            return None
        self.nodes[node].next = self.add(prediction.chosen, node)
        return self.nodes[node].next

    def prepared(self) -> dict[Continuation, int]:
        """The branches, by the result of the target that chooses each."""
        path = [self.root, *self.chain]
        branches = (*self.branches, *self.hedges)
        results = [(path.index(self.nodes[branch].parent), self.nodes[branch].token) for branch in branches]
        return dict(zip(results, branches, strict=True))

    def chosen_branch(self, tokens: list[int]) -> int | None:
        """The branch that the target chose, from the tokens that the round emitted; None if it chose none."""
        return self.prepared().get(continuation(tokens))

    def branch_nodes(self, branch: int | None) -> list[int]:
        """The nodes of a branch, from its candidate to its last node; [] for None."""
        nodes = []
        while branch is not None and branch >= 0:
            nodes.append(branch)
            branch = self.nodes[branch].next
        return nodes

    def count_drafts(self, branch: int | None) -> int:
        """The number of drafted tokens, not counted before, on the path that is continued.

        This is the branch that the target chose, or else the likeliest one. Forwards for other branches are the cost of
        branching, and do not count as rolled back (Appendix E.3).
        """
        if branch is None and self.branches:
            branch = self.branches[0]
        nodes = self.branch_nodes(branch)
        path = [self.root, *self.chain]
        if nodes:
            path = [*path[: path.index(self.nodes[nodes[0]].parent) + 1], *nodes]
        run = [node for node in (self.nodes[index] for index in path) if node.cache_index >= 0 and not node.counted]
        for node in run:
            node.counted = True
        return len(run)

    def clear(self) -> None:
        """Removes the tree."""
        self.nodes, self.root, self.chain, self.branches, self.hedges = [], 0, [], [], []


def continuation(emitted: list[int]) -> Continuation:
    """The target's result for a chain, from the tokens that the round emitted.

    Example:
        >>> continuation([11, 12, 40])
        (2, 40)
    """
    return len(emitted) - 1, emitted[-1]


def num_branches(most_branches: int, confidence: float) -> int:
    """K = max(1, floor(k_max (1 - q))): the number of candidates of a branch point. SpecBranch, Eq. 7.

    Example:
        >>> [num_branches(6, confidence) for confidence in (0.99, 0.5, 0.1)]
        [1, 3, 5]
    """
    return max(1, int(most_branches * (1 - confidence)))
