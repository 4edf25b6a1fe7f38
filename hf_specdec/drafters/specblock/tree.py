"""How a SpecBlock tree grows: what a block adds to it, where the next block starts, and the cut to the budget.

Pure functions on arrays of static shape, no loop over nodes. They run on tensors, without a host sync on an
accelerator, and on NumPy arrays, which is quicker where tensors live in host memory anyway: there each small operation
costs a fifth. Nodes of a block are numbered by start, slot and rank; rank 0 is the greedy token of a slot, and the
ranks 0 of a start are its chain. Source: SpecBlock, Section 3.2 and Algorithm 2; the chain and the beam as published.
The forwards are in `candidates.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.specblock.modeling import SpecBlockDrafter

# A Tensor or a NumPy array; of one call all are of one kind.
Array = Any


@dataclass(frozen=True)
class Shape:
    """How a tree may grow: the drafting options, ready for use.

    Attributes:
        branching: [classes] int64, candidates by bucket.
        width: most candidates of any slot.
        slots: K.
        beam_width: see `SpecBlockDrafter`.
        max_starts: likewise.
        tree_budget: likewise.
        index: [many] int64: 0, 1, 2, ...
    """

    branching: Array
    width: int
    slots: int
    beam_width: int | None
    max_starts: int | None
    tree_budget: int
    index: Array

    @classmethod
    def of(cls, drafter: SpecBlockDrafter, *, host: bool) -> Shape:
        options = drafter.options
        width = min(max(1, *options.branching, options.beam_width or 1), drafter.config.draft_vocab_size)
        slots = drafter.config.block_size
        branching = torch.tensor(options.branching, device=drafter.device)
        index = torch.arange(max(2, options.node_limit) * slots * width, device=drafter.device)
        return cls(
            branching.numpy() if host else branching,
            width,
            slots,
            options.beam_width,
            options.max_starts,
            options.node_limit,
            index.numpy() if host else index,
        )

    def most_starts(self, block: int) -> int:
        """Of any tree: the root for the first block, then the likeliest nodes of the block before."""
        # Of more starts than the budget none but the likeliest `tree_budget` can have a place in the tree.
        limits = [self.tree_budget, self.max_starts, self.beam_width if block > 1 else None]
        return min(limit for limit in limits if limit is not None) if block > 0 else 1


@dataclass(frozen=True)
class Starts:
    """Where a block starts.

    Attributes:
        nodes: [batch, starts] int64, index among `Nodes`.
        scores: [batch, starts] float32, log-probability of the path there; -inf where a row has fewer starts.
        depths: [batch, starts] int64, of the node.
        first_seen: [batch, starts] int64, slots of the round's first block that are on the path.
        held_seen: [batch, starts, held] bool, which entries of the later blocks are.
        sources: [batch, starts] int64, slot of the block before, counted over all its starts.
    """

    nodes: Array
    scores: Array
    depths: Array
    first_seen: Array
    held_seen: Array
    sources: Array

    @classmethod
    def root(cls, batch: int, *, like: Array) -> Starts:
        """The start of a round's first block; `like` is any array of the kind and device wanted."""
        zeros, scores = _zeros((batch, 1), like), _zeros((batch, 1), like, scores=True)
        return cls(zeros, scores, zeros, zeros, zeros[..., None][..., :0] > 0, zeros)


@dataclass(frozen=True)
class Reading:
    """What the heads say about a block.

    Attributes:
        token_ids: [batch, starts, slots, width] int64, the likeliest tokens in order, as target ids.
        logprobs: [batch, starts, slots, width] float32, normalised over the whole draft vocabulary.
        classes: [batch, starts, slots] int64, predicted buckets.
        finite: [batch] bool, False where a row's logits are NaN or infinite; its `logprobs` are -inf.
    """

    token_ids: Array
    logprobs: Array
    classes: Array
    finite: Array


