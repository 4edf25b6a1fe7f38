"""Which targets can verify draft trees: the checks of a model before the first token."""

from __future__ import annotations

import functools

from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_specdec.decoding import upstream
from hf_specdec.decoding.once import once_per_model
from hf_specdec.decoding.targets import standins
from hf_specdec.decoding.targets.attention import own_implementation
from hf_specdec.decoding.targets.kinds import KINDS

ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")


class TreesRefusedError(ValueError):
    """Draft trees cannot be verified; the message says why. transformers' loop decodes, with chains if it can."""


def check_supported(model: PreTrainedModel) -> None:
    """Checks that `model` can verify trees.

    Raises:
        TreesRefusedError: it cannot; transformers' loop decodes, with chains if it can verify them.
        ValueError: it is not decoder-only.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ValueError(f"Target {name} is an encoder-decoder; speculative decoding needs a decoder-only target.")
    if not upstream.takes_dynamic_cache(model) or (upstream.is_recurrent(model) and not keeps_states(model)):
        raise TreesRefusedError(f"Target {name} stores its keys, values or states outside transformers' DynamicCache")
    types = sorted(set(getattr(config, "layer_types", None) or ()))
    unknown = sorted({type(layer).__name__ for layer in upstream.cache_layers(model) if type(layer) not in KINDS})
    if unknown:
        raise TreesRefusedError(f"Target {name} has layers of type {types} with unsupported cache layers: {unknown}")
    if getattr(config, "keep_window_size", None):
        raise TreesRefusedError(
            f"Target {name} has attention that keeps {config.keep_window_size} of all keys (keep_window_size), and "
            "which ones it keeps depends on the order of equal keys in the cache"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise TreesRefusedError(
            f"Target {name} has attention layers of type 'local', whose window counts entries of the cache, and "
            "siblings in a draft tree are stored between a node and its ancestors"
        )
    if own_implementation(config) not in ATTENTION_IMPLEMENTATIONS:
        raise TreesRefusedError(
            f"Target {name} uses attn_implementation={own_implementation(config)!r}, which cannot take the ancestor "
            f"mask of a draft tree; {list(ATTENTION_IMPLEMENTATIONS)} can"
        )
    counted = types == ["linear_attention"] or standins.counts_entries(model)
    if not upstream.takes_positions(model) and not counted:
        raise TreesRefusedError(
            f"Target {name} takes no position_ids, so the nodes of a draft tree cannot get their positions"
        )


@once_per_model
def keeps_states(model: PreTrainedModel) -> bool:
    """Whether layers of a target keep states of a recurrence or convolution, which cannot be cropped."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in upstream.cache_layers(model))


@once_per_model
def can_be_cut_back(model: PreTrainedModel) -> bool:
    """Whether transformers can crop a target's cache; otherwise accepted tokens must run again."""
    known = upstream.takes_dynamic_cache(model) and not upstream.is_recurrent(model) and not keeps_states(model)
    return known and all(type(layer) in KINDS for layer in upstream.cache_layers(model))


def why_chains_are_refused(model: PreTrainedModel, max_length: int) -> str | None:
    """Why transformers' own loop cannot verify chains on a target, in texts of up to that length; None if it can."""
    if upstream.cache_name(model) != upstream.CACHE:  # Mamba, before transformers 5.24
        return f"that loop does not support caches in the argument {upstream.cache_name(model)}"
    kept = getattr(model.config.get_text_config(decoder=True), "keep_window_size", None)
    if kept is not None and max_length > kept:
        return f"texts of up to {max_length} tokens exceed keep_window_size={kept}: drafted keys would replace others"
    return None


def ignores_cache(model: PreTrainedModel) -> bool:
    """Whether layers ignore the cache: they do in training mode with gradient checkpointing."""
    return model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def bound_rows(model: PreTrainedModel) -> int | None:
    """The number of rows that every forward must have: PEFT's `adapter_names` selects an adapter per row; else None."""
    if getattr(model, "peft_config", None) is None:  # avoids visiting all modules, which takes as long as a round
        return None
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, functools.partial) and "adapter_names" in hook.keywords:
                return len(hook.keywords["adapter_names"])
    return None
