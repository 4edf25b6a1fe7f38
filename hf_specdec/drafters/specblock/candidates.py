"""SpecBlock in one `generate` call: its cache, and the M forwards of a round.

The first forward of a round appends the positions committed since the last one to the cache, K entries each, and drafts
from the last of them. Every later forward drafts from all selected nodes of the previous block together. Source:
SpecBlock, Section 3.2, Figure 3 and Algorithm 2. The network is in `modeling.py`, the tree in `tree.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.devices import abilities, in_inference_mode
from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.graphs import StaticCalls, nodes_bucket, prefix_bucket, static_calls
from hf_specdec.decoding.modules import home_of
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.static_verify import capacity_for
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafters.growth import path_notes
from hf_specdec.drafters.specblock.modeling import SpecBlockDrafter
from hf_specdec.drafters.specblock.static import drafted, entered, tree_of
from hf_specdec.drafters.specblock.tree import (
    HeadOutput,
    Nodes,
    Shape,
    Starts,
    attach,
    choose_starts,
    cut,
    only_finite,
)


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
            return self._draft_captured(self.calls, context)
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

    def _draft_captured(self, calls: StaticCalls, context: DraftContext) -> DraftTree:
        """`draft` in two captured launches; the prompt is not captured."""
        root_ids, pending = context.root_ids.to(self.device), self._take_pending()
        if self.cache is None or pending.token_ids.shape[1] > self.width:
            hidden, positions = self._append_pending(root_ids, pending)
        else:
            assert self.first_block is not None
            at = self._place(self.width)
            assert pending.features is not None
            padded = (pending.token_ids, pending.position_ids, pending.features)
            hidden, positions = calls(
                ("entered", at, self.cache.addresses), functools.partial(entered, at), root_ids, self.cache.lengths,
                pending.counts.tensor, *self.first_block, padded=padded, width=self.width,
            )  # fmt: skip
            self.first_block = hidden, positions
            self.cache.commit_first(pending.counts.times(self.slots))
        assert self.cache is not None
        at = self._place(sum(self.shape.most_starts(block) for block in range(1, self.num_blocks)))
        # Options that change shapes or operations; all others are tensor values.
        options = (self.num_blocks, self.merge, self.shape.width, self.shape.beam_width, self.shape.max_starts)
        parts = calls(
            ("drafted", options, self.shape.tree_budget, at, self.cache.addresses), functools.partial(drafted, at),
            root_ids, self.cache.lengths, hidden, positions, self.shape.branching[None], self.shape.index[None],
        )  # fmt: skip
        self.cache.rollback()  # only committed positions remain
        context.lap("draft")
        tree, nodes, selected, self.hidden = tree_of(parts, self)
        self.tree = tree, nodes, selected
        return _on(tree, context.root_ids.device)

    def _place(self, starts: int) -> int:
        """Reserves entries for `starts` starts; returns where they begin, the same for all lengths of a bucket."""
        assert self.cache is not None
        at = prefix_bucket(self.cache.longest)
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
        config = self.drafter.config
        assert pending.features is not None
        batch, new = pending.position_ids.shape
        if self.cache is None:
            capacity = (new + 256) * self.slots
            if self.calls is not None:  # buffers with the target's capacity suffice for the whole call
                capacity = capacity_for(max(capacity, self.target.cache.capacity * self.slots))
            self.cache = TreeCache.empty(
                config.num_hidden_layers, batch, config.num_key_value_heads, config.head_dim, dtype=self.dtype,
                device=self.device, capacity=capacity, workspace=None if self.calls is None else self.calls.workspace,
            )  # fmt: skip
        later = sum(self.shape.most_starts(block) for block in range(1, self.num_blocks))
        last = pending.counts.tensor.unsqueeze(1).sub(1).clamp(min=0)
        if pending.tree is None:  # left padding: the last token of every row is in the last column
            last = torch.full_like(last, new - 1)
        # The input is a position's feature with the next token; after the last position this is the root.
        following = torch.cat([pending.token_ids[:, 1:], pending.token_ids[:, -1:]], 1)
        following = following.scatter(1, last, root_ids[:, None])
        for start in range(0, new, self.prompt_chunk):
            part = slice(start, start + self.prompt_chunk)
            valid = None if pending.valid is None else pending.valid[:, part]
            length = min(self.prompt_chunk, new - start)
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
                self.cache.commit_first(Counts.of([length * self.slots] * batch, self.device))
            else:
                counts = pending.num_committed if new <= self.prompt_chunk else valid.sum(1).tolist()
                # Padding comes first in a prompt and last in a round: commit the other entries, in order.
                order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
                entries = order.unsqueeze(-1) * self.slots + torch.arange(self.slots, device=order.device)
                self.cache.commit(entries.flatten(1), Counts.of([count * self.slots for count in counts], self.device))
        positions = pending.position_ids.gather(1, last) + 1
        if new > self.prompt_chunk:
            last = last - start
        hidden = hidden.gather(1, last[:, :, None, None].expand(-1, 1, *hidden.shape[2:]))
        if self.first_block is not None and 0 in pending.num_committed:  # a finished row has no new position
            moved = pending.counts.tensor.unsqueeze(1) > 0
            hidden = hidden.where(moved[:, :, None, None], self.first_block[0])
            positions = positions.where(moved, self.first_block[1])
        self.first_block = hidden, positions
        self.cache.reserve(later * self.slots)
        return self.first_block

    def _causal_mask(self, valid: Tensor | None, new: int) -> Tensor | None:
        """For committed positions: all slots of earlier positions, and earlier slots of the same one (Figure 3)."""
        cache = self.cache
        assert cache is not None
        stored, device = cache.longest, self.device
        even = cache.is_even
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
            # Padding attends to itself, so that no row of the mask is empty; nothing else attends to it.
            keys = valid.repeat_interleave(self.slots, 1).unsqueeze(1)
            own = (own & keys) | (order.unsqueeze(1) == order)
        return torch.cat([past, own], -1).unsqueeze(1)

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
    names = ("token_ids", "parents", "depths", "ancestor_mask", "valid", "finite", "path_logprobs")
    parts: dict[str, Any] = {name: getattr(tree, name) for name in names}
    parts = {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
    return replace(tree, **parts)
