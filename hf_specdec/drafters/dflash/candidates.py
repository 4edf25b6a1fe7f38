"""DFlash in one `generate` call: its context cache, one forward per round, and the greedy chain of method "dflash"."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.generator import Committed, DraftContext
from hf_specdec.decoding.graphs import static_calls
from hf_specdec.decoding.masks import additive
from hf_specdec.decoding.static_verify import capacity_for
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.base import BlockMarginals, MarginalsGenerator
from hf_specdec.drafters.dflash.modeling import DFlashDrafter, block_embeddings
from hf_specdec.drafters.dflash.static import StaticBlocks


class DFlashMarginals(BlockMarginals):
    """Per-position logits of one block per round, or the states of its slots.

    Features of tokens committed since the last round are appended to the context cache in the same forward that drafts.
    The block's own keys and values are written after them and dropped afterwards.
    """

    def __init__(self, drafter: DFlashDrafter, target: TargetModel) -> None:
        self.drafter = drafter
        self.block_size = drafter.num_slots
        own = drafter.config
        self.embed_tokens = drafter.embed_tokens if own.own_embeddings else block_embeddings(target.model)
        self.lm_head = drafter.head(target.model.get_output_embeddings())
        self.device, self.dtype = drafter.device, drafter.dtype  # transformers searches the parameters for each access
        self.slots = torch.arange(self.block_size, device=self.device)
        # Attributes of a config are slow to read, too slow for every round.
        self.mask_token_id = own.mask_token_id
        self.layer_kinds = [(own.window(layer), own.block_is_causal(layer)) for layer in range(own.num_hidden_layers)]
        self.sees_everything = all(kind == (None, False) for kind in self.layer_kinds)
        self.cache: TreeCache | None = None
        self.pending: Committed | None = None
        self.calls = static_calls(self, drafter, (self.embed_tokens, self.lm_head), drafter.options.compile_mode)
        self.static = None if self.calls is None else StaticBlocks(self.calls, self.block_size)
        self.drafts_early = self.static is not None
        self.target = target  # the capacity of its cache limits the length of rows

    def observe(self, committed: Committed) -> None:
        self.pending = committed if self.pending is None else self.pending.followed_by(committed)

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.keep_rows(rows)
        self.pending = None if self.pending is None else self.pending.of_rows(rows)

    def marginals(self, context: DraftContext) -> Tensor:
        return self.run_block(context, self.lm_head)

    @in_inference_mode  # cheaper than no_grad; only our own cache outlives the round
    def run_block(self, context: DraftContext, lm_head: nn.Module | None) -> Tensor:
        """The round's forward: logits with `lm_head`, else the states of all slots; see `DFlashDrafter.forward`."""
        device, dtype = self.device, self.dtype
        pending = self.pending
        assert pending is not None, "draft() before the prefill was observed"
        assert pending.features is not None
        batch, new = pending.token_ids.shape
        if self.cache is None:
            config = self.drafter.config
            capacity = new + self.block_size + 256
            if self.calls is not None:  # buffers with the target's capacity suffice for the whole call
                capacity = max(self.target.cache.capacity, capacity_for(capacity))
            self.cache = TreeCache.empty(
                config.num_hidden_layers, batch, config.num_key_value_heads, config.head_dim, dtype=dtype,
                device=device, capacity=capacity, workspace=None if self.calls is None else self.calls.workspace,
            )  # fmt: skip
        if self.static is not None and lm_head is not None and self.static.fits(pending):
            logits = self.static(self.cache, context, pending, self.block_size)
            self.pending = None
            return logits
        self.cache.reserve(new + self.block_size)
        if pending.valid is None:  # consecutive positions, from the first new one to the block's last
            steps = torch.arange(new + self.block_size, device=pending.position_ids.device)
            positions = (pending.position_ids[:, :1] + steps).to(device)
        else:
            block_positions = context.root_positions.to(device).unsqueeze(1) + self.slots
            positions = torch.cat([pending.position_ids.to(device), block_positions], dim=1)
        output = self.drafter(
            torch.constant_pad_nd(context.root_ids.unsqueeze(1), (0, self.block_size - 1), self.mask_token_id),
            pending.features.to(device=device, dtype=dtype),
            positions,
            embed_tokens=self.embed_tokens,
            masks=self._masks(pending),
            cache=self.cache,
            lm_head=lm_head,
        )
        if pending.tree is None and pending.valid is not None:
            # Left padding comes first: commit the other entries, in order.
            padding = (~pending.valid).to(device=device, dtype=torch.int8)
            self.cache.commit(padding.argsort(dim=1, stable=True), pending.counts.to(device))
        else:
            self.cache.commit_first(pending.counts.to(device))
        self.pending = None
        return output

    def _masks(self, pending: Committed) -> list[Tensor | None] | None:
        """Per layer None, or additive [batch, 1, block, cached + new + block]."""
        cache = self.cache
        assert cache is not None
        all_visible = pending.valid is None and cache.is_even
        if all_visible and self.sees_everything:
            return None
        device, batch, slots = self.device, cache.batch, self.slots
        cached = torch.arange(cache.longest, device=device)
        new_valid = torch.ones_like(pending.token_ids, dtype=torch.bool) if pending.valid is None else pending.valid
        new_valid = new_valid.to(device)
        visible = torch.cat([cached < cache.lengths.unsqueeze(1), new_valid], dim=1)
        # Index of each entry in its row's text; the value is arbitrary for padding, which is not visible.
        new_indices = cache.lengths.unsqueeze(1) + new_valid.cumsum(1) - 1
        indices = torch.cat([cached.expand(batch, -1), new_indices], dim=1)
        root = cache.lengths + pending.counts.to(device).tensor
        masks = {}
        for window, causal in set(self.layer_kinds):
            context = visible.unsqueeze(1).expand(-1, self.block_size, -1)
            ahead = slots.unsqueeze(1) - slots
            block = ahead >= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
            if window is not None:
                context = context & (root[:, None, None] + slots.unsqueeze(1) - indices.unsqueeze(1) < window)
                block = block & (ahead.abs() < window)
            seen = torch.cat([context, block.expand(batch, -1, -1)], dim=-1)
            masks[window, causal] = additive(seen, self.dtype)
        return [masks[kind] for kind in self.layer_kinds]


class ChainGenerator(MarginalsGenerator):
    """The drafter's likeliest token at every position, as one chain: DFlash as published."""

    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        best, token_ids = logits.max(-1)
        # The maximum is NaN or inf if any logit is; it is -inf if all are, and then nothing is drafted.
        finite = best.isfinite().all(-1)
        root_ids = context.root_ids.unsqueeze(1)
        token_ids = torch.cat([root_ids, token_ids.to(root_ids.device)], 1)
        return DraftTree.chain(token_ids, finite=finite)
