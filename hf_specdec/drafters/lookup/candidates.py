"""Look-up drafters in one `generate` call: each row's text, the outputs of earlier calls, and trees of continuations.

All in host memory: per round a binary search in each index and a few matches. Only new tokens are copied from the
device, once per round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.lookup.index import SuffixIndex

MAX_MATCHES = 32  # per index; limits the cost of a round for texts that repeat one token
# A match that is longer by one token weighs more than three shorter ones.
WEIGHT_PER_TOKEN = 4.0
# The weight falls with the distance from the match; so every node is also lighter than its parent.
WEIGHT_PER_DEPTH = 0.8
LEAST_SHARE = 1e-3  # matches with a smaller share of the total weight are ignored

Match = tuple[SuffixIndex, int, int]  # index, position of the continuation, matched tokens


def find(indices: Iterable[SuffixIndex], context: Sequence[int], shortest: int) -> list[Match]:
    """Matches of a text's last tokens in several indices, longest first."""
    found = [(each, *match) for each in indices for match in each.matches(context, MAX_MATCHES, shortest)]
    found.sort(key=lambda match: -match[2])
    return found


def continuation_tree(
    root: int, matches: Iterable[Match], tree_budget: int, max_depth: int
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and path log-probabilities of the heaviest continuations after a text's last token.

    A node's weight is the sum over all matches whose continuation contains it; for matches of equal length this is the
    frequency. So every node is lighter than its parent, and the heaviest `tree_budget` nodes, heaviest first, form a
    tree. A path's probability is its share of the total weight, to which one match of one token is added for unseen
    continuations.

    Example:
        >>> index = SuffixIndex()
        >>> index.extend([5, 6, 7, 8, 3, 6, 9, 5, 6])
        >>> matches = find([index], [5, 6], shortest=1)
        >>> tokens, parents, logprobs = continuation_tree(6, matches, tree_budget=3, max_depth=2)
        >>> tokens, parents, [round(math.exp(logprob), 2) for logprob in logprobs]
        ([6, 7, 8, 9], [-1, 0, 1, 0], [1.0, 0.53, 0.43, 0.13])
    """
    tokens, parents, weights = [root], [-1], [0.0]
    children: dict[tuple[int, int], int] = {}
    total = WEIGHT_PER_TOKEN
    for index, position, length in matches:
        node, weight = 0, WEIGHT_PER_TOKEN**length
        if weight < LEAST_SHARE * total:
            break
        total += weight
        for token in index.continuation(position, min(max_depth, tree_budget)):
            child = children.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
                weights.append(0.0)
            weight *= WEIGHT_PER_DEPTH
            weights[child] += weight
            node = child
    weights[0] = total
    selected = [0, *sorted(range(1, len(tokens)), key=weights.__getitem__, reverse=True)[:tree_budget]]
    rank = {node: index for index, node in enumerate(selected)}
    return (
        [tokens[node] for node in selected],
        [rank.get(parents[node], -1) for node in selected],
        [math.log(weights[node] / total) for node in selected],
    )


class LookupGenerator(TreeCandidateGenerator):
    """Drafts from the text of each row, and from the outputs in `memory` if there is one, which it adds to."""

    drops_rows = True

    def __init__(
        self,
        *,
        longest_suffix: int,
        shortest_suffix: int,
        tree_budget: int,
        max_depth: int,
        memory: SuffixIndex | None = None,
    ) -> None:
        self.longest_suffix, self.shortest_suffix = longest_suffix, shortest_suffix
        self.tree_budget, self.max_depth = tree_budget, max_depth
        self.memory = memory
        self.padding: list[int] = []  # columns before each row's text
        self.texts: list[SuffixIndex] = []
        self.latest: list[list[int]] = []  # tokens of each row since the last draft
        self.prompts: list[int] | None = None  # prompt length of each row; None before the first draft

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            steps = committed.token_ids.shape[1]
            self.padding = [max(0, steps - count) for count in committed.num_committed]
            self.texts = [SuffixIndex(self.longest_suffix) for _ in self.padding]
            self.latest = [[] for _ in self.padding]
            return
        for row, tokens in enumerate(committed.tokens):
            self.latest[row] += tokens

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._remember(set(range(len(self.texts))) - set(rows))
        self.padding = [self.padding[row] for row in rows]
        self.texts = [self.texts[row] for row in rows]
        self.latest = [self.latest[row] for row in rows]
        if self.prompts is not None:
            self.prompts = [self.prompts[row] for row in rows]

    def close(self) -> None:
        self._remember(range(len(self.texts)))
        self.texts = []

    def _remember(self, rows: Iterable[int]) -> None:
        """Adds the outputs of these rows to the memory, possibly with a token after the end."""
        if self.memory is not None and self.prompts is not None:
            for row in rows:
                self.memory.add(self.texts[row].continuation(self.prompts[row]) + self.latest[row])

    def draft(self, context: DraftContext) -> DraftTree:
        # A prompt that was passed as embeddings has no columns here, and no padding.
        self.padding = [
            min(position, length - 1) for position, length in zip(self.padding, context.lengths, strict=True)
        ]
        known = [padding + len(text) for padding, text in zip(self.padding, self.texts, strict=True)]
        first = min(known)
        columns = context.sequences[:, first : max(context.lengths)].tolist()
        if self.prompts is None:  # all tokens except the first root
            self.prompts = [
                length - 1 - position for length, position in zip(context.lengths, self.padding, strict=True)
            ]
        budget = self.tree_budget if context.node_limit is None else min(self.tree_budget, context.node_limit)
        trees = []
        for row, text in enumerate(self.texts):
            self.latest[row] = []
            text.extend(columns[row][known[row] - first : context.lengths[row] - first])
            end: list[int] = text.last(self.longest_suffix)
            matches: list[Match] = []
            if context.active[row] and budget:
                matches = find([text] if self.memory is None else [text, self.memory], end, self.shortest_suffix)
            trees.append(continuation_tree(end[-1], matches, budget, self.max_depth))
        token_ids, parents, path_logprobs = map(list, zip(*trees, strict=True))
        return DraftTree.from_lists(token_ids, parents, path_logprobs=path_logprobs, device=context.root_ids.device)
