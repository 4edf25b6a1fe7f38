"""SpecBlock in one `generate` call: the tree, the drafter's cache, and the M forwards of a round.

The first forward of a round appends the positions committed since the last one to the cache, K entries each, and drafts
from the last of them. Every later forward drafts from all selected nodes of the previous block together.

The functions on the tree (the nodes that a block adds, the starts of the next block, the cut to the budget) are pure,
of static shape, without a host sync and without a loop over nodes. Nodes of a block are numbered by start, slot and
rank. Rank 0 is the greedy token of a slot; the nodes of rank 0 of a start form its chain.

Source: SpecBlock, Section 3.2, Figure 3 and Algorithm 2; the chain and the beam as in the published code. The network
is in `modeling.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_specdec.decoding.devices import abilities, in_inference_mode
from hf_specdec.decoding.exchange import DraftContext, NodeNotes, path_notes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import home_of
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.growth import TREE_TENSORS
from hf_specdec.drafting.reader import CommittedReader, NewTokens


@dataclass(frozen=True)
class Shape:
    """The drafting options that determine a tree, as numbers and tensors.

    Attributes:
        branching: [classes] int64, candidates by bucket.
        width: most candidates of any slot.
        slots: K.
        beam_width: see `SpecBlockOptions`.
        max_starts: see `SpecBlockOptions`.
        tree_budget: see `SpecBlockOptions`.
        index: [many] int64: 0, 1, 2, ...
    """

    branching: Tensor
    width: int
    slots: int
    beam_width: int | None
    max_starts: int | None
    tree_budget: int
    index: Tensor

    @classmethod
    def of(cls, drafter: Any) -> Shape:
        options = drafter.options
        width = min(max(1, *options.branching, options.beam_width or 1), drafter.config.draft_vocab_size)
        slots = drafter.config.block_size
        branching = torch.tensor(options.branching, device=drafter.device)
        index = torch.arange(max(2, options.node_limit) * slots * width, device=drafter.device)
        return cls(branching, width, slots, options.beam_width, options.max_starts, options.node_limit, index)

    def most_starts(self, block: int) -> int:
        """Most starts of a block: the root for the first one, then the likeliest nodes of the previous block."""
        # Only the likeliest `tree_budget` starts can be in the tree.
        limits = [self.tree_budget, self.max_starts, self.beam_width if block > 1 else None]
        return min(limit for limit in limits if limit is not None) if block > 0 else 1


@dataclass(frozen=True)
class Starts:
    """The starts of a block.

    Attributes:
        nodes: [batch, starts] int64, index among `Nodes`.
        scores: [batch, starts] float32, log-probability of the path to it; -inf if a row has fewer starts.
        depths: [batch, starts] int64, of the node.
        first_on_path: [batch, starts] int64, slots of the round's first block that are on the path.
        later_on_path: [batch, starts, entries] bool, which cache entries of the later blocks are on the path.
        sources: [batch, starts] int64, slot of the previous block, counted over all its starts.
    """

    nodes: Tensor
    scores: Tensor
    depths: Tensor
    first_on_path: Tensor
    later_on_path: Tensor
    sources: Tensor

    @classmethod
    def root(cls, batch: int, device: torch.device) -> Starts:
        """The start of a round's first block."""
        zeros = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        later_on_path = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)
        return cls(zeros, torch.zeros(batch, 1, device=device), zeros, zeros, later_on_path, zeros)

    def first(self, count: int) -> Starts:
        """The first `count` of each row, which are the likeliest."""
        return Starts(*(part[:, :count] for part in vars(self).values()))


@dataclass(frozen=True)
class HeadOutput:
    """The outputs of the heads for a block.

    Attributes:
        token_ids: [batch, starts, slots, width] int64, the likeliest tokens in order, as target ids.
        logprobs: [batch, starts, slots, width] float32, normalised over the complete draft vocabulary.
        classes: [batch, starts, slots] int64, predicted buckets.
        finite: [batch] bool, False if a row's logits are NaN or infinite; its `logprobs` are then -inf.
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
        scores: [batch, nodes] float32, log-probability of the path under the drafter; -inf for unused nodes.
        above: [batch, states] int64, the parent of the candidates of a state. A state is a slot of a start of a block,
            numbered over all blocks; node n is a candidate of state (n - 1) // width.
        starts: their number in each block so far.
        shape: of the tree.
    """

    token_ids: Tensor
    scores: Tensor
    above: Tensor
    starts: tuple[int, ...]
    shape: Shape

    @classmethod
    def root(cls, root_ids: Tensor, shape: Shape) -> Nodes:
        ids = root_ids.unsqueeze(1)
        return cls(ids, torch.zeros(ids.shape, device=ids.device), ids[:, :0], (), shape)

    @property
    def count(self) -> int:
        return int(self.token_ids.shape[1])

    def forwards(self, numbers: Tensor) -> Tensor:
        """The number of the round's forward that drafted each of some nodes, any shape, from 1; 0 for the root."""
        states = (numbers - 1) // self.shape.width
        made, ends = (states >= 0).long(), 0
        for starts in self.starts[:-1]:
            ends += starts * self.shape.slots
            made = made + (states >= ends)
        return made


