"""Draft trees, grown from a drafter's distributions; pure functions, apart from the captured launch of `captured_tree`.

**From the marginals of one forward** (`heap_tree`, `level_tree`). If positions are independent, the tree with the most
expected accepted tokens is the set of the likeliest prefixes (DDTree, arXiv 2604.12989, Propositions 1 and 2). The
paper's Algorithm 1 finds them one by one with a heap, which is faster for tensors in host memory (`heap_tree`).
`level_tree` finds the same tree level by level with tensor operations of fixed shapes, on any device and without a host
sync. Nodes are in order of probability.

**Slot by slot** (`conditional_tree`), where a position's distribution depends on the token before it and costs no
further forward. **Level by level** (`grow_levels`, `best_tree`), with one forward per level: EAGLE-2, arXiv 2406.16858,
Sections 4.1 and 4.2. **Of one shape in all rounds** (`static_tree`): Medusa, arXiv 2401.10774, Section 2.3.3.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.exchange import NodeNotes
from hf_specdec.decoding.speed.cuda_graphs import StaticCalls
from hf_specdec.decoding.tree import DraftTree, from_host


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

    Examples:
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
    token_ids[:, 0], parents[:, 0], depths[:, 0] = root_ids.to(token_ids.device), -1, 0
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


class Slots(ABC):
    """The slots of one round's block, for use in order.

    Attributes:
        depth: number of slots that draft.
        logits: [batch, depth, draft_vocab] float32, before the correction by the previous token.
        state: [batch, 1, rank], the recurrent state before the first slot; None if there is none.
    """

    depth: int
    logits: Tensor
    state: Tensor | None = None

    @abstractmethod
    def step(self, slot: int, token_ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The distributions of a slot after given tokens.

        Args:
            slot: from 0, among those that draft.
            token_ids: [batch, nodes] int64, of the target; the tokens before the slot.
            state: [batch, nodes, rank], the recurrent states before the slot.

        Returns:
            [batch, nodes, draft_vocab] float32 logits, and the recurrent states after the slot.
        """

    def confidence(self, slot: int, token_ids: Tensor) -> Tensor | None:
        """[batch] float32, log-probability that a slot is accepted after `token_ids` [batch]; None without a head."""
        return None


def conditional_tree(root_ids: Tensor, slots: Slots, target_ids: Tensor, budget: int) -> DraftTree:
    """The root and the `budget` likeliest paths, where a slot's distribution is conditioned on the previous token.

    No path is likelier than its prefix, so only the best `budget` of a level are extended; in host memory only those
    among the best `budget` of all levels so far.

    Args:
        root_ids: [batch] int64.
        slots: of the round.
        target_ids: [draft_vocab] int64.
        budget: most drafted nodes.

    Returns:
        A tree with `path_logprobs`. A row with NaN, +inf or only -inf in a slot is not `finite`.
    """
    if budget == 0:
        return DraftTree.root_only(root_ids)
    device = slots.logits.device
    token_ids, state = root_ids.to(device).unsqueeze(1), slots.state
    finite = slots.logits.amax(-1).isfinite().all(1)
    scores = torch.zeros(token_ids.shape, device=device).masked_fill(~finite.unsqueeze(1), -torch.inf)
    # Per level: the paths' scores, the tokens, and the indices of their parents in the concatenation of all levels.
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    start, size = -1, 1  # of the previous level; the root comes before all
    for slot in range(slots.depth):
        logits, state = slots.step(slot, token_ids, state)
        logprobs, ids = ranked_logprobs(logits, min(budget, logits.shape[-1]))
        reached = scores.unsqueeze(-1) + logprobs
        reached = reached.masked_fill(reached.isnan(), -torch.inf)
        best, order = (part[:, :budget] for part in reached.flatten(1).sort(dim=1, descending=True, stable=True))
        above = order // ids.shape[-1]
        level = target_ids[ids.flatten(1).gather(1, order)]
        levels.append((best, level, start + above))
        start, size = start + size, best.shape[1]
        width = size
        if abilities(device).host_memory:
            so_far = torch.cat([scores for scores, _, _ in levels], 1)
            least = so_far.topk(min(budget, so_far.shape[1])).values[:, -1:]
            width = int(((best >= least) & best.isfinite()).sum(1).max())
            if not width:
                break
        token_ids, scores = level[:, :width], best[:, :width]
        if state is not None:
            state = state.gather(1, above[:, :width, None].expand(-1, -1, state.shape[-1]))
    scores, token_ids, parents = (torch.cat(part, 1) for part in zip(*levels, strict=True))
    return best_tree(root_ids.to(device), scores, token_ids, parents, finite, depth=len(levels), budget=budget)