@dataclass(frozen=True)
class Nodes:
    """All nodes drafted so far, before the tree is cut to its budget; column 0 is the root.

    Attributes:
        token_ids: [batch, nodes] int64.
        scores: [batch, nodes] float32, log-probability of the path under the drafter; -inf for places not used.
        above: [batch, states] int64, the node below which the candidates of a state hang. A state is a slot of a start
            of a block, all blocks counted through; node n is a candidate of state (n - 1) // width.
        starts: number of them in each block so far.
        shape: of the tree.
    """

    token_ids: Array
    scores: Array
    above: Array
    starts: tuple[int, ...]
    shape: Shape

    @classmethod
    def root(cls, root_ids: Array, shape: Shape) -> Nodes:
        ids = root_ids[:, None]
        return cls(ids, _zeros(ids.shape, ids, scores=True), _zeros((len(ids), 0), ids), (), shape)

    @property
    def count(self) -> int:
        return int(self.token_ids.shape[1])

    def forwards(self, numbers: Array) -> Array:
        """Which forward of the round drafted each of some nodes, any shape, counted from 1; 0 for the root."""
        states = (numbers - 1) // self.shape.width
        made, ends = (states >= 0) * 1, 0
        for starts in self.starts[:-1]:
            ends += starts * self.shape.slots
            made = made + (states >= ends) * 1
        return made

    def place_of(self, node: int) -> tuple[int, int]:
        """The block that drafted a node other than the root, and the slot there, counted over all its starts."""
        state = (node - 1) // self.shape.width
        for block, starts in enumerate(self.starts):
            if state < starts * self.shape.slots:
                return block, state
            state -= starts * self.shape.slots
        raise IndexError(node)


def attach(nodes: Nodes, starts: Starts, reading: Reading) -> tuple[Nodes, Array]:
    """Hangs a block below its starts: the greedy tokens as a chain, and at each slot alternatives to its token.

    The bucket of a slot says how many candidates it has, the chain's token included; the first slot that gives up (0
    candidates) ends branching for itself and the rest of its block, but not the chain. Below the root the first slot
    has `beam_width` candidates whatever its bucket. Algorithm 2, lines 6 to 8; the chain and the beam as published.

    Returns:
        nodes, and the score of each new node as a start of the next block, [batch, new] float32, -inf where it is
        none. Starts are all alternatives, the chain's token at every slot that branches, and its last token unless
        the rank head gives up: in the first block at the first slot that is not of the best bucket, later at any slot.
    """
    shape, first = nodes.shape, nodes.count == 1
    xp = _namespace(reading.logprobs)
    batch, num_starts, slots, width = reading.token_ids.shape
    widths = shape.branching[reading.classes]
    gives_up = widths == 0
    if first and shape.beam_width is not None:
        widths[:, :, 0] = shape.beam_width
    branches = (widths > 0).cumprod(-1) > 0

    above = starts.scores[..., None]
    chain_scores = above + reading.logprobs[..., 0].cumsum(-1)
    above_scores = xp.concatenate([above, chain_scores[..., :-1]], -1)
    used = branches[..., None] & (shape.index[:width] < widths[..., None])
    used[..., 0] = True
    scores = xp.where(used, above_scores[..., None] + reading.logprobs, -math.inf)

    parents = _zeros((batch, num_starts, slots), reading.classes)
    parents[..., 0] = starts.nodes
    chain = nodes.count + width * shape.index[: num_starts * slots].reshape(num_starts, slots)
    parents[..., 1:] = chain[:, :-1]

    if first:
        unsure = (
            (reading.classes > 0).argmax(-1)[..., None] if xp is np else (reading.classes > 0).int().argmax(-1, True)
        )
        goes_on = ~take(gives_up, unsure, -1)[..., 0]
    else:
        goes_on = ~gives_up.any(-1)
    used[..., 0] = branches
    used[..., -1, 0] |= goes_on
    as_starts = xp.where(used, scores, -math.inf)

    return Nodes(
        xp.concatenate([nodes.token_ids, reading.token_ids.reshape(batch, -1)], 1),
        xp.concatenate([nodes.scores, scores.reshape(batch, -1)], 1),
        xp.concatenate([nodes.above, parents.reshape(batch, -1)], 1),
        (*nodes.starts, num_starts),
        shape,
    ), as_starts.reshape(batch, -1)


