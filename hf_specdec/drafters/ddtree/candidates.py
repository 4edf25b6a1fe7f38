"""DDTree: the likeliest `tree_budget` continuations, from the per-position marginals of one drafter forward.

If positions are independent, the tree with the most expected accepted tokens is the set of the likeliest prefixes
(DDTree, arXiv 2604.12989, Propositions 1 and 2). The paper's Algorithm 1 finds them one by one with a heap, which is
faster for tensors in host memory (`heap_tree`). `level_tree` finds the same tree level by level with tensor operations
of fixed shapes, on any device and without a host sync. Nodes are in order of probability.

Relation to its sibling `dflash`: same forward, but alternatives at every depth instead of one chain.
"""

from __future__ import annotations

import functools
import heapq
import math

import torch
from torch import Tensor

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.generator import DraftContext
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafters.base import BlockMarginals, MarginalsGenerator, captured_tree


class DDTreeGenerator(MarginalsGenerator):
    """Draft trees from marginals.

    Args:
        source: computes the marginals of each round.
        tree_budget: most drafted nodes, root not counted.
    """

    def __init__(self, source: BlockMarginals, tree_budget: int) -> None:
        super().__init__(source)
        self.tree_budget = tree_budget

    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        if self.source.calls is not None:
            build = functools.partial(level_tree, budget=self.tree_budget)
            return captured_tree(self.source.calls, self.tree_budget, logits.shape[1], build, context.root_ids, logits)
        budget = self.tree_budget if context.node_limit is None else min(self.tree_budget, context.node_limit)
        make = heap_tree if abilities(logits.device).host_memory else level_tree
        return make(context.root_ids, logits, budget)


def heap_tree(root_ids: Tensor, logits: Tensor, budget: int) -> DraftTree:
    """The tree of `level_tree` by the paper's Algorithm 1: pops the likeliest prefix, pushes its sibling and its child.

    For tensors in host memory, where each small operation of `level_tree` costs more than a node of this loop.

    Args:
        root_ids: [batch] int64.
        logits: [batch, depth, vocab] float32.
        budget: most drafted nodes.

    Returns:
        A tree as wide as its widest row.
    """
    if budget == 0:
        return DraftTree.root_only(root_ids)
    ranks = min(budget, logits.shape[-1])
    logprobs, token_ids = (part.tolist() for part in ranked_logprobs(logits, ranks))
    grown: list[tuple[list[int], list[int], list[float]]] = []
    finite = []
    for root, row_logprobs, row_ids in zip(root_ids.tolist(), logprobs, token_ids, strict=True):
        finite.append(all(math.isfinite(position[0]) for position in row_logprobs))
        grown.append(_best_first(root, row_logprobs, row_ids, budget) if finite[-1] else ([root], [-1], [0.0]))
    return DraftTree.from_lists(
        [tokens for tokens, _, _ in grown],
        [parents for _, parents, _ in grown],
        finite=None if all(finite) else from_host(finite, None),
        path_logprobs=[scores for _, _, scores in grown],
    )


