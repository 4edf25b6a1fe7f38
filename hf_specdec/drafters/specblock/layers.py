"""The layers of a SpecBlock drafter: fused input, attention, decoder layer, rank features.

`modeling.py` combines them. Source: SpecBlock, Section 3.1, Eq. 1 to 3, and Appendix B.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from hf_specdec.drafters.attention import HeadProjections
from hf_specdec.drafters.specblock.configuration import SpecBlockConfig


class KeyValueStore(Protocol):
    """The cache of the layers: a `TreeCache`, or at training a list with gradients."""

    layers: Any


class SpecBlockInput(nn.Module):
    """Fuses condition, token and slot query into one state per slot (Eq. 1 and 2)."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.prefix_broadcast = config.prefix_broadcast
        self.norms_draft_condition = config.draft_condition_norm
        self.condition_proj = nn.Linear(config.num_taps * config.target_hidden_size, width, bias=False)
        self.condition_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.token_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.query_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.position_queries = nn.Embedding(config.block_size, width)
        self.fuse = nn.Linear(3 * width, width, bias=False)

    def forward(self, conditions: Tensor, embeddings: Tensor, *, from_target: bool) -> Tensor:
        """Conditions [batch, starts, taps * target_hidden, or hidden] -> [batch, starts, slots, hidden]."""
        if from_target:
            conditions = self.condition_proj(conditions)
        if from_target or self.norms_draft_condition:
            conditions = self.condition_norm(conditions)
        # The prefix is the same for all slots of a start, so it is projected once.
        prefix = torch.cat([conditions, self.token_norm(embeddings)], dim=-1)
        shared, own = self.fuse.weight.split([prefix.shape[-1], conditions.shape[-1]], dim=1)
        prefix = linear(prefix, shared).unsqueeze(2)
        queries = linear(self.query_norm(self.position_queries.weight), own)
        if not self.prefix_broadcast:
            first = torch.zeros(len(queries), 1, dtype=prefix.dtype, device=prefix.device)
            first[0] = 1
            prefix = prefix * first
        return prefix + queries


class SpecBlockAttention(HeadProjections):
    """Attention of all slots of all starts over the cache and each other, as the mask allows."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__(config, config.hidden_size, norms=config.qk_norm)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KeyValueStore | None,
        layer: int,
    ) -> Tensor:
        """[batch, starts * slots, hidden] -> the same; see `SpecBlockDrafter.block_hidden`."""
        batch, length, _ = hidden.shape
        queries = self.q_norm(self.q_proj(hidden).view(batch, length, -1, self.head_dim))
        keys = self.k_norm(self.k_proj(hidden).view(batch, length, -1, self.head_dim))
        values = self.v_proj(hidden).view(batch, length, -1, self.head_dim).transpose(1, 2)
        cos, sin = rotary
        both = torch.cat([queries, keys], 2)  # one rotation for both: on a CPU small operations are mostly overhead
        both = (both * cos + rotate_half(both) * sin).transpose(1, 2)
        queries, keys = both.split([queries.shape[2], keys.shape[2]], 1)
        if cache is not None:
            keys, values = cache.layers[layer].update(keys, values)
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=self.groups > 1
        )
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


class SpecBlockLayer(nn.Module):
    """A Llama decoder layer over the slots of all starts."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        self.self_attn = SpecBlockAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, *attention_inputs: Any) -> Tensor:
        """[batch, starts * slots, hidden] -> the same."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *attention_inputs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def rank_features(logits: Tensor, top: int | None, *, ordered: bool = False) -> Tensor:
    """The 15-number summary of a draft distribution (Appendix B).

    Ten largest log-probabilities; logit gaps of the best to the second, third and fifth; probability of the best;
    entropy. If the vocabulary has fewer than ten tokens, the least likely one is repeated.

    Args:
        logits: [..., draft_vocab] float32, or only the largest of them: `top`, and at least 10.
        top: probabilities and entropy are normalised over this many largest logits; None for all.
        ordered: whether `logits` are the largest ones, in descending order.

    Returns:
        [..., 15] float32, nats.

    Example:
        >>> rank_features(torch.tensor([3.0, 1.0, 0.0]), None)[10:13]
        tensor([2., 3., 3.])
    """
    known = logits.shape[-1]
    best = logits if ordered else logits.topk(min(known, max(10, top or known)), dim=-1).values
    logprobs = best[..., : top or known].log_softmax(-1)
    probs = logprobs.exp()
    normaliser = best[..., :1] - logprobs[..., :1]
    if best.shape[-1] < 10:
        best = torch.cat([best, best[..., -1:].expand(*best.shape[:-1], 10 - best.shape[-1])], dim=-1)
    profile, first = best[..., :10] - normaliser, best[..., :1]
    gaps = first - best[..., 1:3], first - best[..., 4:5]
    entropy = -(probs * logprobs).sum(-1, keepdim=True)
    return torch.cat([profile, *gaps, probs[..., :1], entropy], dim=-1)
