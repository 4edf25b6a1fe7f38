"""DFlashDrafter: a block-diffusion drafter that fills a whole block of masked slots in one forward.

Each layer's queries come from the block only. Its keys and values come from the target's features of committed tokens
(fused once, cached across rounds) and from the block. Embedding and head are the target's. Source: z-lab/dflash; shared
facts on formats, section 1.5. The state of a `generate` call is in `candidates.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.logits_process import (
    NeverProposedLogitsProcessor,
    SoftCapLogitsProcessor,
    TargetVocabularyLogitsProcessor,
)
from hf_specdec.decoding.modules import apply_head, has_plain_weight, home_of
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.attention import HeadProjections
from hf_specdec.drafters.dflash.configuration import DFlashConfig, DFlashOptions
from hf_specdec.drafters.options import TreeOptions
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.registry import MARGINAL_METHODS, name_of
from hf_specdec.drafters.shapes import check_shapes, way_out
from hf_specdec.drafters.vocabulary import HeadRows, check_draft_to_target, known_ids, set_map


def block_embeddings(model: PreTrainedModel) -> nn.Module:
    """The embedding of block tokens, for drafters that share the target's.

    This is the target's own embedding, with its scale (Gemma) but without a norm after the table (Muse Glimmer's
    `embed_norm`): all DFlash drafters of that target were trained on the table itself.
    """
    embeddings = model.get_input_embeddings()
    if not hasattr(embeddings, "embed_norm"):
        return embeddings
    if not has_plain_weight(embeddings):
        raise ValueError(
            f"The drafter reads the table of {type(embeddings).__name__} in target {type(model).__name__} without its "
            "norm, but that table is offloaded or quantised. Keep the target's embeddings in memory in a "
            "floating-point type."
        )
    return nn.Embedding.from_pretrained(embeddings.weight.detach())  # shares the memory


class DFlashAttention(HeadProjections):
    """Attention of block slots over [cached context ; new context ; block]."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config, config.hidden_size, norms=True)

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: TreeCache | None,
        layer: int,
    ) -> Tensor:
        """[batch, block, hidden] x [batch, new, hidden] -> [batch, block, hidden]; see `DFlashDrafter.forward`."""
        batch, slots, _ = block.shape
        both = torch.cat([context, block], dim=1)
        queries = self.q_norm(self.q_proj(block).view(batch, slots, -1, self.head_dim)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(both).view(batch, both.shape[1], -1, self.head_dim)).transpose(1, 2)
        values = self.v_proj(both).view(batch, both.shape[1], -1, self.head_dim).transpose(1, 2)
        cos, sin = (part.unsqueeze(1) for part in rotary)
        queries = queries * cos[:, :, -slots:] + rotate_half(queries) * sin[:, :, -slots:]
        keys = keys * cos + rotate_half(keys) * sin
        if cache is not None:
            keys, values = cache.layers[layer].update(keys, values)
        attended = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=self.groups > 1
        )
        return self.o_proj(attended.transpose(1, 2).reshape(batch, slots, -1))


