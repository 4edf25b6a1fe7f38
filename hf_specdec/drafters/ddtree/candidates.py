"""DDTree: the likeliest `tree_budget` continuations, from the per-position marginals of one drafter forward.

Under independent positions the tree that maximises the expected number of accepted tokens is the set of the likeliest
prefixes (DDTree, arXiv 2604.12989, Propositions 1 and 2). The paper's Algorithm 1 finds them one by one with a heap;
`level_tree` finds the same tree level by level with tensor operations of fixed shapes, on any device and without a
host sync. The tests hold it to Algorithm 1. Nodes are in order of probability.

Relation to its sibling `dflash`: same forward, but alternatives at every depth instead of one chain.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.generator import DraftContext
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.base import BlockMarginals, MarginalsGenerator, captured_tree


class DDTreeGenerator(MarginalsGenerator):
    """Draft trees from marginals.

    Args:
        source: gives the marginals of each round.
        tree_budget: most drafted nodes, root not counted.
    """

    def __init__(self, source: BlockMarginals, tree_budget: int) -> None:
        super().__init__(source)
        self.tree_budget = tree_budget
        # `candidate_pairs` of the latest budget and number of ranks.
        self.pairs: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None

    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        if self.source.calls is not None:
            build = functools.partial(level_tree, budget=self.tree_budget)
            return captured_tree(self.source.calls, self.tree_budget, logits.shape[1], build, context.root_ids, logits)
        budget = self.tree_budget if context.node_limit is None else min(self.tree_budget, context.node_limit)
        key = budget, min(budget, logits.shape[-1])
        if self.pairs is None or self.pairs[0] != key:
            self.pairs = key, candidate_pairs(*key, logits.device)
        return level_tree(context.root_ids, logits, budget, self.pairs[1])


def level_tree(root_ids: Tensor, logits: Tensor, budget: int, pairs: tuple[Tensor, Tensor] | None = None) -> DraftTree:
    """The root and the `budget` likeliest prefixes.

    The best `budget` prefixes of depth d all extend the best `budget` of depth d-1. With these and the tokens of a
    position both sorted, the pair (i, j) has (i+1)(j+1)-1 others before it, so only pairs with (i+1)(j+1) <= budget
    are candidates. The best `budget` over all depths are the tree.

    Equally likely tokens of a position are ranked by their ids; where more of them tie for the last of `budget` ranks
    than there is room, `topk` decides which are ranked. Of equally likely prefixes the shorter is first, then the one
    whose parent is first, then the one with the token of the better rank. On a device without float64 paths are summed
    in float32, and of paths that differ by less than its rounding either may be first.

    Args:
        root_ids: [batch] int64.
        logits: [batch, depth, vocab] float32.
        budget: most drafted nodes.
        pairs: `candidate_pairs` of this budget, where they were made before.

    Returns:
        a tree of 1 + `num_prefixes(vocab, depth, budget)` nodes. A row in which a position has NaN, +inf or nothing
        but -inf is not `finite` and has no valid node but the root.

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
    above, rank = candidate_pairs(budget, ranks, device) if pairs is None else pairs

    # Every level has `budget` places; -inf where there are fewer prefixes, as in the first: it has the empty prefix.
    level_scores = logprobs.new_full((batch, budget), -torch.inf)
    level_scores[:, 0] = 0
    scores = [logprobs.new_full((batch, 1), torch.inf)]  # the root comes first
    chosen = []
    for step in logprobs.index_select(2, rank).unbind(1):
        candidates = level_scores.index_select(1, above) + step
        candidates, order = candidates.sort(dim=1, descending=True, stable=True)
        level_scores = candidates[:, :budget]
        scores.append(level_scores)
        chosen.append(order[:, :budget])

    # Prefixes are numbered level after level: the root is 0, place p of level l (from 0) is 1 + l * budget + p.
    nodes = 1 + num_prefixes(vocab, depth, budget)
    path_logprobs, numbers = torch.cat(scores, dim=1).sort(dim=1, descending=True, stable=True)
    path_logprobs, numbers = path_logprobs[:, :nodes], numbers[:, :nodes]
    places = (numbers - 1).clamp(min=0)  # the root's entries are overwritten below
    levels, pair = places // budget, torch.cat(chosen, dim=1).gather(1, places)
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
        where log-probabilities are equal. Where a position has NaN or +inf, or nothing but -inf, its first
        log-probability is NaN.
    """
    logprobs, token_ids = logits.log_softmax(-1).topk(ranks, dim=-1, sorted=False)
    token_ids, order = token_ids.sort(dim=-1)
    logprobs, order_of_ids = logprobs.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return logprobs, token_ids.gather(-1, order_of_ids)


def candidate_pairs(budget: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The pairs of prefix i and rank j with (i+1)(j+1) <= budget, ordered by i and then j: all i, and all j."""
    count = sum(min(ranks, budget // i) for i in range(1, budget + 1))
    widths = (budget // torch.arange(1, budget + 1, device=device)).clamp(max=ranks)
    above = torch.repeat_interleave(widths, output_size=count)
    rank = torch.arange(count, device=device) - (widths.cumsum(0) - widths)[above]
    return above, rank


def num_prefixes(vocab: int, depth: int, budget: int) -> int:
    """How many drafted nodes a tree of this budget has: all prefixes there are, if they are fewer than the budget."""
    total = level = 0
    for _ in range(depth):
        level = max(level, 1) * vocab
        total += level
        if total >= budget:
            return budget
    return total
