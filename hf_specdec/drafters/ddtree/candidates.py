"""DDTree: the likeliest `tree_budget` continuations, from the per-position marginals of one drafter forward.

Under independent positions the tree that maximises the expected number of accepted tokens is the set of the likeliest
prefixes (DDTree, arXiv 2604.12989, Propositions 1 and 2). Two ways of finding them give the same tree, node for node:
`heap_tree` is the paper's Algorithm 1, the quicker one where tensors live in host memory; `level_tree` finds them level
by level on the device, without a host sync. Nodes are in order of probability; ties break on the rank tuple, and
equally likely tokens of a position rank by their ids.

Relation to its sibling `dflash`: same forward, but alternatives at every depth instead of one chain.
"""

from __future__ import annotations

import functools
import heapq
import math

import numpy as np
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

    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        if self.source.calls is not None:
            build = functools.partial(level_tree, budget=self.tree_budget)
            return captured_tree(self.source.calls, self.tree_budget, logits.shape[1], build, context.root_ids, logits)
        make = heap_tree if abilities(logits.device).host_memory else level_tree
        budget = self.tree_budget if context.node_limit is None else min(self.tree_budget, context.node_limit)
        return make(context.root_ids, logits, budget)


def ranked_logprobs(logits: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The `budget` likeliest tokens of each position, with log-probabilities normalised over the whole vocabulary.

    Where more tokens tie for the last rank than there is room, which of them are among the `budget` is left to `topk`.

    Args:
        logits: [batch, depth, vocab] float32.
        budget: no node of a tree with this many nodes has a token of a lower rank (Lemma 1).

    Returns:
        logprobs [batch, depth, ranks] float32 in descending order and token ids [batch, depth, ranks] int64. Where a
        position has NaN or +inf, or nothing but -inf, its first log-probability is not finite.
    """
    ranks = min(budget, logits.shape[-1])
    logprobs, token_ids = logits.log_softmax(-1).topk(ranks, dim=-1)
    order = _best(logprobs, token_ids, ranks)  # `topk` says nothing of ties
    return logprobs.gather(-1, order), token_ids.gather(-1, order)


def heap_tree(root_ids: Tensor, logits: Tensor, budget: int) -> DraftTree:
    """Algorithm 1: pops the likeliest prefix, pushes its next sibling and its first child.

    Args:
        root_ids: [batch] int64.
        logits: [batch, depth, vocab] float32, on the CPU.
        budget: most drafted nodes.
    """
    logprobs = logits.log_softmax(-1).numpy()
    likeliest = logprobs.argmax(-1).tolist()  # NaN, if there is any
    depth = logits.shape[1]
    nodes = 1 + num_prefixes(logits.shape[-1], depth, budget)
    # Lists and look-ups throughout: on a CPU each small tensor operation costs more than a node does.
    roots = root_ids.tolist()
    batch = len(roots)
    token_ids = [[root] * nodes for root in roots]  # padding repeats the root, below the root
    parents = [[-1] + [0] * (nodes - 1) for _ in roots]
    depths = [[0] + [1] * (nodes - 1) for _ in roots]
    children: list[dict[tuple[int, int], int]] = [{} for _ in roots]
    path_logprobs = [[0.0] for _ in roots]
    masks = [bytearray(_roots_and_selves(nodes)) for _ in roots]
    finite = []
    for row, firsts in enumerate(likeliest):
        left = logprobs[row]
        ranked = [[(left.item(position, token), token)] for position, token in enumerate(firsts)]
        finite.append(all(math.isfinite(first[0]) for (first,) in ranked))
        if finite[row]:
            _best_first(
                left, ranked, token_ids[row], parents[row], depths[row], masks[row], children[row], path_logprobs[row]
            )
    columns = np.array([token_ids, parents, depths])
    mask = np.frombuffer(bytearray().join(masks), dtype=bool)  # not bytes, which no tensor may share
    sizes = [len(row) for row in path_logprobs]
    return DraftTree(
        token_ids=torch.from_numpy(columns[0]),
        parents=torch.from_numpy(columns[1]),
        depths=torch.from_numpy(columns[2]),
        ancestor_mask=torch.from_numpy(mask.reshape(batch, nodes, nodes)),
        valid=_first_nodes(tuple(sizes), nodes),
        max_depth=depth,
        finite=None if all(finite) else torch.tensor(finite),
        path_logprobs=torch.tensor([row + [-math.inf] * (nodes - len(row)) for row in path_logprobs]),
    )


@functools.lru_cache(maxsize=16)
def _roots_and_selves(nodes: int) -> bytes:
    """[nodes, nodes] truth values of a byte each: every node sees the root and itself."""
    mask = np.eye(nodes, dtype=bool)
    mask[:, 0] = True
    return mask.tobytes()


@functools.lru_cache(maxsize=16)  # nearly always all of them
def _first_nodes(sizes: tuple[int, ...], nodes: int) -> Tensor:
    """[batch, nodes] bool: True for the first `sizes[row]` nodes."""
    with torch.inference_mode(False):  # it outlives the call
        return torch.arange(nodes) < torch.tensor(sizes).unsqueeze(1)


def _best_first(
    left: np.ndarray,
    ranked: list[list[tuple[float, int]]],
    token_ids: list[int],
    parents: list[int],
    depths: list[int],
    mask: bytearray,
    children: dict[tuple[int, int], int],
    path_logprobs: list[float],
) -> None:
    """Fills one row of a tree, node by node in order of probability.

    Tokens are ranked one by one, as the tree asks for them: small trees need few, and are made sooner than by a `topk`
    of all positions. Trees of hundreds of nodes take somewhat longer, which the forward that verifies them dwarfs.

    Args:
        left: [depth, vocab] float32 log-probabilities; -inf is written over those of tokens already ranked.
        ranked: per depth (log-probability, token) of the likeliest tokens, at first of one; lengthened as needed.
        token_ids: this and what follows, see `DraftTree`.
        parents: with the number of nodes that there may be.
        depths: as `parents`.
        mask: [nodes, nodes] truth values of a byte each.
        children: empty at first.
        path_logprobs: that of the root.
    """
    nodes, levels = len(parents), len(left)
    push, exchange = heapq.heappush, heapq.heapreplace
    # (minus the score, ranks, parent node, score of the parent). Ranks are one character each, quicker than a tuple of
    # numbers and in the same order: that of prefixes of equal score.
    heap: list[tuple[float, str, int, float]] = [(-ranked[0][0][0], chr(0), 0, 0.0)]
    for node in range(1, nodes):
        negative, ranks, parent, above = heap[0]
        if negative == math.inf:
            return
        depth, rank = len(ranks), ord(ranks[-1])
        siblings = ranked[depth - 1]
        token = siblings[rank][1]
        token_ids[node], parents[node], depths[node] = token, parent, depth
        if parent:
            mask[node * nodes : node * nodes + node] = mask[parent * nodes : parent * nodes + node]
        children[parent, token] = node
        path_logprobs.append(-negative)
        if node == nodes - 1:
            return  # what follows is for nodes that there is no room for
        rank += 1
        if rank == len(siblings):
            position = left[depth - 1]
            position[token] = -math.inf
            token = int(position.argmax())
            siblings.append((position.item(token), token))
        exchange(heap, (-above - siblings[rank][0], ranks[:-1] + chr(rank), parent, above))
        if depth < levels:
            push(heap, (negative - ranked[depth][0][0], ranks + chr(0), node, -negative))


def level_tree(root_ids: Tensor, logits: Tensor, budget: int) -> DraftTree:
    """The same tree as `heap_tree`, level by level on the device.

    On a device without float64 paths are summed in float32, and of paths that differ by less than its rounding either
    may come first.

    The best `budget` prefixes of depth d all extend the best `budget` of depth d-1, and with parents and tokens both
    sorted, prefix (i, j) has (i+1)(j+1)-1 others before it, so only pairs with (i+1)(j+1) <= budget matter. The best
    `budget` over all depths are the tree.

    Args:
        root_ids: [batch] int64.
        logits: [batch, depth, vocab] float32.
        budget: most drafted nodes.
    """
    if budget == 0:
        return DraftTree.root_only(root_ids)
    logprobs, ranked_ids = ranked_logprobs(logits, budget)
    finite = logprobs[..., 0].isfinite().all(-1)
    # A row without usable marginals keeps its shape; its nodes are marked invalid below.
    device = logprobs.device
    dtype = torch.float64 if abilities(device).float64 else torch.float32
    logprobs = logprobs.to(dtype).where(finite[:, None, None], -torch.inf)
    batch, depth, ranks = logprobs.shape

    # Kept prefixes of all levels so far, level after level; column 0 is the empty prefix, the root.
    scores = torch.zeros(batch, 1, dtype=dtype, device=device)
    parents = torch.full((batch, 1), -1, device=device)
    token_ids = root_ids.unsqueeze(1)
    # Place of each prefix in the order of rank tuples, a prefix before its extensions.
    places = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    start, width = 0, 1
    for level in range(depth):
        above, rank = _pairs(width, ranks, budget, device)
        candidates = scores[:, start + above] + logprobs[:, level, rank]
        # Ranks count from 1 here: rank 0 in this digit is the prefix itself.
        order = places[:, start + above] * (ranks + 1) + rank + 1
        chosen = _best(candidates, order, min(budget, len(above)))
        scores = torch.cat([scores, candidates.gather(1, chosen)], dim=1)
        parents = torch.cat([parents, start + above[chosen]], dim=1)
        token_ids = torch.cat([token_ids, ranked_ids[:, level].gather(1, rank[chosen])], dim=1)
        places = torch.cat([places * (ranks + 1), order.gather(1, chosen)], dim=1).argsort(1).argsort(1)
        start, width = start + width, chosen.shape[1]

    nodes = 1 + num_prefixes(logits.shape[-1], depth, budget)
    scores[:, 0] = torch.inf  # the root comes first
    chosen = _best(scores, places, nodes)
    path_logprobs = scores.gather(1, chosen)
    new_index = torch.zeros_like(places).scatter_(1, chosen, torch.arange(nodes, device=device).expand(batch, nodes))
    kept_parents = parents.gather(1, chosen)
    return DraftTree.from_parents(
        token_ids.gather(1, chosen),
        new_index.gather(1, kept_parents.clamp(min=0)).where(kept_parents >= 0, -1),
        max_depth=depth,
        valid=path_logprobs > -torch.inf,
        finite=finite,
        path_logprobs=path_logprobs.clamp(max=0),
    )


@functools.cache  # for good: captured graphs read them
def _pairs(width: int, ranks: int, budget: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which of `width` prefixes and which rank of the next token make a candidate; on the device, once."""
    pairs = [(i, j) for i in range(width) for j in range(min(ranks, budget // (i + 1)))]
    with torch.inference_mode(False):  # they outlive the call
        above, rank = torch.tensor(pairs, device=device).T
    return above, rank


def _best(scores: Tensor, order: Tensor, count: int) -> Tensor:
    """[..., count]: indices of the largest scores, equal scores by ascending `order`."""
    by_order = order.argsort(-1)
    by_score = scores.gather(-1, by_order).argsort(dim=-1, descending=True, stable=True)
    return by_order.gather(-1, by_score[..., :count])


@functools.lru_cache(maxsize=64)
def num_prefixes(vocab: int, depth: int, budget: int) -> int:
    """How many nodes a tree of this budget has: all prefixes there are, if they are fewer than the budget."""
    total = level = 0
    for _ in range(depth):
        level = max(level, 1) * vocab
        total += level
        if total >= budget:
            return budget
    return total
