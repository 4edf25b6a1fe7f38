"""Which targets draft trees can be verified on: what is asked of a model before the first token."""

from __future__ import annotations

import functools

from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_specdec.decoding.attention import own_implementation
from hf_specdec.decoding.host import (
    CACHE,
    attention_of,
    cache_layers,
    cache_name,
    is_recurrent,
    takes_dynamic_cache,
    takes_positions,
)
from hf_specdec.decoding.layers import standins
from hf_specdec.decoding.layers.kinds import KINDS
from hf_specdec.decoding.once import once_per_model

ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")


class TreesRefusedError(ValueError):
    """Draft trees cannot be verified, for the reason in the message; the host decodes, with chains if it can."""


def check_supported(model: PreTrainedModel) -> None:
    """Raises, naming what is missing, if trees cannot be verified on `model`.

    Raises:
        TreesRefusedError: the host decodes on it, with chains where it can verify them.
        ValueError: it is not decoder-only.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"Target {name} is an encoder-decoder; speculative decoding needs a decoder-only target.")
    if not takes_dynamic_cache(model) or (is_recurrent(model) and not keeps_states(model)):
        raise TreesRefusedError(f"Target {name} keeps what it has read elsewhere than in transformers' DynamicCache")
    types = sorted(set(getattr(config, "layer_types", None) or ()))
    unknown = sorted({type(layer).__name__ for layer in cache_layers(model) if type(layer) not in KINDS})
    if unknown:
        raise TreesRefusedError(f"Target {name} has layers of type {types}, which store what is not known: {unknown}")
    if getattr(config, "keep_window_size", None):
        raise TreesRefusedError(
            f"Target {name} has attention that keeps {config.keep_window_size} of all keys (keep_window_size), and "
            "which ones depends on the order in which equal ones lie in the cache"
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
    counted = types == ["linear_attention"] or standins.counts_entries(model)
    if not takes_positions(model) and not counted:
        raise TreesRefusedError(
            f"Target {name} takes no position_ids, so that the nodes of a draft tree cannot be placed"
        )


@once_per_model
def keeps_states(model: PreTrainedModel) -> bool:
    """Whether layers of a target keep states of a recurrence or convolution, which cannot be cut back."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in cache_layers(model))


@once_per_model
def can_be_cut_back(model: PreTrainedModel) -> bool:
    """Whether tokens can be dropped from what a target stores; else what is kept must run again."""
    known = takes_dynamic_cache(model) and not is_recurrent(model) and not keeps_states(model)
    return known and all(type(layer) in KINDS for layer in cache_layers(model))


def chains_refused(model: PreTrainedModel, max_length: int) -> str | None:
    """Why the host's own loop cannot verify chains on a target either, in texts of that length; None if it can."""
    if cache_name(model) != CACHE:
        return f"that loop knows no caches by the name {cache_name(model)}"
    kept = getattr(model.config.get_text_config(decoder=True), "keep_window_size", None)
    if kept is not None and max_length > kept:
        return f"texts may get {max_length} tokens, where drafted keys would take the places of others"
    return None


def bound_rows(model: PreTrainedModel) -> int | None:
    """How many rows every forward must have: with PEFT's `adapter_names`, hooks give each row an adapter of its own."""
    if getattr(model, "peft_config", None) is None:  # PEFT notes its adapters there; the walk takes as long as a round
        return None
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, functools.partial) and "adapter_names" in hook.keywords:
                return len(hook.keywords["adapter_names"])
    return None
