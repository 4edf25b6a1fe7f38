"""Algorithm 1 of DDTree (arXiv 2604.12989) in plain Python: what the trees of `ddtree` must be, node for node."""

from __future__ import annotations

import heapq
import math

from torch import Tensor

from hf_specdec.decoding.tree import DraftTree


def heap_tree(root_ids: Tensor, logits: Tensor, budget: int) -> DraftTree:
    """Pops the likeliest prefix, pushes its next sibling and its first child; arguments as of `level_tree`.

    Of equal keys of the heap the shorter prefix is first, then the one whose parent is first, then the better rank.
    Rows end with their last valid node; the tree is as wide as the widest row.
    """
    logprobs = logits.log_softmax(-1)
    finite = logprobs.max(-1).values.isfinite().all(-1)
    grown = [
        _best_first(root, row if usable else [], budget)
        for root, row, usable in zip(root_ids.tolist(), logprobs.tolist(), finite.tolist(), strict=True)
    ]
    tokens, parents, scores = ([row[part] for row in grown] for part in range(3))
    return DraftTree.from_lists(tokens, parents, finite=finite, path_logprobs=scores)


def _best_first(root: int, logprobs: list[list[float]], budget: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and log-probabilities of the paths to all nodes, root first; `logprobs` by position and token."""
    ranked = [sorted(range(len(row)), key=lambda token, row=row: -row[token]) for row in logprobs]
    tokens, parents, scores = [root], [-1], [0.0]
    heap: list[tuple[float, int, int, int]] = []  # minus the score, depth, parent, rank

    def push(depth: int, parent: int, rank: int) -> None:
        if depth <= len(ranked) and rank < len(ranked[depth - 1]):
            step = logprobs[depth - 1][ranked[depth - 1][rank]]
            heapq.heappush(heap, (-(scores[parent] + step), depth, parent, rank))

    push(1, 0, 0)
    while heap and len(tokens) <= budget:
        negative, depth, parent, rank = heapq.heappop(heap)
        if negative == math.inf:
            break
        tokens.append(ranked[depth - 1][rank])
        parents.append(parent)
        scores.append(-negative)
        push(depth, parent, rank + 1)
        push(depth + 1, len(tokens) - 1, 0)
    return tokens, parents, scores
