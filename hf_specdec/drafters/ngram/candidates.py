"""N-gram lookup in one `generate` call: an index of every row's text, and trees of what followed its last tokens.

All in host memory, on plain lists: a look-up per suffix length and a walk over a few dozen matches per round. The
tokens come from the device once per round, only those that are new.
Relatives: prompt lookup decoding (one continuation of the first match), and the suffix trees of REST and SAM decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.tree import DraftTree

MAX_MATCHES = 32  # of all suffix lengths together: what a round may cost, on texts that repeat one token throughout
# A match of one more token says so much more about the continuation that it outweighs three shorter ones.
WEIGHT_PER_TOKEN = 4.0
# The further from the match, the less it says; also makes every node lighter than its parent.
WEIGHT_PER_DEPTH = 0.8


class SuffixIndex:
    """The text of one row, and where each of its n-grams was followed by something.

    Args:
        longest: most tokens of an n-gram.
        shortest: fewest tokens of an n-gram.

    Example:
        >>> index = SuffixIndex(longest=2, shortest=1)
        >>> index.extend([5, 6, 7, 5, 6])
        >>> list(index.matches())
        [(2, 2)]
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.tokens: list[int] = []
        # Length of an n-gram -> the n-gram -> where its continuations start, in order of the text.
        self._starts: dict[int, dict[tuple[int, ...], list[int]]] = {
            length: {} for length in range(longest, shortest - 1, -1)
        }

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens at the end."""
        known = len(self.tokens)
        self.tokens += tokens
        for length, starts in self._starts.items():
            for start in range(max(known + 1, length), len(self.tokens) + 1):
                starts.setdefault(tuple(self.tokens[start - length : start]), []).append(start)

    def matches(self) -> Iterator[tuple[int, int]]:
        """(start of a continuation, matched tokens) for earlier places that end as the text does, each place once.

        The longest matches come first, and of equally long ones the latest.
        """
        seen = {len(self.tokens)}  # the end itself, which nothing follows
        for length, starts in self._starts.items():
            suffix = tuple(self.tokens[-length:])
            for start in reversed(starts.get(suffix, ())):
                if len(seen) > MAX_MATCHES:
                    return
                if start not in seen:
                    seen.add(start)
                    yield start, length


def continuation_tree(index: SuffixIndex, tree_budget: int, max_depth: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and path log-probabilities of the heaviest continuations, the last token of the text as root.

    A node weighs as much as all matches whose continuation runs through it. So every node is lighter than its parent,
    and the heaviest `tree_budget` nodes, heaviest first, are a tree. A path is held as likely as its share of the
    weight of all matches and of one more, of one token: that the text goes on as it never did.

    Example:
        >>> index = SuffixIndex(longest=2, shortest=1)
        >>> index.extend([5, 6, 7, 8, 3, 6, 9, 5, 6])
        >>> tokens, parents, logprobs = continuation_tree(index, tree_budget=3, max_depth=2)
        >>> tokens, parents, [round(math.exp(logprob), 2) for logprob in logprobs]
        ([6, 7, 8, 9], [-1, 0, 1, 0], [1.0, 0.53, 0.43, 0.13])
    """
    tokens, parents, weights = [index.tokens[-1]], [-1], [0.0]
    children: dict[tuple[int, int], int] = {}
    in_all = WEIGHT_PER_TOKEN
    for start, length in index.matches():
        node, weight = 0, WEIGHT_PER_TOKEN**length
        in_all += weight
        for token in index.tokens[start : start + max_depth]:
            child = children.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
                weights.append(0.0)
            weight *= WEIGHT_PER_DEPTH
            weights[child] += weight
            node = child
    weights[0] = in_all
    kept = [0, *sorted(range(1, len(tokens)), key=weights.__getitem__, reverse=True)[:tree_budget]]
    place = {node: index for index, node in enumerate(kept)}
    return (
        [tokens[node] for node in kept],
        [place.get(parents[node], -1) for node in kept],
        [math.log(weights[node] / in_all) for node in kept],
    )


class NGramGenerator(TreeCandidateGenerator):
    """Drafts from the text of each row; options as in `NGramOptions`."""

    drops_rows = True

    def __init__(self, *, longest_suffix: int, shortest_suffix: int, tree_budget: int, max_depth: int) -> None:
        self.longest_suffix = longest_suffix
        self.shortest_suffix = shortest_suffix
        self.tree_budget = tree_budget
        self.max_depth = max_depth
        self.padding: list[int] = []  # columns in front of each row's text
        self.indices: list[SuffixIndex] = []

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            steps = committed.token_ids.shape[1]
            self.padding = [max(0, steps - count) for count in committed.num_committed]
            self.indices = [SuffixIndex(self.longest_suffix, self.shortest_suffix) for _ in self.padding]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.padding = [self.padding[row] for row in rows]
        self.indices = [self.indices[row] for row in rows]

    def draft(self, context: DraftContext) -> DraftTree:
        # A prompt that came as embeddings has no columns here, and so no padding either.
        self.padding = [min(place, length - 1) for place, length in zip(self.padding, context.lengths, strict=True)]
        known = [padding + len(index.tokens) for padding, index in zip(self.padding, self.indices, strict=True)]
        first = min(known)
        columns = context.sequences[:, first : max(context.lengths)].tolist()
        budget = self.tree_budget if context.node_limit is None else min(self.tree_budget, context.node_limit)
        trees = []
        for row, index in enumerate(self.indices):
            index.extend(columns[row][known[row] - first : context.lengths[row] - first])
            trees.append(continuation_tree(index, budget if context.active[row] else 0, self.max_depth))
        token_ids, parents, path_logprobs = map(list, zip(*trees, strict=True))
        return DraftTree.from_lists(token_ids, parents, path_logprobs=path_logprobs, device=context.root_ids.device)
