"""Several passes over the same row in one training step: which positions of earlier passes each one attends to.

SpecBlock chains blocks and EAGLE-3 reads its own outputs: in both a later pass continues from all positions of the row
at once, and at each position it must see what drafting from there would see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def block_masks(
    positions: int,
    slots: int,
    cuts: Sequence[int],
    *,
    cross_position: bool = False,
    device: torch.device | None = None,
) -> list[Tensor | None]:
    """Attention masks per chained block: [1, 1, positions * slots, blocks so far * positions * slots] bool.

    The rules of drafting (Figure 3), for all positions at once. A slot sees all slots of earlier positions in the first
    block; in every previous block, the slots up to the cut at the same position; in its own block, the slots up to
    itself. None for the first block, which is causal.

    Args:
        positions: starts of a row.
        slots: K.
        cuts: slots kept of every block except the last.
        cross_position: a later block also sees its own slots at earlier positions; in drafting it never does.
        device: of the masks.
    """
    order = torch.arange(positions * slots, device=device)
    position, slot = order // slots, order % slots
    earlier = position.unsqueeze(1) > position
    same = position.unsqueeze(1) == position
    own = same & (slot.unsqueeze(1) >= slot)
    if cross_position:
        own = own | earlier
    masks: list[Tensor | None] = [None]
    for block in range(1, len(cuts) + 1):
        parts = [same & (slot < cut) for cut in cuts[:block]]
        parts[0] = parts[0] | earlier
        masks.append(torch.cat([*parts, own], 1)[None, None])
    return masks


def growing_cache(num_layers: int) -> DynamicCache:
    """Keys and values of earlier passes, concatenated with their gradients."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer() for _ in range(num_layers)]
    return cache
