"""A SpecBlock drafter's round with fixed shapes and addresses, for `decoding/graphs.py` to capture.

There are two launches: `entered` appends the positions that the last round committed to the cache, and `drafted` grows
and cuts the tree. Both run the generator's own steps with the cache's length rounded up to a bucket. Besides their
arguments they read only the cache, whose buffers stay in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.specblock.tree import Nodes, cut

if TYPE_CHECKING:
    from hf_specdec.drafters.specblock.candidates import SpecBlockGenerator

TREE = ("token_ids", "parents", "depths", "ancestor_mask", "valid", "finite", "path_logprobs")


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
    """`SpecBlockGenerator._append_pending` after the prompt: hidden [batch, 1, slots, hidden] and positions [batch, 1].

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
    slots, width = generator.slots, token_ids.shape[1]
    last = (counts - 1).clamp(min=0).unsqueeze(1)
    following = token_ids.roll(-1, dims=1).scatter(1, last, root_ids.unsqueeze(1))
    order = torch.arange(width * slots, device=token_ids.device)
    past = torch.arange(at, device=order.device) < lengths.unsqueeze(1)
    # Unused positions attend to themselves, so that no row of the mask is empty; nothing else attends to them.
    own = (order.unsqueeze(1) >= order) & (order < (counts * slots)[:, None, None])
    own = own | (order.unsqueeze(1) == order)
    hidden = generator.drafter.block_hidden(
        features,
        generator._embed(following),
        position_ids + 1,
        from_target=True,
        mask=torch.cat([past.unsqueeze(1).expand(-1, width * slots, -1), own], -1).unsqueeze(1),
        cache=generator.cache,
    )
    index = last[:, :, None, None].expand(-1, 1, *hidden.shape[2:])
    moved = counts.unsqueeze(1) > 0
    hidden = hidden.gather(1, index).where(moved[:, :, None, None], last_hidden)
    return hidden, (position_ids.gather(1, last) + 1).where(moved, last_positions)


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
    """The tree, which nodes it selected, all nodes, and the states of all blocks, as `tree_of` reads them.

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


def tree_of(parts: tuple[Tensor, ...], generator: SpecBlockGenerator) -> tuple[DraftTree, Nodes, Tensor, list[Tensor]]:
    """From the result of `drafted`: the tree, all nodes, which of them it selected, and the states of all blocks."""
    tree, (selected, _, token_ids, scores, above), states = parts[: len(TREE)], parts[len(TREE) :][:5], parts[12:]
    starts = tuple(block.shape[1] for block in states)
    max_depth = generator.num_blocks * generator.slots
    draft_tree = DraftTree(**dict(zip(TREE, tree, strict=True)), max_depth=max_depth)
    return draft_tree, Nodes(token_ids, scores, above, starts, generator.shape), selected, list(states)