def _best_first(
    root: int, logprobs: list[list[float]], token_ids: list[list[int]], budget: int
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and path log-probabilities of the nodes of one row.

    Args:
        root: its token id.
        logprobs: of the tokens of each position, the likeliest first.
        token_ids: the tokens.
        budget: most drafted nodes.
    """
    tokens, parents, scores = [root], [-1], [0.0]
    # (minus the score, depth, parent, rank): ties go to the shorter prefix, then to the earlier parent.
    heap = [(-logprobs[0][0], 1, 0, 0)]
    while heap and len(tokens) <= budget:
        negative, depth, parent, rank = heap[0]
        if negative == math.inf:
            break
        siblings = logprobs[depth - 1]
        tokens.append(token_ids[depth - 1][rank])
        parents.append(parent)
        scores.append(-negative)
        if rank + 1 < len(siblings):
            heapq.heapreplace(heap, (-scores[parent] - siblings[rank + 1], depth, parent, rank + 1))
        else:
            heapq.heappop(heap)
        if depth < len(logprobs):
            heapq.heappush(heap, (negative - logprobs[depth][0], depth + 1, len(tokens) - 1, 0))
    return tokens, parents, scores


def level_tree(root_ids: Tensor, logits: Tensor, budget: int) -> DraftTree:
    """The root and the `budget` likeliest prefixes.

    The best `budget` prefixes of depth d all extend the best `budget` of depth d-1. With these and the tokens of a
    position both sorted, the pair (i, j) has (i+1)(j+1)-1 others before it, so only pairs with (i+1)(j+1) <= budget
    are candidates. The best `budget` over all depths are the tree.

    Equally likely tokens of a position are ranked by their ids; if more of them tie for the last ranks than fit into
    `budget`, `topk` decides. Of equally likely prefixes the shorter comes first, then the one with the earlier parent,
    then the one with the better token rank. On a device without float64, paths are summed in float32; if they differ by
    less than its rounding, their order is arbitrary.

    Args:
        root_ids: [batch] int64.
        logits: [batch, depth, vocab] float32.
        budget: most drafted nodes.

    Returns:
        A tree of 1 + `num_prefixes(vocab, depth, budget)` nodes. A row with NaN, +inf or only -inf at a position is not
        `finite`, and only its root is valid.

    Example:
        >>> tree = level_tree(torch.tensor([9]), torch.tensor([[[3.0, 2.0, 0.0], [0.0, 5.0, 0.0]]]), budget=3)
        >>> tree.token_ids, tree.parents
        (tensor([[9, 0, 1, 1]]), tensor([[-1,  0,  1,  0]]))
    """
    if budget == 0:
        return DraftTree.root_only(root_ids)
    batch, depth, vocab = logits.shape
    device, ranks = logits.device, min(budget, vocab)
    logprobs, ranked_ids = ranked_logprobs(logits, ranks)
    finite = logprobs[..., 0].sum(-1).isfinite()
    dtype = torch.float64 if abilities(device).float64 else torch.float32
    logprobs = logprobs.to(dtype).where(finite[:, None, None], -torch.inf)
    above, rank = _pairs(budget, ranks, device)

    # Every level has `budget` entries; unused ones are -inf. The first level extends only the empty prefix.
    level_scores = logprobs.new_full((batch, budget), -torch.inf)
    level_scores[:, 0] = 0
    scores = [logprobs.new_full((batch, 1), torch.inf)]  # so that the root is sorted first
    chosen = []
    for step in logprobs.index_select(2, rank).unbind(1):
        candidates = level_scores.index_select(1, above) + step
        candidates, order = candidates.sort(dim=1, descending=True, stable=True)
        level_scores = candidates[:, :budget]
        scores.append(level_scores)
        chosen.append(order[:, :budget])

    # Prefixes are numbered level by level: the root is 0, entry e of level l (from 0) is 1 + l * budget + e.
    nodes = 1 + num_prefixes(vocab, depth, budget)
    path_logprobs, numbers = torch.cat(scores, dim=1).sort(dim=1, descending=True, stable=True)
    path_logprobs, numbers = path_logprobs[:, :nodes], numbers[:, :nodes]
    entries = (numbers - 1).clamp(min=0)  # the root's values are overwritten below
    levels, pair = entries // budget, torch.cat(chosen, dim=1).gather(1, entries)
    index = torch.arange(nodes, device=device).expand(batch, nodes)
    node_of = torch.zeros(batch, 1 + depth * budget, dtype=torch.int64, device=device).scatter_(1, numbers, index)
    parents = node_of.gather(1, (1 + (levels - 1) * budget + above[pair]).clamp(min=0))
    token_ids = ranked_ids.flatten(1).gather(1, levels * ranks + rank[pair])

    paths = [index]
    for _ in range(depth):
        paths.append(parents.gather(1, paths[-1]))
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=device).scatter_(2, torch.stack(paths, -1), True)
    depths = levels + 1
    token_ids[:, 0], parents[:, 0], depths[:, 0] = root_ids, -1, 0
    valid = path_logprobs > -torch.inf
    path_logprobs[:, 0] = 0
    return DraftTree(
        token_ids, parents, depths, mask, valid, max_depth=depth, finite=finite, path_logprobs=path_logprobs
    )


def ranked_logprobs(logits: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each position, with log-probabilities normalised over the whole vocabulary.

    Args:
        logits: [batch, depth, vocab] float32.
        ranks: tokens per position.

    Returns:
        logprobs [batch, depth, ranks] float32 in descending order, and token ids [batch, depth, ranks] int64, ascending
        among equal log-probabilities. If a position has NaN or +inf, or only -inf, its first log-probability is NaN.
    """
    logprobs, token_ids = logits.log_softmax(-1).topk(ranks, dim=-1)
    token_ids, order = token_ids.sort(dim=-1)
    logprobs, order_of_ids = logprobs.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return logprobs, token_ids.gather(-1, order_of_ids)


def _pairs(budget: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The pairs of prefix i and rank j with (i+1)(j+1) <= budget, ordered by i and then j: all i, and all j."""
    count = sum(min(ranks, budget // i) for i in range(1, budget + 1))
    widths = (budget // torch.arange(1, budget + 1, device=device)).clamp(max=ranks)
    above = torch.repeat_interleave(widths, output_size=count)
    rank = torch.arange(count, device=device) - (widths.cumsum(0) - widths)[above]
    return above, rank


def num_prefixes(vocab: int, depth: int, budget: int) -> int:
    """Number of drafted nodes of a tree with this budget; fewer than the budget if there are not enough prefixes."""
    total = level = 0
    for _ in range(depth):
        level = max(level, 1) * vocab
        total += level
        if total >= budget:
            return budget
    return total
