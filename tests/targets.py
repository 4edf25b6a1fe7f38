"""Tiny random targets of every family in the support table, and the inputs they are run on.

Weights are drawn wide, so that greedy continuations do not settle on one token, and windows are shorter than the
prompts, so that a mask that forgets them changes tokens. Nothing here is downloaded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

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
    config_class, own, _ = FAMILIES[family]
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
