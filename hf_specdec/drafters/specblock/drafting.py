"""SpecBlock in one `generate` call: the tree, the drafter's cache, and the M forwards of a round.

The first forward of a round appends the positions committed since the last one to the cache, K entries each, and drafts
from the last of them. Every later forward drafts from all selected nodes of the previous block together. On a GPU the
two steps, `entered` and `drafted`, are captured launches (`decoding/graphs.py`) with the cache's length rounded up to a
bucket; besides their arguments they read only the cache, whose buffers stay in place.

The functions on the tree (the nodes that a block adds, the starts of the next block, the cut to the budget) are pure,
of static shape, without a host sync and without a loop over nodes. Nodes of a block are numbered by start, slot and
rank. Rank 0 is the greedy token of a slot; the nodes of rank 0 of a start form its chain.

Source: SpecBlock, Section 3.2, Figure 3 and Algorithm 2; the chain and the beam as in the published code. The network
is in `modeling.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.devices import abilities, in_inference_mode
from hf_specdec.decoding.exchange import NodeNotes
from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.graphs import StaticCalls, nodes_bucket, prefix_bucket, static_calls
from hf_specdec.decoding.modules import home_of
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.static_verify import capacity_for
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafters.growth import path_notes
from hf_specdec.drafters.specblock.modeling import SpecBlockDrafter

TREE = ("token_ids", "parents", "depths", "ancestor_mask", "valid", "finite", "path_logprobs")


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
    def of(cls, drafter: SpecBlockDrafter) -> Shape:
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

    def place_of(self, node: int) -> tuple[int, int]:
        """The block that drafted a node other than the root, and the slot there, counted over all its starts."""
        state = (node - 1) // self.shape.width
        for block, starts in enumerate(self.starts):
            if state < starts * self.shape.slots:
                return block, state
            state -= starts * self.shape.slots
        raise IndexError(node)


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


def only_finite(nodes: Nodes, finite: Tensor) -> Nodes:
    """The nodes, with only the root in rows whose logits are not finite."""
    return replace(nodes, scores=nodes.scores.where(finite.unsqueeze(1), -torch.inf))


class SpecBlockGenerator(TreeCandidateGenerator):
    """Draft trees of one `generate` call.

    Args:
        drafter: the drafter; its options are read once.
        target: of the call.

    Attributes:
        prompt_chunk: positions of a prompt per forward. It limits the size of the attention mask, because K slots of
            each position attend to K entries of all earlier ones.
    """

    drops_rows = True
    prompt_chunk = 1024

    def __init__(self, drafter: SpecBlockDrafter, target: TargetModel) -> None:
        self.drafter = drafter
        self.device, self.dtype = drafter.device, drafter.dtype  # transformers searches the parameters for each access
        self.embed_tokens = target.model.get_input_embeddings()
        self.home = home_of(self.embed_tokens)
        self.slots = drafter.config.block_size
        self.num_blocks = drafter.options.num_blocks
        self.merge = drafter.options.merge_duplicates
        self.calls = static_calls(self, drafter, (self.embed_tokens,), drafter.options.compile_mode)
        self.drafts_early = self.calls is not None
        # In host memory the number of used nodes can be read without a sync, and unused ones are dropped.
        self.drops_unused = abilities(self.device).host_memory and self.calls is None
        self.width = nodes_bucket(self.num_blocks * self.slots + 1)  # most tokens that a round commits
        self.target = target  # the capacity of its cache limits the length of rows
        self.shape = Shape.of(drafter)
        self.cache: TreeCache | None = None
        self.pending: Committed | None = None  # positions that are not yet in the cache
        # States [batch, 1, slots, hidden] and position [batch, 1] of each row's first block in the latest round.
        self.first_block: tuple[Tensor, Tensor] | None = None
        self._own_masks: dict[int, Tensor] = {}  # by number of starts: a slot attends to itself and earlier own slots
        self.hidden: list[Tensor] = []  # of the latest tree, per block [batch, starts, slots, hidden]
        self.tree: tuple[DraftTree, Nodes, Tensor] | None = None  # with all drafted nodes, and the selected ones

    def observe(self, committed: Committed) -> None:
        self.pending = committed if self.pending is None else self.pending.followed_by(committed)

    def keep_rows(self, rows: Sequence[int]) -> None:
        index = from_host(rows, self.device)
        if self.cache is not None:
            self.cache.keep_rows(rows)
        if self.first_block is not None:
            self.first_block = self.first_block[0][index], self.first_block[1][index]
        self.pending = None if self.pending is None else self.pending.of_rows(rows)

    def _take_pending(self) -> Committed:
        """The tokens committed since the last draft, on the drafter's device, features in its dtype."""
        pending, device = self.pending, self.device
        assert pending is not None, "draft() before the prefill was observed"
        assert pending.features is not None
        self.pending = None
        return replace(
            pending,
            token_ids=pending.token_ids.to(device),
            features=pending.features.to(device=device, dtype=self.dtype),
            position_ids=pending.position_ids.to(device),
            valid=None if pending.valid is None else pending.valid.to(device),
            counts=pending.counts.to(device),
        )

    def close(self) -> None:
        if self.calls is not None:
            self.calls.workspace.release()

    @in_inference_mode
    def draft(self, context: DraftContext) -> DraftTree:
        if self.calls is not None:
            tree, nodes, selected = self._draft_captured(self.calls, context)
            context.lap("draft")
        else:
            nodes, finite = self.grow(context)
            context.lap("draft")
            depth = self.num_blocks * self.slots
            tree, selected = cut(nodes, self.shape.tree_budget, depth, merge=self.merge, finite=finite)
            if self.drops_unused:
                tree = tree.first_nodes(int(tree.valid.nonzero()[:, 1].max()))  # up to the last valid node of any row
        self.tree = tree, nodes, selected
        tree = _on(tree, context.root_ids.device)
        context.lap("tree")
        return tree

    def _draft_captured(self, calls: StaticCalls, context: DraftContext) -> tuple[DraftTree, Nodes, Tensor]:
        """`grow` and `cut` in two captured launches; the prompt is not captured."""
        root_ids = context.root_ids.to(self.device)
        hidden, positions = self._append_pending(root_ids, self._take_pending())
        assert self.cache is not None
        at = self._place(sum(self.shape.most_starts(block) for block in range(1, self.num_blocks)))
        # Options that change shapes or operations; all others are tensor values.
        options = (self.num_blocks, self.merge, self.shape.width, self.shape.beam_width, self.shape.max_starts)
        parts = calls(
            ("drafted", options, self.shape.tree_budget, at, self.cache.addresses), functools.partial(drafted, at),
            root_ids, self.cache.lengths, hidden, positions, self.shape.branching[None], self.shape.index[None],
        )  # fmt: skip
        self.cache.rollback()  # only committed positions remain
        # The tree, which nodes it selected, which rows are finite, all nodes, and the states of all blocks.
        tree, (selected, _, token_ids, scores, above, *states) = parts[: len(TREE)], parts[len(TREE) :]
        self.hidden = states
        starts = tuple(block.shape[1] for block in states)
        made: Any = dict(zip(TREE, tree, strict=True)) | {"max_depth": self.num_blocks * self.slots}
        return DraftTree(**made), Nodes(token_ids, scores, above, starts, self.shape), selected

    def _place(self, starts: int) -> int:
        """Reserves entries for `starts` starts; returns where they begin, in captured rounds equal within a bucket."""
        assert self.cache is not None
        at = self.cache.longest
        if self.calls is not None:
            at = prefix_bucket(at)
            self.cache.place_nodes(at)
        self.cache.reserve(starts * self.slots)
        return at

    def describe(self, tree: DraftTree) -> NodeNotes:
        assert self.tree is not None
        _, nodes, selected = self.tree
        return path_notes(tree, nodes.scores.gather(1, selected), nodes.forwards(selected))

    def grow(self, context: DraftContext) -> tuple[Nodes, Tensor]:
        """Drafts M blocks; returns all nodes, and which rows [batch] have finite logits."""
        root_ids = context.root_ids.to(self.device)
        hidden, positions = self._append_pending(root_ids, self._take_pending())
        assert self.cache is not None
        lengths = self.cache.lengths
        self.hidden, nodes, finite = self.blocks(self.cache.longest, root_ids, lengths, hidden, positions, self.shape)
        self.cache.rollback()  # only committed positions remain
        return nodes, finite

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
        config, cache = self.drafter.config, self.cache
        assert cache is not None
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
            with cache.writing_after(num_entries):
                hidden = self.drafter.block_hidden(
                    self.drafter.condition_of(conditions),
                    self._embed(nodes.token_ids.gather(1, starts.nodes)),
                    positions + starts.depths
                    if config.block_positions == "path"
                    else positions.expand_as(starts.depths),
                    from_target=False,
                    mask=self._path_mask(starts, at, lengths),
                    cache=cache,
                )
            states.append(hidden)
            num_entries += hidden.shape[1] * self.slots
            output = self._read_heads(hidden)
            finite = finite & output.finite
            nodes, start_scores = attach(nodes, starts, output)
        return states, only_finite(nodes, finite), finite

    def draft_states(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The states, before the final norm, from which the children of some nodes of the latest tree were predicted.

        Args:
            nodes: [batch, count] int64.

        Returns:
            states [batch, count, hidden], arbitrary for a node without children, and which nodes have children,
            [batch, count] bool.
        """
        assert self.tree is not None
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

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded = self.embed_tokens(token_ids.to(self.home))
        return embedded.to(device=self.device, dtype=self.dtype)

    def _read_heads(self, hidden: Tensor) -> HeadOutput:
        best, draft_ids, normaliser, rank_logits = self.drafter.ranked(hidden, self.shape.width)
        logprobs = best - normaliser
        finite = logprobs[..., 0].isfinite().flatten(1).all(1)
        return HeadOutput(
            self.drafter.target_ids(draft_ids),
            logprobs.where(finite[:, None, None, None], -torch.inf),
            rank_logits.argmax(-1),
            finite,
        )

    def _append_pending(self, root_ids: Tensor, pending: Committed) -> tuple[Tensor, Tensor]:
        """Appends pending positions to the cache; the last one of each row is the start of the round's first block.

        Returns:
            hidden [batch, 1, slots, hidden] of that block, and its rotary position [batch, 1].
        """
        batch, new = pending.position_ids.shape
        if self.cache is None:
            config, capacity = self.drafter.config, (new + 256) * self.slots
            if self.calls is not None:  # buffers with the target's capacity suffice for the whole call
                capacity = capacity_for(max(capacity, self.target.cache.capacity * self.slots))
            self.cache = TreeCache.empty(
                config.num_hidden_layers, batch, config.num_key_value_heads, config.head_dim, dtype=self.dtype,
                device=self.device, capacity=capacity, workspace=None if self.calls is None else self.calls.workspace,
            )  # fmt: skip
        if self.first_block is None or pending.tree is None or new > self.width:
            self.first_block = self._append_prompt(root_ids, pending)
        else:
            at = self._place(new if self.calls is None else self.width)
            values = (root_ids, self.cache.lengths, pending.counts.tensor, *self.first_block)
            padded: Any = (pending.token_ids, pending.position_ids, pending.features)
            if self.calls is None:
                self.first_block = entered(at, self, *values, *padded)
            else:
                hidden, positions = self.calls(
                    ("entered", at, self.cache.addresses), functools.partial(entered, at), *values, padded=padded,
                    width=self.width,
                )  # fmt: skip
                self.first_block = hidden, positions
            self.cache.commit_first(pending.counts.times(self.slots))
        self.cache.reserve(sum(map(self.shape.most_starts, range(1, self.num_blocks))) * self.slots)
        return self.first_block

    def _append_prompt(self, root_ids: Tensor, pending: Committed) -> tuple[Tensor, Tensor]:
        """`_append_pending` in parts of `prompt_chunk` positions, for the prompt and for many skipped rounds."""
        assert self.cache is not None
        assert pending.features is not None
        new = pending.position_ids.shape[1]
        last = pending.counts.tensor.unsqueeze(1).sub(1).clamp(min=0)
        if pending.tree is None:  # left padding: the last token of every row is in the last column
            last = torch.full_like(last, new - 1)
        # The input is a position's feature with the next token; after the last position this is the root.
        following = pending.token_ids.roll(-1, dims=1).scatter(1, last, root_ids[:, None])
        every = torch.ones_like(pending.token_ids, dtype=torch.bool) if pending.valid is None else pending.valid
        blocks = []
        for start in range(0, new, self.prompt_chunk):
            part = slice(start, start + self.prompt_chunk)
            valid = every[:, part]
            plain = pending.valid is None and not self.cache.longest
            self.cache.reserve(valid.shape[1] * self.slots)
            hidden = self.drafter.block_hidden(
                pending.features[:, part],
                self._embed(following[:, part]),
                pending.position_ids[:, part] + 1,
                from_target=True,
                mask=None if plain else self._causal_mask(self.cache.longest, self.cache.lengths, valid),
                cache=self.cache,
            )
            # Padding comes first in a prompt and last in a round: commit the other entries, in order.
            order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
            entries = order.unsqueeze(-1) * self.slots + torch.arange(self.slots, device=order.device)
            counts = Counts.of([count * self.slots for count in valid.sum(1).tolist()], self.device)
            self.cache.commit(entries.flatten(1), counts)
            index = (last - start).clamp(0, valid.shape[1] - 1)[:, :, None, None]
            blocks.append(hidden.gather(1, index.expand(-1, 1, *hidden.shape[2:])))
        of = last // self.prompt_chunk
        hidden = torch.cat(blocks, 1).gather(1, of[:, :, None, None].expand(-1, 1, *blocks[0].shape[2:]))
        positions = pending.position_ids.gather(1, last) + 1
        if self.first_block is not None:  # a finished row has no new position
            moved = pending.counts.tensor.unsqueeze(1) > 0
            hidden = hidden.where(moved[:, :, None, None], self.first_block[0])
            positions = positions.where(moved, self.first_block[1])
        return hidden, positions

    def _causal_mask(self, at: int, lengths: Tensor, valid: Tensor) -> Tensor:
        """For committed positions: all slots of earlier positions, and earlier slots of the same one (Figure 3).

        Args:
            at: earlier entries in the cache.
            lengths: [batch] int64, how many of them are of each row.
            valid: [batch, new] bool, False for padding. It attends to itself, so that no row of the mask is empty;
                nothing else attends to it.
        """
        order = torch.arange(valid.shape[1] * self.slots, device=valid.device)
        own = (order.unsqueeze(1) >= order) & valid.repeat_interleave(self.slots, 1).unsqueeze(1)
        own = own | (order.unsqueeze(1) == order)
        past = torch.arange(at, device=valid.device) < lengths.unsqueeze(1)
        return torch.cat([past.unsqueeze(1).expand(-1, len(order), -1), own], -1).unsqueeze(1)

    def _path_mask(self, starts: Starts, at: int, lengths: Tensor) -> Tensor:
        """For a later block: the committed prefix, the start's path, and earlier slots of the same start (Figure 3).

        [batch, 1, starts * slots, entries] bool.
        """
        count = starts.nodes.shape[1]
        # A row's last committed position is the first block's start; of its K entries only those on the path count.
        until = (lengths - self.slots).unsqueeze(1) + starts.first_on_path
        prefix = torch.arange(at, device=self.device) < until.unsqueeze(-1)
        earlier = torch.cat([prefix, starts.later_on_path], -1).repeat_interleave(self.slots, 1)
        own = self._own_masks.get(count)
        if own is None:
            order = torch.arange(count * self.slots, device=self.device)
            leaf = order // self.slots
            own = (leaf.unsqueeze(1) == leaf) & (order.unsqueeze(1) >= order)
            if self.calls is None:  # tensors made during capture belong to the graph
                self._own_masks[count] = own
        own = own.expand(len(lengths), -1, -1)
        return torch.cat([earlier, own], -1).unsqueeze(1)


def _on(tree: DraftTree, device: torch.device) -> DraftTree:
    """The tree on another device."""
    if tree.token_ids.device == device:
        return tree
    parts: dict[str, Any] = {name: getattr(tree, name).to(device) for name in TREE}
    return replace(tree, **parts)


def entered(
    at: int,
    generator: SpecBlockGenerator,
    root_ids: Tensor,
    lengths: Tensor,
    counts: Tensor,
    last_hidden: Tensor,
    last_positions: Tensor,
    token_ids: Tensor,
    position_ids: Tensor,
    features: Tensor,
) -> tuple[Tensor, Tensor]:
    """A round of `SpecBlockGenerator._append_pending`: hidden [batch, 1, slots, hidden] and positions [batch, 1].

    Args:
        at: where the new entries begin in the cache, after the committed ones.
        generator: of the call.
        root_ids: [batch] int64.
        lengths: [batch] int64, committed entries of each row.
        counts: [batch] int64, new positions of each row, the first of `width`.
        last_hidden: [batch, 1, slots, hidden], the previous result, for rows without new positions.
        last_positions: [batch, 1] int64, the previous result.
        token_ids: [batch, width] int64.
        position_ids: [batch, width] int64.
        features: [batch, width, taps * target_hidden].
    """
    width = token_ids.shape[1]
    last = (counts - 1).clamp(min=0).unsqueeze(1)
    following = token_ids.roll(-1, dims=1).scatter(1, last, root_ids.unsqueeze(1))
    valid = torch.arange(width, device=token_ids.device) < counts.unsqueeze(1)
    hidden = generator.drafter.block_hidden(
        features,
        generator._embed(following),
        position_ids + 1,
        from_target=True,
        mask=generator._causal_mask(at, lengths, valid),
        cache=generator.cache,
    )
    hidden = hidden.gather(1, last[:, :, None, None].expand(-1, 1, *hidden.shape[2:]))
    moved = counts.unsqueeze(1) > 0
    positions = (position_ids.gather(1, last) + 1).where(moved, last_positions)
    return hidden.where(moved[:, :, None, None], last_hidden), positions


def drafted(
    at: int,
    generator: SpecBlockGenerator,
    root_ids: Tensor,
    lengths: Tensor,
    hidden: Tensor,
    positions: Tensor,
    branching: Tensor,
    index: Tensor,
) -> tuple[Tensor, ...]:
    """The tree, which nodes it selected, all nodes, and the states of all blocks, as `_draft_captured` reads them.

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
    parts = [getattr(tree, name) for name in TREE]
    return (*parts, selected, finite, nodes.token_ids, nodes.scores, nodes.above, *states)
