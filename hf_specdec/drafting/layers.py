"""Attention and decoder layers that several drafters have; parameters are named as in Llama and Qwen3."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from hf_specdec.decoding.targets.attention import attend


class KeyValueStore(Protocol):
    """The cache of the layers: a `TreeCache`, or at training a list with gradients."""

    layers: Any


class HeadProjections(nn.Module):
    """Projections into and out of attention heads. Subclasses compute the attention.

    Args:
        config: with numbers of heads, `head_dim`, `hidden_size`, `attention_bias` and `rms_norm_eps`.
        in_size: input size of the query, key and value projections; the output size is `hidden_size`.
        norms: whether each head's queries and keys are normalised, as in Qwen3.
    """

    def __init__(self, config: PreTrainedConfig, in_size: int, *, norms: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(in_size, heads, bias=bias)
        self.k_proj = nn.Linear(in_size, kv_heads, bias=bias)
        self.v_proj = nn.Linear(in_size, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if norms else nn.Identity()
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if norms else nn.Identity()


class CachedAttention(HeadProjections):
    """Attention over cached entries and those of this forward, as the mask allows."""

    def forward(
        self,
        inputs: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        is_causal: bool,
        cache: KeyValueStore | None,
        layer: int,
    ) -> Tensor:
        """[batch, seq, in_size] -> [batch, seq, hidden].

        Args:
            inputs: of the projections.
            rotary: cos and sin, [batch, seq, 1, head_dim].
            mask: [batch, 1, seq, cached + seq], or None.
            is_causal: causal attention without a mask; only for an empty cache or none.
            cache: holds earlier entries; those of this forward are appended.
            layer: index in the cache.
        """
        batch, seq, _ = inputs.shape
        queries = self.q_norm(self.q_proj(inputs).view(batch, seq, -1, self.head_dim))
        keys = self.k_norm(self.k_proj(inputs).view(batch, seq, -1, self.head_dim))
        values = self.v_proj(inputs).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        cos, sin = rotary
        both = torch.cat([queries, keys], 2)  # one rotation for both: on a CPU small operations are mostly overhead
        both = (both * cos + rotate_half(both) * sin).transpose(1, 2)
        queries, keys = both.split([queries.shape[2], keys.shape[2]], 1)
        if cache is not None:
            keys, values = cache.layers[layer].update(keys, values)
        return self.o_proj(attend(queries, keys, values, mask, is_causal=is_causal).flatten(2))


class DraftLayer(nn.Module):
    """A Llama decoder layer, with norms on queries and keys if the config has `qk_norm`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = CachedAttention(config, config.hidden_size, norms=config.qk_norm)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, *attention_inputs: Any) -> Tensor:
        """[batch, seq, hidden] -> the same; the other arguments as for `CachedAttention`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *attention_inputs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
