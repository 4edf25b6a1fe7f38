"""Which targets draft trees can be verified on: what is asked of a model before the first token."""

from __future__ import annotations

import functools
import inspect

from transformers import PreTrainedModel

from hf_specdec.decoding.attention import own_implementation
from hf_specdec.decoding.host import attention_of, is_recurrent

ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")
LAYER_TYPES = ("full_attention", "sliding_attention")


def check_supported(model: PreTrainedModel) -> None:
    """Raises ValueError, naming what is missing, if trees cannot be verified on `model`."""
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"Target {name} is an encoder-decoder; speculative decoding needs a decoder-only target.")
    types = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    if "local" in (getattr(config, "attention_layers", None) or ()):
        types.append("local")  # GPT-Neo: its window counts entries, where siblings lie between a node and its past
    if types or is_recurrent(model):
        raise ValueError(
            f"Target {name} has layers of type {types or ['recurrent']}, which are not yet supported: draft trees "
            f"are verified on layers of type {list(LAYER_TYPES)}. Generate without assistant_model."
        )
    if own_implementation(config) not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"Target {name} uses attn_implementation={attention_of(config)!r}, which cannot take the "
            f"ancestor mask of a draft tree; load it with one of {list(ATTENTION_IMPLEMENTATIONS)}."
        )
    if getattr(config, "alibi", False):  # Falcon; Bloom and MPT take no position_ids either
        raise ValueError(
            f"Target {name} has alibi positions, which count entries of the cache, where siblings of a draft tree "
            "lie between a node and its past; not yet supported. Generate without assistant_model."
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(
            f"Target {name} has {config.num_kv_shared_layers} layers that share the keys and values of others "
            "(num_kv_shared_layers), which is not yet supported. Generate without assistant_model."
        )
    if getattr(config, "keep_window_size", None):
        raise ValueError(
            f"Target {name} has sparse attention that keeps {config.keep_window_size} keys of all entries "
            "(keep_window_size), draft nodes among them; not yet supported. Generate without assistant_model."
        )
    accepted = inspect.signature(model.forward).parameters
    if "position_ids" not in accepted:
        raise ValueError(
            f"Target {name} takes no position_ids, so the nodes of a draft tree cannot be placed; speculative "
            "decoding needs a target with position_ids (rotary or learned positions)."
        )


def bound_rows(model: PreTrainedModel) -> int | None:
    """How many rows every forward must have: with PEFT's `adapter_names`, hooks give each row an adapter of its own."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, functools.partial) and "adapter_names" in hook.keywords:
                return len(hook.keywords["adapter_names"])
    return None