def grow_levels(
    logits: Tensor,
    extend: Callable[[int, Tensor, Tensor], Tensor],
    depth: int,
    width: int,
    to_target_ids: Callable[[Tensor], Tensor],
    ranks: int | None = None,
    start: Tensor | None = None,
    extendable: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """All candidates, level after level: scores, token ids, parents, and which rows are finite; see `best_tree`.

    Args:
        logits: [batch, draft_vocab] floating, for the tokens after the roots.
        extend: called as `extend(level, token_ids, above)` with the [batch, width] int64 tokens of depth `level`, from
            1 on, that are extended, and the places of their parents among those of the last call (0, the root, at
            level 1); gives [batch, width, draft_vocab] logits for the tokens after them.
        depth: levels.
        width: most nodes of a level that are extended.
        to_target_ids: gives target ids for ids of the draft vocabulary.
        ranks: tokens that each node is extended by; None for `width`.
        start: [batch, 1] floating, the scores of the roots; None for 0.
        extendable: called as `extendable(scores, log_probs, candidates, best)` with the scores of all candidates so
            far, and of the latest level the log-probabilities [batch, nodes, draft_vocab], the candidates' scores
            [batch, nodes * ranks], and their log-probabilities [batch, nodes, ranks]; says which candidates are
            extended, [batch, nodes * ranks] bool. Fewer than `width` are, or none, where no row has more: it needs a
            sync with the host. None for all.
    """
    ranks = width if ranks is None else ranks
    scores = logits.new_zeros(len(logits), 1) if start is None else start
    places = torch.full(scores.shape, -1, dtype=torch.int64, device=logits.device)
    finite = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    logits = logits.unsqueeze(1)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    number = 0  # of the level's first candidate; parents are given by their numbers
    for level in range(1, depth + 1):
        log_probs = logits.log_softmax(-1)
        best, draft_ids = log_probs.topk(ranks)
        finite &= best[..., 0].isfinite().all(-1)  # NaN is the greatest of all; -inf is a token that cannot be drafted
        candidates = (scores.unsqueeze(-1) + best).flatten(1)
        token_ids = to_target_ids(draft_ids).flatten(1)
        levels.append((candidates, token_ids, places.repeat_interleave(ranks, dim=1)))
        if level == depth:
            break
        rated, count = candidates, width
        if extendable is not None:
            able = extendable(torch.cat([each for each, _, _ in levels], 1), log_probs, candidates, best)
            rated, count = candidates.where(able, -torch.inf), min(width, int(able.sum(1).max()))
            if not count:
                break
        # Among equal scores the earlier candidate comes first.
        scores, chosen = (part[:, :count] for part in rated.sort(dim=1, descending=True, stable=True))
        places, number = number + chosen, number + candidates.shape[1]
        logits = extend(level, token_ids.gather(1, chosen), chosen // ranks)
    return (*(torch.cat(part, 1) for part in zip(*levels, strict=True)), finite)


def best_tree(
    root_ids: Tensor, scores: Tensor, token_ids: Tensor, parents: Tensor, finite: Tensor, *, depth: int, budget: int
) -> DraftTree:
    """The tree of the likeliest candidates.

    Args:
        root_ids: [batch] int64.
        scores: [batch, candidates] float32, log-probability of the path to each; none exceeds its parent's. -inf is
            never drafted.
        token_ids: [batch, candidates] int64.
        parents: [batch, candidates] int64, index of each candidate's parent, which comes first; -1 for the root.
        finite: [batch] bool, False for rows without usable scores.
        depth: of the deepest candidate.
        budget: most candidates to keep.
    """
    batch, candidates = scores.shape
    selected = min(budget, candidates)
    # The sort is stable: among equal scores the parent comes first, so no candidate is selected without its parent.
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :selected]
    nodes = torch.arange(1, selected + 1, device=scores.device).expand(batch, selected)
    node_of = torch.zeros(batch, candidates, dtype=torch.int64, device=scores.device).scatter_(1, best, nodes)
    above = parents.gather(1, best)
    node_parents = node_of.gather(1, above.clamp(min=0)).where(above >= 0, 0)
    chosen = scores.gather(1, best)
    valid = nn.functional.pad(finite.unsqueeze(1) & (chosen > -torch.inf), (1, 0), value=True)
    return DraftTree.from_parents(
        torch.cat([root_ids.unsqueeze(1), token_ids.gather(1, best)], dim=1),
        nn.functional.pad(node_parents, (1, 0), value=-1),
        max_depth=depth,
        valid=valid,
        finite=finite,
        path_logprobs=nn.functional.pad(chosen, (1, 0)),
    )


def static_tree(accuracies: Sequence[Sequence[float]], budget: int) -> list[tuple[int, ...]]:
    """The tree with the most expected accepted tokens, assuming that predictions are correct independently.

    A path's probability is the product of its predictions' accuracies. The tree is the likeliest `budget` paths, found
    by adding the likeliest extension of the tree repeatedly. Medusa, Section 2.3.3.

    Args:
        accuracies: [heads][ranks], how often prediction number `rank` (from 0) of a head is correct; falls with `rank`.
        budget: nodes, root not counted.

    Examples:
        >>> static_tree([[0.6, 0.3], [0.5, 0.1]], 4)
        [(0,), (0, 0), (1,), (1, 0)]
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-accuracies[0][rank], (rank,)) for rank in range(len(accuracies[0]))]
    heapq.heapify(heap)
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < budget:
        chance, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                heapq.heappush(heap, (chance * accuracy, (*path, rank)))
    return paths


class StaticTree:
    """`static_tree` as tensors: what is the same in all rounds.

    Args:
        accuracies: see `static_tree`.
        budget: see `static_tree`.
        device: of the tensors.

    Attributes:
        depth: of the deepest node.
        num_ranks: candidates of a node that are used, at most.
        ranks: [drafted] int64, which candidate of its parent each node is.
        levels: [drafted] int64, depth of each node's parent.
        parents: [nodes] int64, -1 at the root.
        path_logprobs: [nodes] float32, by the accuracies.
    """

    def __init__(self, accuracies: Sequence[Sequence[float]], budget: int, device: torch.device) -> None:
        paths = static_tree(accuracies, budget)
        nodes = {path: node for node, path in enumerate([(), *paths])}
        chances = [math.prod(accuracies[level][rank] for level, rank in enumerate(path)) for path in nodes]
        self.depth, self.num_ranks = max(map(len, paths)), 1 + max(path[-1] for path in paths)
        self.ranks = from_host([path[-1] for path in paths], device)
        self.levels = from_host([len(path) - 1 for path in paths], device)
        self.parents = from_host([-1, *(nodes[path[:-1]] for path in paths)], device)
        self.path_logprobs = from_host(np.array(chances, np.float32), device).log()

    def filled(self, token_ids: Tensor, *, valid: Tensor | None = None, finite: Tensor | None = None) -> DraftTree:
        """The tree with these tokens, [batch, nodes] int64."""
        batch = len(token_ids)
        return DraftTree.from_parents(
            token_ids,
            self.parents.expand(batch, -1),
            self.depth,
            valid=valid,
            finite=finite,
            path_logprobs=self.path_logprobs.expand(batch, -1),
        )


TREE_TENSORS = ("token_ids", "parents", "depths", "ancestor_mask", "valid", "finite", "path_logprobs")


def captured_tree(
    calls: StaticCalls | None, budget: int, max_depth: int, build: Callable[..., DraftTree], *values: Tensor
) -> DraftTree:
    """`build(*values)`, as one captured launch if drafting is captured; then valid until the next call.

    Args:
        calls: of the drafter; None if nothing is captured.
        budget: of the tree; together with `max_depth` and the shapes of `values` it identifies the captured call.
        max_depth: of the tree.
        build: makes a tree from the values, with `finite` and `path_logprobs`.
        values: [batch, ...] each.
    """
    if calls is None:
        return build(*values)

    def tensors(owner: object, *values: Tensor) -> tuple[Tensor, ...]:
        tree = build(*values)
        return tuple(getattr(tree, name) for name in TREE_TENSORS)

    parts: dict[str, Any] = dict(zip(TREE_TENSORS, calls(("tree", budget, max_depth), tensors, *values), strict=True))
    return DraftTree(**parts, max_depth=max_depth)


def marginal_notes(tree: DraftTree, logits: Tensor) -> NodeNotes:
    """The draft probabilities of a tree's nodes from per-position marginals, all computed in one forward.

    Args:
        tree: at most as deep as there are positions.
        logits: [batch, depth, vocab] float32; entry d-1 is for nodes of depth d.
    """
    indices = tree.depths.to(logits.device).sub(1).clamp(min=0)
    token_ids = tree.token_ids.to(logits.device).clamp(0, logits.shape[-1] - 1)
    rows = torch.arange(len(indices), device=logits.device).unsqueeze(1)
    return NodeNotes(logits.softmax(-1)[rows, indices, token_ids], tree.depths.clamp(max=1))
