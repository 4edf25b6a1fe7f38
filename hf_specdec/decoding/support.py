"""Which targets draft trees can be verified on: what is asked of a model before the first token."""

from __future__ import annotations

import functools
import inspect

from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_specdec.decoding.attention import own_implementation
from hf_specdec.decoding.host import attention_of, cache_layers, is_recurrent
from hf_specdec.decoding.layers.kinds import KINDS

ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")
LAYER_TYPES = ("full_attention", "sliding_attention")


class TreesRefusedError(ValueError):
    """Draft trees cannot be verified, for the reason in the message; the host's own loop can verify chains."""


def check_supported(model: PreTrainedModel) -> None:
    """Raises, naming what is missing, if trees cannot be verified on `model`.

    Raises:
        TreesRefusedError: the host's own loop can verify chains on it.
        ValueError: the host's own loop cannot either.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"Target {name} is an encoder-decoder; speculative decoding needs a decoder-only target.")
    types = sorted(set(getattr(config, "layer_types", None) or ()))
    unknown = sorted({type(layer).__name__ for layer in cache_layers(model) if type(layer) not in KINDS})
    if unknown or (is_recurrent(model) and not keeps_states(model)):
        raise ValueError(
            f"Target {name} keeps {unknown or ['recurrent states']} of layers of type {types}, which are not yet "
            "supported. Generate without assistant_model."
        )
    if "chunked_attention" in types:
        raise TreesRefusedError(
            f"Target {name} has layers of type {types}; draft trees are verified on layers of type {list(LAYER_TYPES)}"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise TreesRefusedError(
            f"Target {name} has attention layers of type 'local', whose window counts entries of the cache, where "
            "siblings of a draft tree lie between a node and its past"
        )
    if own_implementation(config) not in ATTENTION_IMPLEMENTATIONS:
        raise TreesRefusedError(
            f"Target {name} uses attn_implementation={attention_of(config)!r}, which cannot take the ancestor mask of "
            f"a draft tree; {list(ATTENTION_IMPLEMENTATIONS)} can"
        )
    if getattr(config, "alibi", False):  # Falcon; Bloom and MPT take no position_ids either
        raise TreesRefusedError(
            f"Target {name} has alibi positions, which count entries of the cache, where siblings of a draft tree "
            "lie between a node and its past"
        )
    if getattr(config, "keep_window_size", None):
        raise ValueError(
            f"Target {name} has sparse attention that keeps {config.keep_window_size} keys of all entries "
            "(keep_window_size), drafted ones among them, in trees and in chains; not yet supported. Generate without "
            "assistant_model."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise TreesRefusedError(
            f"Target {name} takes no position_ids, so that the nodes of a draft tree cannot be placed"
        )


def keeps_states(model: PreTrainedModel) -> bool:
    """Whether layers of a target keep states of a recurrence or convolution, which cannot be cut back."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in cache_layers(model))


def bound_rows(model: PreTrainedModel) -> int | None:
    """How many rows every forward must have: with PEFT's `adapter_names`, hooks give each row an adapter of its own."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, functools.partial) and "adapter_names" in hook.keywords:
                return len(hook.keywords["adapter_names"])
    return None
