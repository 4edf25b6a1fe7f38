"""SpecBlock in one `generate` call: its cache, M forwards per round, and the tree that the rank head shapes.

The first forward of a round brings in the positions committed since the last one, K entries each, and drafts from the
last of them; every later one drafts from all chosen nodes of the block before at once. Trees are built from tensors of
static shape, without a host sync on an accelerator; where tensors live in host memory, a look at them is free and
unused places are cut off. Source: SpecBlock, Section 3.2, Figure 3 and Algorithm 2. The network is in `modeling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.candidates import DraftContext, RoundOutcome, TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafters.base import path_notes
from hf_specdec.drafters.specblock.modeling import SpecBlockDrafter

# Positions of a prompt that enter the cache per forward: K slots of each attend to K entries of all before.
PROMPT_CHUNK = 1024


@dataclass(frozen=True)
class Shape:
    """How a tree may grow: the drafting options, ready for use.

    Attributes:
        branching: [classes] int64, candidates by bucket.
        width: most candidates of any slot.
        beam_width: see `SpecBlockDrafter`.
        max_starts: likewise.
        tree_budget: likewise.
    """

    branching: Tensor
    width: int
    beam_width: int | None
    max_starts: int | None
    tree_budget: int

    @classmethod
    def of(cls, drafter: SpecBlockDrafter) -> Shape:
        width = max(1, *drafter.branching, drafter.beam_width or 1)
        return cls(
            torch.tensor(drafter.branching, device=drafter.device),
            min(width, drafter.config.draft_vocab_size),
            drafter.beam_width,
            drafter.max_starts,
            drafter.node_limit,
        )


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

    nodes: Tensor
    scores: Tensor
    depths: Tensor
    first_seen: Tensor
    held_seen: Tensor
    sources: Tensor


@dataclass(frozen=True)
class Reading:
    """What the heads say about a block.

    Attributes:
        token_ids: [batch, starts, slots, width] int64, the likeliest tokens in order, as target ids.
        logprobs: [batch, starts, slots, width] float32, normalised over the whole draft vocabulary.
        classes: [batch, starts, slots] int64, predicted buckets.
        finite: [batch] bool, False where a row's logits are NaN or infinite; its `logprobs` are -inf.
    """

    token_ids: Tensor
    logprobs: Tensor
    classes: Tensor
    finite: Tensor


@dataclass(frozen=True)
class Nodes:
    """All nodes drafted so far, before the tree is cut to its budget; column 0 is the root.

    Attributes:
        token_ids: [batch, nodes] int64.
        parents: [batch, nodes] int64, -1 at the root.
        scores: [batch, nodes] float32, log-probability of the path under the drafter; -inf for places not used.
        classes: [batch, nodes] int64, the bucket predicted at the node's slot; -1 at the root.
        blocks: [nodes] int64, which forward drafted it; -1 at the root.
        slots: [nodes] int64, at which slot; -1 at the root.
    """

    token_ids: Tensor
    parents: Tensor
    scores: Tensor
    classes: Tensor
    blocks: Tensor
    slots: Tensor

    @classmethod
    def root(cls, root_ids: Tensor) -> Nodes:
        ids = root_ids.unsqueeze(1)
        none = torch.full_like(ids, -1)
        nowhere = torch.full((1,), -1, device=ids.device)
        return cls(ids, none, torch.zeros(ids.shape, device=ids.device), none, nowhere, nowhere)

    @property
    def count(self) -> int:
        return self.token_ids.shape[1]

    def add(self, tokens: Tensor, parents: Tensor, scores: Tensor, classes: Tensor, slots: Tensor) -> Nodes:
        """Appends what one more block drafted."""
        block = self.blocks[-1:] + 1
        return Nodes(
            torch.cat([self.token_ids, tokens], 1),
            torch.cat([self.parents, parents], 1),
            torch.cat([self.scores, scores], 1),
            torch.cat([self.classes, classes], 1),
            torch.cat([self.blocks, block.expand(slots.shape)]),
            torch.cat([self.slots, slots]),
        )


def attach(nodes: Nodes, starts: Starts, reading: Reading, shape: Shape) -> tuple[Nodes, Tensor]:
    """Hangs a block below its starts: the greedy tokens as a chain, and at each slot alternatives to its token.

    The bucket of a slot says how many candidates it has, the chain's token included; the first slot that gives up (0
    candidates) ends branching for itself and the rest of its block, but not the chain. Below the root the first slot
    has `beam_width` candidates whatever its bucket. Algorithm 2, lines 6 to 8; the chain and the beam as published.

    Returns:
        nodes, and the score of each new node as a start of the next block, [batch, new] float32, -inf where it is
        none. Starts are all alternatives, the chain's token at every slot that branches, and its last token unless
        the rank head gives up: in the first block at the first slot that is not of the best bucket, later at any slot.
    """
    batch, num_starts, slots, width = reading.token_ids.shape
    device = reading.token_ids.device
    first = nodes.count == 1
    widths = shape.branching[reading.classes]
    gives_up = widths == 0
    if first and shape.beam_width is not None:
        widths[:, :, 0] = shape.beam_width
    branches = (widths > 0).cumprod(-1) > 0

    chain_scores = starts.scores.unsqueeze(-1) + reading.logprobs[..., 0].cumsum(-1)
    above_scores = torch.cat([starts.scores.unsqueeze(-1), chain_scores[..., :-1]], -1)
    rank = torch.arange(1, width, device=device)
    used = branches.unsqueeze(-1) & (rank < widths.unsqueeze(-1))
    other_scores = (above_scores.unsqueeze(-1) + reading.logprobs[..., 1:]).where(used, -torch.inf)

    chain = nodes.count + torch.arange(num_starts * slots, device=device).view(num_starts, slots)
    above = torch.cat([starts.nodes.unsqueeze(-1), chain[:, :-1].expand(batch, -1, -1)], -1)
    slot = torch.arange(slots, device=device).repeat(num_starts)

    def both(of_chain: Tensor, of_others: Tensor) -> Tensor:
        return torch.cat([of_chain.flatten(1), of_others.expand(batch, num_starts, slots, width - 1).flatten(1)], 1)

    nodes = nodes.add(
        both(reading.token_ids[..., 0], reading.token_ids[..., 1:]),
        both(above, above.unsqueeze(-1)),
        both(chain_scores, other_scores),
        both(reading.classes, reading.classes.unsqueeze(-1)),
        torch.cat([slot, slot.repeat_interleave(width - 1)]),
    )
    if first:
        unsure = (reading.classes > 0).int().argmax(-1, keepdim=True)
        goes_on = ~gives_up.gather(-1, unsure).squeeze(-1)
    else:
        goes_on = ~gives_up.any(-1)
    starts_from = branches.clone()
    starts_from[..., -1] |= goes_on
    return nodes, both(chain_scores.where(starts_from, -torch.inf), other_scores)


def choose_starts(nodes: Nodes, starts: Starts, as_starts: Tensor, shape: Shape, slots: int) -> Starts:
    """The likeliest of the nodes just attached from which the next block starts.

    Args:
        nodes: all nodes, the new ones last.
        starts: those of the block that was just attached.
        as_starts: from `attach`.
        shape: of the tree.
        slots: K.
    """
    batch, new = as_starts.shape
    device = as_starts.device
    block = int(nodes.count > new + 1)  # 0 after the first block
    # Of more starts than the budget none but the likeliest `tree_budget` can have a place in the tree.
    most = min(new, shape.tree_budget, shape.max_starts or new)
    scores, picked = as_starts.sort(dim=1, descending=True, stable=True)
    if block > 0 and shape.beam_width is not None:
        most = min(most, shape.beam_width)
        room = shape.tree_budget - (nodes.scores > -torch.inf).sum(1, keepdim=True) + 1
        limit = (room // slots).clamp(min=1)
        scores = scores.masked_fill(torch.arange(new, device=device) >= limit, -torch.inf)
    if device.type == "cpu":
        most = min(most, max(1, int((scores > -torch.inf).sum(1).max())))
    scores, picked = scores[:, :most], picked[:, :most]

    # Where each new node was drafted: chains of all starts come first, then the alternatives.
    in_chain = starts.nodes.shape[1] * slots
    others = (new - in_chain) // in_chain
    source = torch.arange(in_chain, device=device)
    source = torch.cat([source, source.repeat_interleave(others)])[picked]
    leaf, slot = source // slots, source % slots
    if block == 0:
        first_seen, held_seen = slot + 1, starts.held_seen.expand(batch, most, 0)
    else:
        first_seen = starts.first_seen.gather(1, leaf)
        held = starts.held_seen.gather(1, leaf.unsqueeze(-1).expand(-1, -1, starts.held_seen.shape[-1]))
        entry = torch.arange(in_chain, device=device)
        own = (entry // slots == leaf.unsqueeze(-1)) & (entry % slots <= slot.unsqueeze(-1))
        held_seen = torch.cat([held, own], -1)
    return Starts(
        nodes.count - new + picked, scores, starts.depths.gather(1, leaf) + slot + 1, first_seen, held_seen, source
    )


def cut(nodes: Nodes, tree_budget: int, max_depth: int, *, merge: bool, finite: Tensor) -> tuple[DraftTree, Tensor]:
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
    batch, count = nodes.token_ids.shape
    device = nodes.token_ids.device
    scores = nodes.scores.clone()
    scores[:, 0] = torch.inf
    # Merging makes room for further nodes: look at twice as many.
    wanted = min(count, 1 + tree_budget * (2 if merge else 1))
    scores, kept = scores.sort(dim=1, descending=True, stable=True)
    scores, kept = scores[:, :wanted], kept[:, :wanted]
    if device.type == "cpu":
        used = int((scores > -torch.inf).sum(1).max())
        scores, kept, wanted = scores[:, :used], kept[:, :used], used
    valid = scores > -torch.inf
    index = torch.arange(wanted, device=device).expand(batch, -1)
    place = torch.zeros(batch, count, dtype=torch.int64, device=device).scatter_(1, kept, index)
    parents = place.gather(1, nodes.parents.gather(1, kept).clamp(min=0)).where(valid, 0)
    token_ids = nodes.token_ids.gather(1, kept).where(valid, nodes.token_ids[:, :1])
    if merge:
        first = _first_of_path(token_ids, parents, max_depth)
        alone = valid & (first == index)
        order = (~alone).to(torch.int8).argsort(dim=1, stable=True)[:, : 1 + tree_budget]
        if device.type == "cpu":
            order = order[:, : int(alone.sum(1).max())]
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


@dataclass(frozen=True)
class Pending:
    """Committed positions that are not yet in the drafter's cache.

    Attributes:
        token_ids: [batch, new] int64.
        features: [batch, new, taps * target_hidden].
        position_ids: [batch, new] int64.
        valid: [batch, new] bool, or None for all True.
        counts: valid positions per row.
        last: [batch] int64, column of each row's last position.
    """

    token_ids: Tensor
    features: Tensor
    position_ids: Tensor
    valid: Tensor | None
    counts: list[int]
    last: Tensor


class SpecBlockGenerator(TreeCandidateGenerator):
    """Draft trees of one `generate` call.

    Args:
        drafter: the drafter; its options are read once.
        target: of the call.
    """

    drops_rows = True

    def __init__(self, drafter: SpecBlockDrafter, target: TargetModel) -> None:
        self.drafter = drafter
        self.embed_tokens = target.model.get_input_embeddings()
        self.slots = drafter.config.block_size
        self.num_blocks = drafter.num_blocks
        self.merge = drafter.merge_duplicates
        self.shape = Shape.of(drafter)
        self.cache: TreeCache | None = None
        self.pending: Pending | None = None
        self.drafted: tuple[Nodes, Tensor]  # all nodes of the latest round, and which of them are in the tree
        self.entered: tuple[Tensor, Tensor] | None = None  # feature and position that each row was last drafted from

    def observe(self, outcome: RoundOutcome) -> None:
        assert self.pending is None, "two outcomes without a draft between them"
        assert outcome.features is not None
        device = self.drafter.device
        counts = outcome.num_committed
        features = outcome.features.to(device=device, dtype=self.drafter.dtype)
        token_ids, position_ids = outcome.token_ids.to(device), outcome.position_ids.to(device)
        valid = None if outcome.valid is None else outcome.valid.to(device)
        if outcome.tree is None:  # left padding: every row ends in the last column
            last = torch.full((len(counts),), token_ids.shape[1] - 1, device=device)
        else:
            if min(counts) == 0:
                counts, features, position_ids, valid = self._repeat_waiting(counts, features, position_ids)
                if token_ids.shape[1] == 0:
                    token_ids = position_ids
            last = from_host(counts, device) - 1
        self.pending = Pending(token_ids, features, position_ids, valid, counts, last)

    def _repeat_waiting(
        self, counts: Sequence[int], features: Tensor, position_ids: Tensor
    ) -> tuple[list[int], Tensor, Tensor, Tensor]:
        """Rows that committed nothing are drafted from the same position again: it leaves the cache and comes back."""
        assert self.cache is not None
        assert self.entered is not None
        lengths = zip(self.cache.row_lengths, counts, strict=True)
        self.cache.rollback([length if count else length - self.slots for length, count in lengths])
        steps = max(1, *counts)
        waiting = from_host([count == 0 for count in counts], features.device)
        kept_features, kept_positions = self.entered
        # With all rows waiting the outcome has no column at all.
        features = features.clone() if features.shape[1] else kept_features.clone()
        position_ids = position_ids.clone() if position_ids.shape[1] else kept_positions.clone()
        features[:, :1] = kept_features.where(waiting[:, None, None], features[:, :1])
        position_ids[:, :1] = kept_positions.where(waiting[:, None], position_ids[:, :1])
        counts = [max(1, count) for count in counts]
        order = torch.arange(steps, device=features.device)
        return counts, features, position_ids, order < from_host(counts, features.device).unsqueeze(1)

    def keep_rows(self, rows: Sequence[int]) -> None:
        index = list(rows)
        if self.cache is not None:
            self.cache.keep_rows(rows)
        if self.entered is not None:
            self.entered = self.entered[0][index], self.entered[1][index]
        pending = self.pending
        if pending is not None:
            self.pending = Pending(
                pending.token_ids[index],
                pending.features[index],
                pending.position_ids[index],
                None if pending.valid is None else pending.valid[index],
                [pending.counts[row] for row in index],
                pending.last[index],
            )

    @torch.inference_mode()
    def draft(self, context: DraftContext) -> DraftTree:
        nodes, finite = self.grow(context)
        context.lap("draft")
        tree, kept = cut(nodes, self.shape.tree_budget, self.num_blocks * self.slots, merge=self.merge, finite=finite)
        tree = _on(tree, context.root_ids.device)
        context.lap("tree")
        self.drafted = nodes, kept
        return tree

    def describe(self, tree: DraftTree) -> NodeNotes:
        nodes, kept = self.drafted
        return path_notes(tree, nodes.scores.gather(1, kept), nodes.blocks[kept] + 1)

    def grow(self, context: DraftContext) -> tuple[Nodes, Tensor]:
        """Drafts M blocks; returns all nodes, and which rows [batch] have finite drafts."""
        device = self.drafter.device
        root_ids = context.root_ids.to(device)
        hidden, positions = self._enter(root_ids)
        batch = len(root_ids)
        zero = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        nothing = torch.empty(batch, 1, 0, dtype=torch.bool, device=device)
        starts = Starts(zero, zero.float(), zero, zero, nothing, zero)
        nodes = Nodes.root(root_ids)
        reading = self._read(hidden)
        finite = reading.finite
        nodes, as_starts = attach(nodes, starts, reading, self.shape)
        assert self.cache is not None
        for _ in range(1, self.num_blocks):
            starts = choose_starts(nodes, starts, as_starts, self.shape, self.slots)
            index = starts.sources.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            from_path = self.drafter.config.block_positions == "path"
            hidden = self.drafter.block_hidden(
                self.drafter.condition_of(hidden.flatten(1, 2).gather(1, index)),
                self._embed(nodes.token_ids.gather(1, starts.nodes)),
                positions + starts.depths if from_path else positions.expand_as(starts.depths),
                from_target=False,
                mask=self._path_mask(starts),
                cache=self.cache,
            )
            self.cache.hold(hidden.shape[1] * self.slots)
            reading = self._read(hidden)
            finite = finite & reading.finite
            nodes, as_starts = attach(nodes, starts, reading, self.shape)
        self.cache.rollback(self.cache.row_lengths)  # only committed positions stay
        return replace(nodes, scores=nodes.scores.where(finite.unsqueeze(1), -torch.inf)), finite

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded = self.embed_tokens(token_ids.to(self.embed_tokens.weight.device))
        return embedded.to(device=self.drafter.device, dtype=self.drafter.dtype)

    def _read(self, hidden: Tensor) -> Reading:
        logits, rank_logits = self.drafter.heads(hidden)
        best, draft_ids = logits.topk(self.shape.width, dim=-1)
        logprobs = best - logits.logsumexp(-1, keepdim=True)
        finite = logprobs[..., 0].isfinite().flatten(1).all(1)
        return Reading(
            self.drafter.target_ids(draft_ids),
            logprobs.where(finite[:, None, None, None], -torch.inf),
            rank_logits.argmax(-1),
            finite,
        )

    def _enter(self, root_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Brings pending positions into the cache, the last one as the round's first block.

        Returns:
            hidden [batch, 1, slots, hidden] of that block, and its rotary position [batch, 1].
        """
        pending = self.pending
        assert pending is not None, "draft() before the prefill was observed"
        config = self.drafter.config
        batch, new = pending.position_ids.shape
        if self.cache is None:
            self.cache = TreeCache.empty(
                config.num_hidden_layers, batch, config.num_key_value_heads, config.head_dim,
                dtype=self.drafter.dtype, device=self.drafter.device, capacity=(new + 256) * self.slots,
            )  # fmt: skip
        last = pending.last.unsqueeze(1)
        # A position's feature goes with the token after it; the last one's is the root.
        following = torch.cat([pending.token_ids[:, 1:], pending.token_ids[:, -1:]], 1)
        following = following.scatter(1, last, root_ids[:, None])
        for start in range(0, new, PROMPT_CHUNK):
            part = slice(start, start + PROMPT_CHUNK)
            valid = None if pending.valid is None else pending.valid[:, part]
            length = min(PROMPT_CHUNK, new - start)
            self.cache.reserve(length * self.slots)
            hidden = self.drafter.block_hidden(
                pending.features[:, part],
                self._embed(following[:, part]),
                pending.position_ids[:, part] + 1,
                from_target=True,
                mask=self._causal_mask(valid, length),
                cache=self.cache,
            )
            if valid is None:
                self.cache.commit_first([length * self.slots] * batch)
            else:
                counts = pending.counts if new <= PROMPT_CHUNK else valid.sum(1).tolist()
                # Padding may be in front (a prompt's) or behind (a round's): keep the rest, in order.
                order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
                entries = order.unsqueeze(-1) * self.slots + torch.arange(self.slots, device=order.device)
                self.cache.commit(entries.flatten(1), [count * self.slots for count in counts])
        self.pending = None
        features = pending.features.gather(1, last.unsqueeze(-1).expand(-1, -1, pending.features.shape[-1]))
        positions = pending.position_ids.gather(1, last)
        self.entered = features, positions
        if new > PROMPT_CHUNK:
            last = last - start
        index = last[:, :, None, None].expand(-1, 1, *hidden.shape[2:])
        later = [min(self._most_starts(block), self.shape.tree_budget) for block in range(1, self.num_blocks)]
        self.cache.reserve(sum(later) * self.slots)
        return hidden.gather(1, index), positions + 1

    def _most_starts(self, block: int) -> int:
        limits = [self.shape.tree_budget]
        if self.shape.max_starts is not None:
            limits.append(self.shape.max_starts)
        if block > 1 and self.shape.beam_width is not None:
            limits.append(self.shape.beam_width)
        return min(limits)

    def _causal_mask(self, valid: Tensor | None, new: int) -> Tensor | None:
        """For positions that enter: all slots of earlier positions, and own slots up to itself (Figure 3)."""
        cache = self.cache
        assert cache is not None
        stored, device = cache.longest, self.drafter.device
        even = min(cache.row_lengths) == stored
        if stored == 0 and valid is None:
            return None
        order = torch.arange(new * self.slots, device=device)
        own = order.unsqueeze(1) >= order
        if even and valid is None:
            past = own.new_ones(new * self.slots, stored)
            return torch.cat([past, own], 1)[None, None]
        past = torch.arange(stored, device=device) < cache.lengths.unsqueeze(1)
        past = past.unsqueeze(1).expand(-1, new * self.slots, -1)
        own = own.expand(cache.batch, -1, -1)
        if valid is not None:
            # Padding sees itself, so that no row of the mask is empty; nothing else sees it.
            keys = valid.repeat_interleave(self.slots, 1).unsqueeze(1)
            own = (own & keys) | (order.unsqueeze(1) == order)
        return torch.cat([past, own], -1).unsqueeze(1)

    def _path_mask(self, starts: Starts) -> Tensor:
        """For a later block: the committed prefix, what is on the start's path, and own slots up to itself (Figure 3).

        [batch, 1, starts * slots, entries] bool.
        """
        cache = self.cache
        assert cache is not None
        device, count = self.drafter.device, starts.nodes.shape[1]
        # The position that was drafted from is each row's last; of its K entries only those on the path are seen.
        until = (cache.lengths - self.slots).unsqueeze(1) + starts.first_seen
        prefix = torch.arange(cache.longest, device=device) < until.unsqueeze(-1)
        earlier = torch.cat([prefix, starts.held_seen], -1).repeat_interleave(self.slots, 1)
        order = torch.arange(count * self.slots, device=device)
        leaf = order // self.slots
        own = (leaf.unsqueeze(1) == leaf) & (order.unsqueeze(1) >= order)
        return torch.cat([earlier, own.expand(cache.batch, -1, -1)], -1).unsqueeze(1)


def _on(tree: DraftTree, device: torch.device) -> DraftTree:
    """The tree on the target's device."""
    if tree.token_ids.device == device:
        return tree
    names = ("token_ids", "parents", "depths", "ancestor_mask", "valid", "finite", "path_logprobs")
    return replace(tree, **{name: getattr(tree, name).to(device) for name in names})