def attach(nodes: Nodes, starts: Starts, output: HeadOutput) -> tuple[Nodes, Tensor]:
    """Adds a block's nodes below its starts: the greedy tokens as a chain, and alternatives at each slot.

    The bucket of a slot determines its number of candidates, the chain's token included. The first slot with 0
    candidates ends branching for itself and the rest of its block, but not the chain. Below the root the first slot
    always has `beam_width` candidates. Algorithm 2, lines 6 to 8; the chain and the beam as in the published code.

    Returns:
        nodes, and the score of each new node as a start of the next block, [batch, new] float32, -inf for no start.
        Starts are all alternatives, the chain's token at every slot that branches, and the chain's last token unless a
        bucket has 0 candidates: in the first block at the first slot that is not of the best bucket, later at any slot.
    """
    shape, first = nodes.shape, nodes.count == 1
    batch, num_starts, slots, width = output.token_ids.shape
    widths = shape.branching[output.classes]
    ends = widths == 0
    if first and shape.beam_width is not None:
        widths[:, :, 0] = shape.beam_width
    branches = (widths > 0).cumprod(-1) > 0

    above = starts.scores[..., None]
    chain_scores = above + output.logprobs[..., 0].cumsum(-1)
    above_scores = torch.cat([above, chain_scores[..., :-1]], -1)
    used = branches[..., None] & (shape.index[:width] < widths[..., None])
    used[..., 0] = True
    scores = (above_scores[..., None] + output.logprobs).where(used, -torch.inf)

    chain = nodes.count + width * shape.index[: num_starts * slots].view(num_starts, slots)
    parents = torch.cat([starts.nodes[..., None], chain[:, :-1].expand(batch, -1, -1)], -1)

    if first:
        unsure = (output.classes > 0).int().argmax(-1, keepdim=True)
        continues = ~ends.gather(-1, unsure)[..., 0]
    else:
        continues = ~ends.any(-1)
    used[..., 0] = branches
    used[..., -1, 0] |= continues
    start_scores = scores.where(used, -torch.inf)

    return Nodes(
        torch.cat([nodes.token_ids, output.token_ids.flatten(1)], 1),
        torch.cat([nodes.scores, scores.flatten(1)], 1),
        torch.cat([nodes.above, parents.flatten(1)], 1),
        (*nodes.starts, num_starts),
        shape,
    ), start_scores.flatten(1)


