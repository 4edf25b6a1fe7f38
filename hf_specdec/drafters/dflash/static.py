"""StaticBlocks: a DFlash drafter's forward with fixed shapes and addresses, for CUDA graphs.

It computes what `DFlashMarginals.marginals` does, embedding, masks and head included, and `decoding/graphs.py` captures
it. Features of committed tokens are padded to one width and the context to a bucket of entries. Masks are made inside,
from row lengths on the device. The prompt's features, and rare longer ones, use the normal forward.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.generator import Committed, DraftContext
from hf_specdec.decoding.graphs import StaticCalls, nodes_bucket, prefix_bucket
from hf_specdec.decoding.masks import additive

if TYPE_CHECKING:
    from hf_specdec.drafters.dflash.candidates import DFlashMarginals


class StaticBlocks:
    """Drafts the blocks of one call.

    Args:
        calls: of the drafter, claimed for a `DFlashMarginals`.
        block_size: slots of a block, root included; a round commits no more tokens than that.
    """

    def __init__(self, calls: StaticCalls, block_size: int) -> None:
        self.calls = calls
        self.width = nodes_bucket(block_size)

    def fits(self, pending: Committed) -> bool:
        """Whether the tokens committed since the last draft are those of one round."""
        return pending.tree is not None and pending.token_ids.shape[1] <= self.width

    def __call__(self, cache: TreeCache, context: DraftContext, pending: Committed, block_size: int) -> Tensor:
        """Logits as from `DFlashDrafter.forward`, valid until the next call.

        Args:
            cache: of the context; new features' keys and values are written at `prefix_bucket(cache.longest)`.
            context: of the round.
            pending: tokens committed since the last draft.
            block_size: slots of a block, root included.
        """
        assert pending.features is not None
        counts = pending.counts.to(cache.device)
        at = prefix_bucket(cache.longest)
        cache.place_nodes(at)
        cache.reserve(self.width + block_size)
        (logits,) = self.calls(
            ("block", block_size, at, cache.addresses),
            functools.partial(_block_logits, at, block_size),
            context.root_ids,
            context.root_positions,
            cache.lengths,
            counts.tensor,
            padded=(pending.position_ids, pending.features),
            width=self.width,
        )
        cache.commit_first(counts)
        return logits


def _block_logits(
    at: int,
    block_size: int,
    source: DFlashMarginals,
    root_ids: Tensor,
    root_positions: Tensor,
    lengths: Tensor,
    counts: Tensor,
    position_ids: Tensor,
    features: Tensor,
) -> tuple[Tensor]:
    """The captured forward. The only state of the call that it reads is the cache, whose buffers stay in place.

    Args:
        at: where the new features' entries begin, after the context.
        block_size: slots of a block, root included.
        source: of the call.
        root_ids: [batch] int64.
        root_positions: [batch] int64.
        lengths: [batch] int64, entries of each row's context.
        counts: [batch] int64, new features of each row, the first of `width`.
        position_ids: [batch, width] int64, of the new features.
        features: [batch, width, taps * hidden].
    """
    drafter, mask_token_id = source.drafter, source.drafter.config.mask_token_id
    slots = torch.arange(block_size, device=root_ids.device)
    block_ids = root_ids.unsqueeze(1).where(slots == 0, mask_token_id)
    block_positions = root_positions.unsqueeze(1) + slots
    logits = drafter(
        block_ids,
        features.to(source.dtype),
        torch.cat([position_ids, block_positions], dim=1),
        embed_tokens=source.embed_tokens,
        masks=_masks(source, at, slots, lengths, counts, position_ids.shape[1]),
        cache=source.cache,
        lm_head=source.lm_head,
    )
    return (logits,)


def _masks(
    source: DFlashMarginals, at: int, slots: Tensor, lengths: Tensor, counts: Tensor, width: int
) -> list[Tensor]:
    """Per layer additive [batch, 1, block, at + width + block]."""
    batch, device = len(lengths), lengths.device
    cached, new = torch.arange(at, device=device), torch.arange(width, device=device)
    ahead = slots.unsqueeze(1) - slots
    # Distance of a slot from the first new feature of its row.
    distance = counts.unsqueeze(1) + slots
    masks = {}
    for window, causal in set(source.layer_kinds):
        first = torch.zeros_like(distance)
        fresh = (new < counts.unsqueeze(1)).unsqueeze(1).expand(-1, len(slots), -1)
        block = ahead >= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        if window is not None:
            first = (lengths.unsqueeze(1) + distance - (window - 1)).clamp(min=0)
            fresh = fresh & (distance.unsqueeze(-1) - new < window)
            block = block & (ahead.abs() < window)
        context = (cached >= first.unsqueeze(-1)) & (cached < lengths[:, None, None])
        seen = torch.cat([context, fresh, block.expand(batch, -1, -1)], dim=-1)
        masks[window, causal] = additive(seen, source.dtype)
    return [masks[kind] for kind in source.layer_kinds]