class DFlashLayer(nn.Module):
    """A Qwen3 decoder layer on the block. The context enters the attention directly, without this layer's norm."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, block: Tensor, context: Tensor, *attention_inputs: Any) -> Tensor:
        """[batch, block, hidden] -> [batch, block, hidden]."""
        block = block + self.self_attn(self.input_layernorm(block), context, *attention_inputs)
        return block + self.mlp(self.post_attention_layernorm(block))


class DFlashDrafter(PretrainedDrafter):
    """A DFlash checkpoint as a drafter: `method="dflash"` drafts its greedy chain, `"ddtree"` the best-first tree.

    Drafting options: `DFlashOptions`.
    """

    config_class: type[DFlashConfig] = DFlashConfig
    config: DFlashConfig
    options_class: ClassVar[type[TreeOptions]] = DFlashOptions
    options: DFlashOptions
    d2t: Tensor
    base_model_prefix = ""
    _no_split_modules: ClassVar = ["DFlashLayer"]
    layer_class: ClassVar[type[DFlashLayer]] = DFlashLayer
    # Some savers write this buffer, which is computed from the config.
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"rotary_emb\.inv_freq$"]

    def __init__(self, config: DFlashConfig) -> None:
        config.check()
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([self.layer_class(config) for _ in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if config.own_embeddings:
            assert config.vocab_size is not None, "check() requires it"
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.maps_vocabulary:
            # As published: target id = draft id + d2t[draft id].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        # The selected rows of a target's head, reused between calls, with a key that identifies the head's weights.
        self._head_rows: tuple[Any, HeadRows] | None = None
        self.post_init()

    def forward(
        self,
        block_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        *,
        embed_tokens: nn.Module,
        masks: Sequence[Tensor | None] | None = None,
        cache: TreeCache | None = None,
        lm_head: nn.Module | None = None,
    ) -> Tensor:
        """Predicts the tokens at a block's positions.

        Args:
            block_ids: [batch, block] int64, root, mask, mask, ..., on the device of `embed_tokens`.
            features: [batch, new, taps * hidden], target features of the tokens committed since the last forward.
            position_ids: [batch, new + block] int64, of the new features and then of the block's slots.
            embed_tokens: the embedding of the block's tokens, usually the target's.
            masks: per layer None or additive [batch, 1, block, cached + new + block]; None for no masks.
            cache: holds earlier features' keys and values; those of the new features and of the block are appended.
            lm_head: the head to apply, from `head()`.

        Returns:
            [batch, block, hidden] after the final norm, or with `lm_head` [batch, block - 1, vocab] float32 logits of
            slots 1, 2, ...: slot k predicts the token k positions after the root. With `sample_from_anchor` [batch,
            block, vocab] logits of all slots: slot k predicts the token k + 1 positions after the root. The mask token
            gets -inf: a target may be able to emit it, but the drafter was never trained to predict it.
        """
        context = self.hidden_norm(self.fc(features))
        if self.config.own_embeddings:  # the target may have tokens that this table lacks
            block_ids = known_ids(block_ids, self.embed_tokens.num_embeddings)
        hidden = self.embed(block_ids, embed_tokens).to(self.norm.weight)
        rotary = self.rotary_emb(hidden, position_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, context, rotary, masks[index] if masks else None, cache, index)
        hidden = self.norm(hidden)
        if lm_head is None:
            return hidden
        logits = self.draft_logits(hidden[:, self.config.first_slot :], lm_head)
        if self.config.maps_vocabulary:
            assert self.config.vocab_size is not None, "check() requires it"
            logits = TargetVocabularyLogitsProcessor(self.config.vocab_size, self.target_ids.to(logits.device))(
                None, logits
            )
        return NeverProposedLogitsProcessor(self.config.mask_token_id)(None, logits)

    def embed(self, block_ids: Tensor, embed_tokens: nn.Module) -> Tensor:
        """[batch, block] int64 -> [batch, block, hidden], the input of the first draft layer."""
        embedded: Tensor = embed_tokens(block_ids.to(home_of(embed_tokens)))
        return embedded

    def draft_logits(self, hidden: Tensor, lm_head: nn.Module) -> Tensor:
        """[..., hidden] after the final norm -> [..., draft_vocab] float32, in draft ids."""
        logits = apply_head(lm_head, hidden)
        return SoftCapLogitsProcessor(self.config.final_logit_softcapping)(None, logits)

    def head(self, target_head: nn.Module) -> nn.Module:
        """The head for its slots: its own, the target's, or the rows of the target's in the draft vocabulary."""
        if self.config.own_head:
            return self.lm_head
        if not self.config.maps_vocabulary:
            return target_head
        weight: Any = target_head.weight if has_plain_weight(target_head) else self.d2t
        key = (id(target_head), weight.device, weight.data_ptr(), weight._version, self.d2t._version)
        if self._head_rows is None or self._head_rows[0] != key:
            self._head_rows = key, HeadRows(target_head, self.target_ids)
        return self._head_rows[1]

    @property
    def target_ids(self) -> Tensor:
        """[draft_vocab] int64, the target's ids of the tokens that can be drafted."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return ids + self.d2t if self.config.maps_vocabulary else ids

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Sets the draft vocabulary to these ids of the target, see `vocabulary.set_map`."""
        assert self.config.vocab_size is not None, "check() requires it"
        set_map(self.d2t, target_ids, self.config.vocab_size, name_of(self))

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return tuple(self.config.target_layer_ids)

    @property
    def num_slots(self) -> int:
        """Slots of a block, root included: `options.block_size`, or the trained number."""
        trained: int = self.config.block_size  # type: ignore[assignment]  # check() requires it
        return self.options.block_size or trained

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(MARGINAL_METHODS)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        from hf_specdec.drafters.dflash.candidates import DFlashMarginals

        return MARGINAL_METHODS[self.method](DFlashMarginals(self, target), self.options)

    def card_summary(self) -> str:
        return (
            "A DFlash drafter: it fills a block of masked slots in one forward, from the hidden states of the target, "
            "and shares the target's embeddings and head. hf_specdec drafts with it either the likeliest tree "
            '(`method="ddtree"`, the default) or one chain (`method="dflash"`).'
        )

    def card_facts(self) -> dict[str, str]:
        config = self.config
        return {
            "Method": f"{self.loaded_options().method}, on a DFlash drafter",
            "Layers": f"{config.num_hidden_layers}, hidden size {config.hidden_size}",
            "Block size": f"{config.block_size}, the root's slot included",
            "Target layers read": ", ".join(map(str, config.target_layer_ids)),
            "Vocabulary": f"{config.draft_vocab_size or 'of the target'}, mask token id {config.mask_token_id}",
        }

    def check_target(self, model: PreTrainedModel) -> None:
        config = self.config
        check_shapes(
            self,
            model,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_layers=config.num_target_layers,
            layers=config.target_layer_ids,
            first_layer=-1,
        )
        name = name_of(self)
        rows = model.get_input_embeddings().num_embeddings
        shared = min(config.vocab_size or rows, rows)
        if config.maps_vocabulary:
            check_draft_to_target(self.d2t, shared, name)
        if not 0 <= config.mask_token_id < shared:
            target_name = name_of(model)
            raise ValueError(
                f"Drafter {name!r} uses mask_token_id {config.mask_token_id}, but target {target_name!r} has only "
                f"{shared} embeddings. {way_out(self)}"
            )
