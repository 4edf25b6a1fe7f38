"""HeadProjections: the projections that the attention layers of all drafters share."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class HeadProjections(nn.Module):
    """Projections into and out of attention heads, named as in Llama and Qwen3. Subclasses compute the attention.

    Args:
        config: with numbers of heads, `head_dim`, `hidden_size`, `attention_bias` and `rms_norm_eps`.
        in_size: input size of the query, key and value projections; the output size is `hidden_size`.
        norms: whether each head's queries and keys are normalised, as in Qwen3.
    """

    def __init__(self, config: PreTrainedConfig, in_size: int, *, norms: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(in_size, heads, bias=bias)
        self.k_proj = nn.Linear(in_size, kv_heads, bias=bias)
        self.v_proj = nn.Linear(in_size, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if norms else nn.Identity()
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if norms else nn.Identity()
