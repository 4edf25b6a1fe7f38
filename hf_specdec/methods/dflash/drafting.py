"""How DFlash drafts: one forward per round over the new features and the block, and the block as a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.devices import in_inference_mode
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.masks import additive
from hf_specdec.decoding.targets.modules import core_of, has_plain_weight
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import BlockMarginals, MarginalsGenerator
from hf_specdec.drafting.reader import CommittedReader, NewTokens

if TYPE_CHECKING:
    from hf_specdec.methods.dflash.network import DFlashDrafter


def block_embeddings(model: PreTrainedModel) -> nn.Module:
    """The embedding of block tokens, for drafters that share the target's.

    This is the target's own embedding, with its scale (Gemma) but without a norm after the table (Muse Glimmer's
    `embed_norm`): all DFlash drafters of that target were trained on the table itself.
    """
    embeddings = model.get_input_embeddings()
    core: Any = core_of(embeddings)
    if not hasattr(core, "embed_norm"):
        return embeddings
    if not has_plain_weight(core):
        raise ValueError(
            f"The drafter reads the table of {type(core).__name__} in target {type(model).__name__} without its "
            "norm, but that table is offloaded or quantised. Keep the target's embeddings in memory in a "
            "floating-point type."
        )
    return nn.Embedding.from_pretrained(core.weight.detach())  # shares the memory


class DFlashMarginals(CommittedReader, BlockMarginals):
    """Per-position logits of one block per round, or the states of its slots.

    One forward reads the features of the tokens committed since the last round and drafts; the keys and values of the
    block are dropped.

    Args:
        drafter: with its options.
        target: of the call.
        states: whether a round gives the states of all slots instead of logits; see `DFlashDrafter.forward`.
    """

    def __init__(self, drafter: DFlashDrafter, target: TargetModel, *, states: bool = False) -> None:
        own = drafter.config
        self.block_size = drafter.num_slots
        self.embed_tokens = drafter.embed_tokens if own.own_embeddings else block_embeddings(target.model)
        self.lm_head = drafter.head(target.model.get_output_embeddings())
        self.states = states
        # Attributes of a config are slow to read, too slow for every round.
        self.mask_token_id = own.mask_token_id
        self.layer_kinds = [(own.window(layer), own.block_is_causal(layer)) for layer in range(own.num_hidden_layers)]
        self.sees_everything = all(kind == (None, False) for kind in self.layer_kinds)
        super().__init__(
            drafter,
            target,
            (own.num_hidden_layers, own.num_key_value_heads, own.head_dim, None, None),
            borrowed=(self.embed_tokens, self.lm_head),
            most=self.block_size,
            room=self.block_size,
            compile_mode=drafter.options.compile_mode,
        )

    @in_inference_mode  # cheaper than no_grad; only our own cache outlives the round
    def marginals(self, context: DraftContext) -> Tensor:
        roots = context.root_ids, context.root_positions.to(self.device)
        return self.read(_block, *roots, key=(self.block_size, self.states), room=self.room)[0]

    def masks(self, new: NewTokens, slots: Tensor) -> list[Tensor | None] | None:
        """Per layer None, or additive [batch, 1, block, at + new + block]."""
        if new.even and self.sees_everything:
            return None
        device, lengths, counts = slots.device, new.lengths, new.counts
        cached, fresh = torch.arange(new.at, device=device), torch.arange(new.token_ids.shape[1], device=device)
        ahead = slots.unsqueeze(1) - slots
        # Distance of a slot from the first new token of its row.
        distance = counts.unsqueeze(1) + slots
        masks: dict[Any, Tensor] = {}
        for window, causal in set(self.layer_kinds):
            earlier = (cached < lengths.unsqueeze(1)).unsqueeze(1).expand(-1, len(slots), -1)
            own = (fresh < counts.unsqueeze(1)).unsqueeze(1).expand(-1, len(slots), -1)
            block = ahead >= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
            if window is not None:
                earlier = earlier & (cached > (lengths.unsqueeze(1) + distance - window).unsqueeze(-1))
                own = own & (distance.unsqueeze(-1) - fresh < window)
                block = block & (ahead.abs() < window)
            seen = torch.cat([earlier, own, block.expand(len(lengths), -1, -1)], dim=-1)
            masks[window, causal] = additive(seen, self.dtype)
        return [masks[kind] for kind in self.layer_kinds]


def _block(reader: DFlashMarginals, new: NewTokens, root_ids: Tensor, root_positions: Tensor) -> tuple[Tensor]:
    """The forward of a round; `root_ids` and `root_positions` are [batch] int64."""
    slots = torch.arange(reader.block_size, device=root_positions.device)
    output = reader.drafter(
        torch.constant_pad_nd(root_ids.unsqueeze(1), (0, reader.block_size - 1), reader.mask_token_id),
        new.features,
        torch.cat([new.position_ids, root_positions.unsqueeze(1) + slots], dim=1),
        embed_tokens=reader.embed_tokens,
        masks=reader.masks(new, slots),
        cache=reader.cache,
        lm_head=None if reader.states else reader.lm_head,
    )
    return (output,)


class DFlashChain(MarginalsGenerator):
    """The drafter's likeliest token at every position, as one chain: DFlash as published."""

    def tree(self, context: DraftContext, logits: Tensor) -> DraftTree:
        best, token_ids = logits.max(-1)
        # The maximum is NaN or inf if any logit is; it is -inf if all are, and then nothing is drafted.
        finite = best.isfinite().all(-1)
        root_ids = context.root_ids.to(token_ids.device).unsqueeze(1)
        return DraftTree.chain(torch.cat([root_ids, token_ids], 1), finite=finite)