def choose_starts(nodes: Nodes, starts: Starts, start_scores: Tensor) -> Starts:
    """Selects the likeliest new nodes as starts of the next block.

    Args:
        nodes: all nodes, the new ones last.
        starts: of the block that was just attached.
        start_scores: from `attach`.
    """
    shape, slots, width = nodes.shape, nodes.shape.slots, nodes.shape.width
    new = start_scores.shape[1]
    block = len(nodes.starts)  # the next one
    most = min(new, shape.most_starts(block))
    scores, chosen = start_scores.sort(dim=1, descending=True, stable=True)
    scores, chosen = scores[:, :most], chosen[:, :most]
    if block > 1 and shape.beam_width is not None:
        remaining = shape.tree_budget - (nodes.scores > -torch.inf).sum(1, keepdim=True) + 1
        limit = (remaining // slots).clamp(min=1)
        scores = scores.where(shape.index[:most] < limit, -torch.inf)

    source = chosen // width
    leaf, slot = source // slots, source % slots
    if block == 1:
        first_on_path, later_on_path = slot + 1, chosen.new_zeros(*chosen.shape, 0, dtype=torch.bool)
    else:
        first_on_path = starts.first_on_path.gather(1, leaf)
        earlier = starts.later_on_path.gather(1, leaf[..., None].expand(-1, -1, starts.later_on_path.shape[-1]))
        entry = shape.index[: starts.nodes.shape[1] * slots]
        own = (entry // slots == leaf[..., None]) & (entry % slots <= slot[..., None])
        later_on_path = torch.cat([earlier, own], -1)
    depths = starts.depths.gather(1, leaf) + slot + 1
    return Starts(nodes.count - new + chosen, scores, depths, first_on_path, later_on_path, source)


def cut(nodes: Nodes, tree_budget: int, max_depth: int, *, merge: bool, finite: Tensor) -> tuple[DraftTree, Tensor]:
    """The likeliest `tree_budget` nodes as a tree, in order of probability.

    A node is never likelier than its parent and comes after it, so the selected nodes form a tree.

    Args:
        nodes: all nodes.
        tree_budget: most nodes, root not counted.
        max_depth: of the nodes.
        merge: whether a path that was drafted twice becomes one, with the children of both.
        finite: [batch] bool, see `DraftTree.finite`.

    Returns:
        The tree, and the indices of its nodes in `nodes`, [batch, nodes] int64.
    """
    # Candidates of one state differ, so that only a later block can repeat a path.
    merge = merge and len(nodes.starts) > 1
    batch, count = nodes.token_ids.shape
    device = nodes.token_ids.device
    scores = nodes.scores.clone()
    scores[:, 0] = torch.inf
    # Merging leaves budget for further nodes: consider twice as many.
    wanted = min(count, 1 + tree_budget * (2 if merge else 1))
    scores, selected = scores.sort(dim=1, descending=True, stable=True)
    scores, selected = scores[:, :wanted], selected[:, :wanted]
    valid = scores > -torch.inf
    index = torch.arange(wanted, device=device).expand(batch, -1)
    rank = torch.zeros(batch, count, dtype=torch.int64, device=device).scatter_(1, selected, index)
    states = (selected - 1).clamp(min=0) // nodes.shape.width
    parents = rank.gather(1, nodes.above.gather(1, states)).where(valid, 0)
    token_ids = nodes.token_ids.gather(1, selected).where(valid, nodes.token_ids[:, :1])
    if merge:
        first = _first_of_path(token_ids, parents, max_depth)
        unique = valid & (first == index)
        order = (~unique).to(torch.int8).argsort(dim=1, stable=True)[:, : 1 + tree_budget]
        valid = unique.gather(1, order)
        rank = torch.zeros_like(first).scatter_(1, order, index[:, : order.shape[1]])
        parents = rank.gather(1, first.gather(1, parents.gather(1, order))).where(valid, 0)
        token_ids = token_ids.gather(1, order).where(valid, token_ids[:, :1])
        selected = selected.gather(1, order)
    parents = parents.clone()
    parents[:, 0] = -1
    path_logprobs = nodes.scores.gather(1, selected).where(valid, -torch.inf)
    tree = DraftTree.from_parents(
        token_ids, parents, max_depth, valid=valid, finite=finite, path_logprobs=path_logprobs
    )
    return tree, selected


def _first_of_path(token_ids: Tensor, parents: Tensor, max_depth: int) -> Tensor:
    """[batch, nodes]: the first node with the same path; parents are 0 at the root."""
    tokens = token_ids.clone()
    tokens[:, 0] = -1  # not a token id: paths of different lengths must differ
    same = torch.ones((), dtype=torch.bool, device=token_ids.device)
    at = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(parents)
    nodes = at
    for _ in range(max_depth):
        here = tokens.gather(1, at)
        same = same & (here.unsqueeze(-1) == here.unsqueeze(1))
        at = parents.gather(1, at)
    return nodes.unsqueeze(1).where(same, token_ids.shape[1]).amin(-1)


class SpecBlockGenerator(CommittedReader, TreeCandidateGenerator):
    """Draft trees of one `generate` call.

    Args:
        drafter: a `SpecBlockDrafter`; its options are read once.
        target: of the call.

    Attributes:
        prompt_chunk: positions of a prompt per forward. It limits the size of the attention mask, because K slots of
            each position attend to K entries of all earlier ones.
    """

    prompt_chunk = 1024

    def __init__(self, drafter: Any, target: TargetModel) -> None:
        config, options = drafter.config, drafter.options
        self.embed_tokens = target.model.get_input_embeddings()
        self.home = home_of(self.embed_tokens)
        self.slots, self.num_blocks, self.merge = config.block_size, options.num_blocks, options.merge_duplicates
        self.shape = Shape.of(drafter)
        super().__init__(
            drafter,
            target,
            (config.num_hidden_layers, config.num_key_value_heads, config.head_dim, None, None),
            borrowed=(self.embed_tokens,),
            most=self.num_blocks * self.slots + 1,
            room=sum(map(self.shape.most_starts, range(1, self.num_blocks))) * self.slots,
            entries=self.slots,
            compile_mode=options.compile_mode,
        )
        # In host memory the number of used nodes can be read without a sync, and unused ones are dropped.
        self.drops_unused = abilities(self.device).host_memory and self.calls is None
        self.hidden: list[Tensor] = []  # of the latest tree, per block [batch, starts, slots, hidden]
        self.tree: tuple[DraftTree, Nodes, Tensor]  # the latest, with all drafted nodes, and the selected ones

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        root_ids, shape = context.root_ids.to(self.device), self.shape
        self.read_committed(root_ids)
        parts = self.run(
            _drafted, root_ids, self.cache.lengths, *self.last, shape.branching[None], shape.index[None],
            # Options that change shapes or operations; all others are tensor values.
            key=(self.num_blocks, self.merge, shape.width, shape.beam_width, shape.max_starts, shape.tree_budget),
        )  # fmt: skip
        context.lap("draft")
        selected, token_ids, scores, above, *self.hidden = parts[len(TREE_TENSORS) :]
        made: Any = dict(zip(TREE_TENSORS, parts, strict=False)) | {"max_depth": self.num_blocks * self.slots}
        tree = DraftTree(**made)
        if self.drops_unused:
            tree = tree.first_nodes(int(tree.valid.nonzero()[:, 1].max()))  # up to the last valid node of any row
        self.tree = tree, Nodes(token_ids, scores, above, tuple(part.shape[1] for part in self.hidden), shape), selected
        context.lap("tree")
        return tree

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        _, nodes, selected = self.tree
        return path_notes(tree, nodes.forwards(selected)[:, : tree.num_nodes])

    def read_committed(self, root_ids: Tensor) -> None:
        """Reads the pending positions; `last` are then states and position of each row's start, see `_committed`."""
        pending = self.take_pending()
        most = self.prompt_chunk if self.calls is None else max(self.prompt_chunk, self.width)
        new = pending.token_ids.shape[1]
        for start in range(0, new, most):
            part, following, stop = pending, root_ids, start + most
            if new > most:
                part = pending.columns(start, stop)
            if stop < new:
                following = pending.token_ids[:, stop].where(pending.counts.tensor > stop, root_ids)
            self.last = self.read(_committed, following, *self.last, pending=part)

    def blocks(
        self, at: int, root_ids: Tensor, lengths: Tensor, hidden: Tensor, positions: Tensor, shape: Shape
    ) -> tuple[list[Tensor], Nodes, Tensor]:
        """All blocks after the first one.

        Args:
            at: where their entries begin in the cache, after the committed ones.
            root_ids: [batch] int64.
            lengths: [batch] int64, committed entries of each row.
            hidden: [batch, 1, slots, hidden], of the first block.
            positions: [batch, 1] int64, its rotary position.
            shape: of the tree.

        Returns:
            The states of all blocks, [batch, starts, slots, hidden] each, all nodes, and which rows [batch] are finite.
        """
        drafter, cache = self.drafter, self.cache
        states, num_entries = [hidden], 0
        nodes = Nodes.root(root_ids, shape)
        starts = Starts.root(len(root_ids), root_ids.device)
        output = self._read_heads(hidden)
        finite = output.finite
        nodes, start_scores = attach(nodes, starts, output)
        for _ in range(1, self.num_blocks):
            starts = choose_starts(nodes, starts, start_scores)
            if self.drops_unused:
                starts = starts.first(max(1, int((starts.scores > -torch.inf).sum(1).max())))
            sources = starts.sources.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            conditions = hidden.flatten(1, 2).gather(1, sources)
            on_path = drafter.config.block_positions == "path"
            with cache.writing_after(num_entries):
                hidden = drafter.block_hidden(
                    drafter.condition_of(conditions),
                    self.embed(nodes.token_ids.gather(1, starts.nodes)),
                    positions + starts.depths if on_path else positions.expand_as(starts.depths),
                    from_target=False,
                    mask=self.path_mask(starts, at, lengths),
                    cache=cache,
                )
            states.append(hidden)
            num_entries += hidden.shape[1] * self.slots
            output = self._read_heads(hidden)
            finite = finite & output.finite
            nodes, start_scores = attach(nodes, starts, output)
        return states, replace(nodes, scores=nodes.scores.where(finite.unsqueeze(1), -torch.inf)), finite

    def draft_states(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The states, before the final norm, from which the children of some nodes of the latest tree were predicted.

        Args:
            nodes: [batch, count] int64.

        Returns:
            states [batch, count, hidden], arbitrary for a node without children, and which nodes have children,
            [batch, count] bool.
        """
        tree, drafted, selected = self.tree
        parents, valid, above = (part.to(self.device) for part in (tree.parents, tree.valid, nodes))
        below = (parents[:, None] == above[..., None]) & valid[:, None]
        child = below.int().argmax(-1)
        # Node n of all drafted ones is a candidate of state (n - 1) // width.
        index = (selected.gather(1, child) - 1).clamp(min=0) // drafted.shape.width
        states = [hidden.flatten(1, 2) for hidden in self.hidden]
        every = states[0] if len(states) == 1 else torch.cat(states, 1)
        found = every.gather(1, index.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
        return found, below.any(-1)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[batch, starts] -> [batch, starts, hidden] of the drafter's dtype, on its device."""
        embedded = self.embed_tokens(token_ids.to(self.home))
        return embedded.to(device=self.device, dtype=self.dtype)

    def _read_heads(self, hidden: Tensor) -> HeadOutput:
        logits, rank_logits = self.drafter.heads(hidden)
        best, draft_ids = logits.topk(min(self.shape.width, logits.shape[-1]), dim=-1)
        logprobs = best - logits.logsumexp(-1, keepdim=True)
        finite = logprobs[..., 0].isfinite().flatten(1).all(1)
        return HeadOutput(
            self.drafter.to_target_ids(draft_ids),
            logprobs.where(finite[:, None, None, None], -torch.inf),
            rank_logits.argmax(-1),
            finite,
        )

    def path_mask(self, starts: Starts, at: int, lengths: Tensor) -> Tensor:
        """For a later block: the committed prefix, the start's path, and earlier slots of the same start (Figure 3).

        [batch, 1, starts * slots, entries] bool.
        """
        # A row's last committed position is the first block's start; of its K entries only those on the path count.
        until = (lengths - self.slots).unsqueeze(1) + starts.first_on_path
        prefix = torch.arange(at, device=self.device) < until.unsqueeze(-1)
        earlier = torch.cat([prefix, starts.later_on_path], -1).repeat_interleave(self.slots, 1)
        order = torch.arange(starts.nodes.shape[1] * self.slots, device=self.device)
        leaf = order // self.slots
        own = (leaf.unsqueeze(1) == leaf) & (order.unsqueeze(1) >= order)
        return torch.cat([earlier, own.expand(len(lengths), -1, -1)], -1).unsqueeze(1)


def _committed(
    generator: SpecBlockGenerator, new: NewTokens, root_ids: Tensor, *before: Tensor
) -> tuple[Tensor, Tensor]:
    """Reads committed positions; the last one of each row is the start of the round's first block.

    Returns:
        States [batch, 1, slots, hidden] of that block, and its rotary position [batch, 1]; `before` are those of the
        last forward, for rows without new positions.
    """
    seen = new.causal_mask(generator.slots)  # all slots of earlier positions, earlier slots of the same one (Figure 3)
    hidden = generator.drafter.block_hidden(
        new.features,
        # The input is a position's feature with the next token; after the last position this is the root.
        generator.embed(new.following(root_ids)),
        new.position_ids + 1,
        from_target=True,
        mask=None if seen is None else seen.unsqueeze(1),
        cache=generator.cache,
    )
    last_hidden, last_positions = before or (None, None)
    return new.at_last(hidden, last_hidden), new.at_last(new.position_ids + 1, last_positions)


def _drafted(
    at: int,
    generator: SpecBlockGenerator,
    root_ids: Tensor,
    lengths: Tensor,
    hidden: Tensor,
    positions: Tensor,
    branching: Tensor,
    index: Tensor,
) -> tuple[Tensor, ...]:
    """The tree, which nodes it selected, all nodes, and the states of all blocks, as `draft` reads them.

    Args:
        at: where the round's entries begin in the cache.
        generator: of the call.
        root_ids: [batch] int64.
        lengths: [batch] int64, committed entries of each row.
        hidden: [batch, 1, slots, hidden], of the first block.
        positions: [batch, 1] int64, its rotary position.
        branching: [1, classes] int64, of the tree's shape, as an argument because options may change after capture.
        index: [1, many] int64, of the tree's shape.
    """
    shape = replace(generator.shape, branching=branching[0], index=index[0])
    states, nodes, finite = generator.blocks(at, root_ids, lengths, hidden, positions, shape)
    depth = generator.num_blocks * generator.slots
    tree, selected = cut(nodes, shape.tree_budget, depth, merge=generator.merge, finite=finite)
    parts = [getattr(tree, name) for name in TREE_TENSORS]
    return (*parts, selected, nodes.token_ids, nodes.scores, nodes.above, *states)
