"""Tiny random targets of every family in the support table, and the inputs they are run on.

Weights are drawn wide, so that greedy continuations do not settle on one token, and windows are shorter than the
prompts, so that a mask that forgets them changes tokens. Nothing here is downloaded.
"""

from __future__ import annotations

import functools
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations import peft as peft_integration

# Faults of the oldest supported transformers, in plain decoding or in what a trial then refuses.
IN_OLDEST = transformers.__version__.startswith("5.17.")
# transformers 5.24 takes adapters into its own models only from PEFT 0.22, which is not published yet.
needs_own_adapters = pytest.mark.skipif(
    Version(peft.__version__) < Version(getattr(peft_integration, "MIN_PEFT_VERSION", "0")),
    reason=f"transformers {transformers.__version__} refuses adapters of PEFT {peft.__version__}",
)

VOCAB = 64
PAD, EOS = 0, 2
WINDOW = 6

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,  # tied, a random model repeats its input
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_MIXED = ["full_attention", "sliding_attention"] * 2
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# family: (config class, settings beyond the common shape, attention implementations)
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaConfig", {}, ("eager", "sdpa")),
    "mistral-sliding": ("MistralConfig", {"sliding_window": WINDOW}, ("eager", "sdpa")),
    "qwen2": ("Qwen2Config", {}, ("eager", "sdpa")),
    "qwen2-mixed": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        ("eager", "sdpa"),
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 8}, ("eager", "sdpa")),
    "qwen3-mixed": (
        "Qwen3Config",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED},
        ("eager", "sdpa"),
    ),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "layer_types": _MIXED},
        ("eager",),  # its soft-capping exists in eager attention only
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "layer_types": _MIXED},
        ("eager", "sdpa"),
    ),
    "phi3-sliding": ("Phi3Config", {"sliding_window": WINDOW}, ("eager", "sdpa")),
    "olmo2": ("Olmo2Config", {}, ("eager", "sdpa")),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "logits_scaling": 3.0, "attention_multiplier": 0.3},
        ("eager", "sdpa"),
    ),
    "gpt-neox": ("GPTNeoXConfig", {"initializer_range": 0.8}, ("eager", "sdpa")),
    "gpt2": ("GPT2Config", {}, ("eager", "sdpa")),
    "cohere2": ("Cohere2Config", {"sliding_window": WINDOW, "layer_types": _MIXED}, ("eager", "sdpa")),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 8, **_EXPERTS}, ("eager", "sdpa")),
    "mixtral-sliding": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        ("eager", "sdpa"),
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
        },
        ("eager",),  # attention sinks exist in eager attention only
    ),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3}, ("eager", "sdpa")),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1, 0]}, ("eager", "sdpa")),
    "starcoder2-sliding": ("Starcoder2Config", {"sliding_window": WINDOW}, ("eager", "sdpa")),
}

_LINEAR = ["linear_attention", "full_attention"] * 2
_DELTA = {
    "head_dim": 8,
    "layer_types": _LINEAR,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}
_MAMBA = {
    "mamba_chunk_size": 16,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
}
_KDA = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_SHARING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "head_dim": 8}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "sliding_window": WINDOW}

