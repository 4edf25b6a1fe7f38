"""DFlash in one `generate` call: its context cache, one forward per round, and the greedy chain of method "dflash"."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.candidates import DraftContext, RoundOutcome, TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.base import BlockMarginals
from hf_specdec.drafters.dflash.modeling import DFlashDrafter


class DFlashMarginals(BlockMarginals):
    """Per-position logits of one block per round.

    Features of tokens committed since the last round enter the context cache in the same forward that drafts; the
    block's own keys and values are written behind them and forgotten afterwards.
    """

    def __init__(self, drafter: DFlashDrafter, target: TargetModel) -> None:
        self.drafter = drafter
        self.block_size = drafter.block_size
        self.embed_tokens = target.model.get_input_embeddings()
        self.lm_head = target.model.get_output_embeddings()
        self.cache: TreeCache | None = None
        self.pending: RoundOutcome | None = None

    def observe(self, outcome: RoundOutcome) -> None:
        assert self.pending is None or not any(self.pending.num_committed), "two outcomes without a draft between them"
        self.pending = outcome

    def marginals(self, context: DraftContext) -> Tensor:
        config, device, dtype = self.drafter.config, self.drafter.device, self.drafter.dtype
        pending = self.pending
        assert pending is not None and pending.features is not None, "draft() before the prefill was observed"
        batch, new = pending.token_ids.shape
        if self.cache is None:
            self.cache = TreeCache.empty(
                config.num_hidden_layers, batch, config.num_key_value_heads, config.head_dim, dtype=dtype,
                device=device, capacity=new + self.block_size + 256,
            )  # fmt: skip
        self.cache.reserve(new + self.block_size)

        block_ids = context.root_ids.new_full((batch, self.block_size), config.mask_token_id)
        block_ids[:, 0] = context.root_ids
        slots = torch.arange(self.block_size, device=context.root_positions.device)
        positions = torch.cat([pending.position_ids, context.root_positions.unsqueeze(1) + slots], dim=1)
        logits = self.drafter(
            self.embed_tokens(block_ids).to(device=device, dtype=dtype),
            pending.features.to(device=device, dtype=dtype),
            positions.to(device),
            masks=self._masks(pending, new),
            cache=self.cache,
            lm_head=self.lm_head,
        )
        # Valid entries first, in order; a left-padded prompt has its padding in front.
        entries = torch.arange(new, device=device).expand(batch, new)
        if pending.tree is None:
            entries = (~pending.valid.to(device)).to(torch.int8).argsort(dim=1, stable=True)
        self.cache.commit(entries, pending.num_committed)
        self.pending = None
        # The mask may be an id that the target can emit; a draft of it would be a guess about nothing.
        logits[..., config.mask_token_id] = -torch.inf
        return logits

    def _masks(self, pending: RoundOutcome, new: int) -> list[Tensor | None] | None:
        """Per layer None, or additive [batch, 1, block, cached + new + block]."""
        cache, config = self.cache, self.drafter.config
        assert cache is not None
        layers = range(config.num_hidden_layers)
        kinds = [(config.window(layer), config.block_is_causal(layer)) for layer in layers]
        all_there = min(pending.num_committed) == new and min(cache.row_lengths) == cache.longest
        if all_there and all(kind == (None, False) for kind in kinds):
            return None
        device = self.drafter.device
        batch = cache.batch
        cached = torch.arange(cache.longest, device=device) < cache.lengths.unsqueeze(1)
        visible = torch.cat([cached, pending.valid.to(device)], dim=1)
        # Order of the entries in the row's text: context entries count up to the root, slots from it.
        before = torch.cat([torch.arange(cache.longest, device=device).expand(batch, -1),
                            cache.lengths.unsqueeze(1) + pending.valid.to(device).cumsum(1) - 1], dim=1)  # fmt: skip
        root = cache.lengths + torch.tensor(pending.num_committed, device=device)
        slots = torch.arange(self.block_size, device=device)
        built: dict[tuple[int | None, bool], Tensor] = {}
        for window, causal in kinds:
            if (window, causal) in built:
                continue
            context_visible = visible.unsqueeze(1).expand(-1, self.block_size, -1)
            block_visible = (slots.unsqueeze(1) >= slots) if causal else torch.ones_like(slots.unsqueeze(1) >= slots)
            if window is not None:
                distance = root[:, None, None] + slots[:, None] - before.unsqueeze(1)
                context_visible = context_visible & (distance < window)
                block_visible = block_visible & (slots.unsqueeze(1) - slots < window)
            both = torch.cat([context_visible, block_visible.expand(batch, -1, -1)], dim=-1)
            lowest = torch.finfo(self.drafter.dtype).min
            built[window, causal] = torch.zeros(both.shape, dtype=self.drafter.dtype, device=device).masked_fill_(
                ~both, lowest
            ).unsqueeze(1)  # fmt: skip
        return [built[kind] for kind in kinds]


class ChainGenerator(TreeCandidateGenerator):
    """The drafter's likeliest token at every position, as one chain: vanilla DFlash."""

    def __init__(self, source: BlockMarginals) -> None:
        self.source = source

    def draft(self, context: DraftContext) -> DraftTree:
        logits = self.source.marginals(context)
        best, token_ids = logits.max(-1)
        # NaN and +inf both show in the maximum; -inf everywhere leaves nothing to draft.
        finite = best.isfinite().all(-1)
        root_ids = context.root_ids.unsqueeze(1)
        valid = finite.unsqueeze(1).expand(-1, token_ids.shape[1] + 1).clone()
        valid[:, 0] = True
        return DraftTree.chain(torch.cat([root_ids, token_ids.to(root_ids.device)], 1), valid=valid, finite=finite)

    def observe(self, outcome: RoundOutcome) -> None:
        self.source.observe(outcome)