def choose_starts(nodes: Nodes, starts: Starts, as_starts: Array) -> Starts:
    """The likeliest of the nodes just attached from which the next block starts.

    Args:
        nodes: all nodes, the new ones last.
        starts: those of the block that was just attached.
        as_starts: from `attach`.
    """
    shape, slots, width = nodes.shape, nodes.shape.slots, nodes.shape.width
    xp = _namespace(as_starts)
    new = as_starts.shape[1]
    block = len(nodes.starts)  # the one to come
    most = min(new, shape.most_starts(block))
    picked = _order(as_starts)[:, :most]
    scores = take(as_starts, picked, 1)
    if block > 1 and shape.beam_width is not None:
        room = shape.tree_budget - (nodes.scores > -math.inf).sum(1)[:, None] + 1
        limit = (room // slots).clip(min=1)
        scores = xp.where(shape.index[:most] >= limit, -math.inf, scores)
    if xp is np:  # a look at the numbers is free: places that no row uses are cut off
        most = max(1, int((scores > -math.inf).sum(1).max()))
        scores, picked = scores[:, :most], picked[:, :most]

    source = picked // width
    leaf, slot = source // slots, source % slots
    if block == 1:
        first_seen, held_seen = slot + 1, (picked[..., None] < 0)[..., :0]
    else:
        first_seen = take(starts.first_seen, leaf, 1)
        held = take(starts.held_seen, xp.broadcast_to(leaf[..., None], (*leaf.shape, starts.held_seen.shape[-1])), 1)
        entry = shape.index[: starts.nodes.shape[1] * slots]
        own = (entry // slots == leaf[..., None]) & (entry % slots <= slot[..., None])
        held_seen = xp.concatenate([held, own], -1)
    depths = take(starts.depths, leaf, 1) + slot + 1
    return Starts(nodes.count - new + picked, scores, depths, first_seen, held_seen, source)


def cut(nodes: Nodes, tree_budget: int, max_depth: int, *, merge: bool, finite: Array) -> tuple[DraftTree, Array]:
    """The likeliest `tree_budget` nodes as a tree, in order of probability.

    A node never scores above its parent and comes after it, so what is kept is a tree.

    Args:
        nodes: all nodes.
        tree_budget: most nodes, root not counted.
        max_depth: no node is deeper.
        merge: keep a path that was drafted twice once, with the children of both.
        finite: [batch] bool, see `DraftTree.finite`.

    Returns:
        the tree, and which of `nodes` its own are, [batch, nodes] int64.
    """
    if isinstance(nodes.scores, np.ndarray):
        return _cut_on_host(nodes, tree_budget, merge=merge, finite=finite)
    batch, count = nodes.token_ids.shape
    device = nodes.token_ids.device
    scores = nodes.scores.clone()
    scores[:, 0] = torch.inf
    # Merging makes room for further nodes: look at twice as many.
    wanted = min(count, 1 + tree_budget * (2 if merge else 1))
    scores, kept = scores.sort(dim=1, descending=True, stable=True)
    scores, kept = scores[:, :wanted], kept[:, :wanted]
    valid = scores > -torch.inf
    index = torch.arange(wanted, device=device).expand(batch, -1)
    place = torch.zeros(batch, count, dtype=torch.int64, device=device).scatter_(1, kept, index)
    states = (kept - 1).clamp(min=0) // nodes.shape.width
    parents = place.gather(1, nodes.above.gather(1, states)).where(valid, 0)
    token_ids = nodes.token_ids.gather(1, kept).where(valid, nodes.token_ids[:, :1])
    if merge:
        first = _first_of_path(token_ids, parents, max_depth)
        alone = valid & (first == index)
        order = (~alone).to(torch.int8).argsort(dim=1, stable=True)[:, : 1 + tree_budget]
        valid = alone.gather(1, order)
        place = torch.zeros_like(first).scatter_(1, order, index[:, : order.shape[1]])
        parents = place.gather(1, first.gather(1, parents.gather(1, order))).where(valid, 0)
        token_ids = token_ids.gather(1, order).where(valid, token_ids[:, :1])
        kept = kept.gather(1, order)
    parents = parents.clone()
    parents[:, 0] = -1
    path_logprobs = nodes.scores.gather(1, kept).where(valid, -torch.inf)
    tree = DraftTree.from_parents(
        token_ids, parents, max_depth, valid=valid, finite=finite, path_logprobs=path_logprobs
    )
    return tree, kept


def _first_of_path(token_ids: Tensor, parents: Tensor, max_depth: int) -> Tensor:
    """[batch, nodes]: the first node with the same tokens on its path; parents are 0 at the root."""
    tokens = token_ids.clone()
    tokens[:, 0] = -1  # no token: paths of different length must differ
    same = torch.ones((), dtype=torch.bool, device=token_ids.device)
    at = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(parents)
    nodes = at
    for _ in range(max_depth):
        there = tokens.gather(1, at)
        same = same & (there.unsqueeze(-1) == there.unsqueeze(1))
        at = parents.gather(1, at)
    return nodes.unsqueeze(1).where(same, token_ids.shape[1]).amin(-1)


def _cut_on_host(nodes: Nodes, tree_budget: int, *, merge: bool, finite: np.ndarray) -> tuple[DraftTree, np.ndarray]:
    """The same tree; of the nodes kept, one after the other, since the accepted path is then found by look-ups."""
    scores = nodes.scores.copy()
    scores[:, 0] = np.inf
    order = _order(scores)[:, : 1 + tree_budget * (2 if merge else 1)]
    used = np.take_along_axis(scores, order, 1) > -np.inf
    tokens = np.take_along_axis(nodes.token_ids, order, 1).tolist()
    parents = np.take_along_axis(nodes.above, np.maximum(order - 1, 0) // nodes.shape.width, 1).tolist()
    token_ids, above, kept = [], [], []
    for row, numbers in enumerate(order.tolist()):
        place = {0: 0}  # number among all nodes -> node of the tree
        known: dict[tuple[int, int], int] = {}
        own_tokens, own_parents, own_numbers = tokens[row][:1], [-1], [0]
        seen = used[row].tolist()
        for number, token, parent, there in list(zip(numbers, tokens[row], parents[row], seen, strict=True))[1:]:
            if not there or len(own_tokens) > tree_budget:
                break
            path = (place[parent], token)
            twin = known.get(path)
            if twin is None or not merge:
                known.setdefault(path, len(own_tokens))
                place[number] = len(own_tokens)
                own_tokens.append(token)
                own_parents.append(path[0])
                own_numbers.append(number)
            else:
                place[number] = twin
        token_ids.append(own_tokens)
        above.append(own_parents)
        kept.append(own_numbers)
    width = max(map(len, kept))
    padded = np.array([numbers + [0] * (width - len(numbers)) for numbers in kept])
    path_logprobs = [nodes.scores[row, numbers].tolist() for row, numbers in enumerate(kept)]
    if merge:
        tree = DraftTree.from_lists(token_ids, above, finite=torch.from_numpy(finite), path_logprobs=path_logprobs)
        return tree, padded
    # Children of one token under one node: only tensors tell them apart.
    valid = np.array([[node < len(numbers) for node in range(width)] for numbers in kept])
    ids, up = (torch.tensor([row + [0] * (width - len(row)) for row in rows]) for rows in (token_ids, above))
    max_depth = len(nodes.starts) * nodes.shape.slots
    tree = DraftTree.from_parents(
        ids,
        up,
        max_depth,
        valid=torch.from_numpy(valid),
        finite=torch.from_numpy(finite),
        path_logprobs=torch.from_numpy(np.where(valid, np.take_along_axis(nodes.scores, padded, 1), -np.inf)),
    )
    return tree, padded


def _namespace(array: Array) -> Any:
    """The module whose functions take this kind of array."""
    return np if isinstance(array, np.ndarray) else torch


def _order(scores: Array) -> Array:
    """Indices of the last axis, largest score first, equal ones in order."""
    if isinstance(scores, np.ndarray):
        return (-scores).argsort(-1, kind="stable")
    return scores.argsort(dim=-1, descending=True, stable=True)


def take(values: Array, index: Array, axis: int) -> Array:
    """`torch.gather`, of either kind."""
    if isinstance(values, np.ndarray):
        return np.take_along_axis(values, index, axis)
    return values.gather(axis, index)


def _zeros(shape: tuple[int, ...], like: Array, *, scores: bool = False) -> Array:
    if isinstance(like, np.ndarray):
        return np.zeros(shape, dtype=np.float32 if scores else np.int64)
    return torch.zeros(shape, dtype=torch.float32 if scores else torch.int64, device=like.device)


def frozen(nodes: Nodes, finite: Array) -> Nodes:
    """The nodes, none but the root in rows whose drafts are not finite."""
    xp = _namespace(nodes.scores)
    return replace(nodes, scores=xp.where(finite[:, None], nodes.scores, -math.inf))