# Of layers that are no attention, or share what others store: in the same form.
HYBRIDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "qwen3-next": (
        "Qwen3NextConfig",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24},
        ("eager", "sdpa"),
    ),
    "qwen3.5": ("Qwen3_5TextConfig", _DELTA, ("eager", "sdpa")),
    "olmo-hybrid": ("OlmoHybridConfig", {**_DELTA, "linear_num_key_heads": 4}, ("eager", "sdpa")),
    "kimi-linear": (
        "KimiLinearConfig",
        {
            **_EXPERTS,
            **_LATENT,
            "layer_types": _LINEAR,
            "linear_attn_config": _KDA,
            "num_experts_per_token": 2,
            "num_key_value_heads": 4,
        },
        ("eager", "sdpa"),
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            "chunk_size": 16,
            "conv_kernel": 4,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "mlp"],
            "mamba_head_dim": 16,
            "mamba_num_heads": 4,
            "n_groups": 1,
            "ssm_state_size": 8,
        },
        ("eager", "sdpa"),
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "layer_types": _LINEAR,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "shared_intermediate_size": 32,
        },
        ("eager", "sdpa"),
    ),
    "bamba": ("BambaConfig", {**_MAMBA, "attn_layer_indices": [1, 3]}, ("eager", "sdpa")),
    "falcon-h1": ("FalconH1Config", {**_MAMBA, "head_dim": 8, "mamba_d_ssm": 64}, ("eager", "sdpa")),
    "zamba2": (
        "Zamba2Config",
        {
            "attention_head_dim": 16,
            "attention_hidden_size": 64,
            "chunk_size": 16,
            "hybrid_layer_ids": [1, 3],
            "layer_types": ["linear_attention", "hybrid"] * 2,
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "num_key_value_heads": 4,
            "num_mem_blocks": 1,
        },
        ("eager", "sdpa"),
    ),
    "zamba": (  # its mixers call their function once per head, so that they step from node to node
        "ZambaConfig",
        {
            "attention_head_dim": 16,
            "attention_hidden_size": 64,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "mamba_expand": 2,
            "n_mamba_heads": 2,
            "num_key_value_heads": 4,
            "use_mamba_kernels": False,
        },
        ("eager", "sdpa"),
    ),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "mamba_expand": 2,
            "num_experts": 4,
            "use_mamba_kernels": False,
        },
        ("eager", "sdpa"),
    ),
    "lfm2": (
        "Lfm2Config",
        {"block_auto_adjust_ff_dim": False, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2},
        ("eager", "sdpa"),
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_SHARING,
            **_PER_LAYER,
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_active_idx": 0,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
        },
        ("eager", "sdpa"),
    ),
    "gemma4": ("Gemma4TextConfig", {**_SHARING, **_PER_LAYER, "global_head_dim": 8}, ("eager", "sdpa")),
    "mamba": ("MambaConfig", {"conv_kernel": 4, "expand": 2, "state_size": 8, "time_step_rank": 4}, ("eager",)),
    "mamba2": (
        "Mamba2Config",
        {
            "chunk_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "head_dim": 16,
            "n_groups": 1,
            "num_heads": 4,
            "state_size": 8,
        },
        ("eager",),
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "floor_scale": 8,  # queries are scaled anew every so many tokens
            "head_dim": 8,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0, 1, 0],
            "num_local_experts": 2,
        },
        ("eager", "sdpa"),
    ),
    "deepseek-v3.2": (
        "DeepseekV32Config",
        {
            **_LATENT,
            "index_head_dim": 16,
            # With few heads, or behind an embedding of zeros, scores are exactly 0, and which of equal ones count is by
            # chance.
            "index_n_heads": 32,
            "pad_token_id": None,
            "index_topk": 8,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "topk_group": 1,
        },
        ("eager", "sdpa"),
    ),
    "bloom": ("BloomConfig", {"n_head": 4, "n_layer": 4}, ("eager",)),
    "falcon-alibi": ("FalconConfig", {"alibi": True}, ("eager", "sdpa")),
    "bart": (
        "BartConfig",
        {
            "d_model": 32,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "decoder_layers": 4,
            "init_std": 0.6,
            "is_decoder": True,
            "is_encoder_decoder": False,
            "scale_embedding": True,
        },
        ("eager", "sdpa"),
    ),
}
# Those that keep states.
STATEFUL = [
    *("qwen3-next", "qwen3.5", "olmo-hybrid", "kimi-linear", "nemotron-h", "granite-hybrid", "bamba", "falcon-h1"),
    *("zamba2", "jamba", "lfm2", "mamba", "mamba2"),
]


@functools.cache
def make_target(
    family: str = "llama",
    attention: str = "eager",
    dtype: torch.dtype = torch.float64,
    seed: int = 3,
    **settings: Any,
) -> PreTrainedModel:
    """A tiny random target. Tests share it, so they must leave it as they found it (`fresh_target` for the others)."""
    return fresh_target(family, attention, dtype, seed, **settings)


def fresh_target(
    family: str = "llama",
    attention: str = "eager",
    dtype: torch.dtype = torch.float64,
    seed: int = 3,
    **settings: Any,
) -> PreTrainedModel:
    """A tiny random target of one's own."""
    config_class, own, _ = (FAMILIES | HYBRIDS)[family]
    config = getattr(transformers, config_class)(**{**_SHAPE, **own, **settings})
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the grouped kernels know no float64
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases start as ones and zeros, which hides whether they are used
            parameter.data += 0.2 * torch.randn_like(parameter)
    # The special tokens are the tests' business: an end of text that comes by itself would cut most runs short.
    model.generation_config.update(pad_token_id=PAD, eos_token_id=None, bos_token_id=None)
    return model.eval()


def one_prompt(vocab: int = VOCAB, length: int = 9) -> dict[str, Tensor]:
    """A batch of one without padding."""
    ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ragged_prompts(vocab: int = VOCAB) -> dict[str, Tensor]:
    """A batch of three prompts of 9, 4 and 7 tokens, left-padded."""
    ids = torch.randint(3, vocab, (3, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :2] = 0
    return {"input_ids": ids.where(mask.bool(), PAD), "attention_mask": mask}


PROMPTS = {"batch of one": one_prompt, "ragged batch of three": ragged_prompts}


@functools.cache
def tiny_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Ids 0 to 25 are letters, the others pairs of letters ("ar", "by", ...); texts are joined without spaces."""
    letters = [chr(97 + index) for index in range(26)]
    words = [
        *letters,
        *(f"{letters[index % 26]}{letters[(5 * index + index // 26) % 26]}" for index in range(vocab - 26)),
    ]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    assert tokenizer.get_vocab_size() == vocab
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="a", unk_token="a")
