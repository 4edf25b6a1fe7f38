"""Attention of a draft tree's nodes, registered with the host's `AttentionInterface` and used while a tree is verified.

The host's sdpa copies the cache's keys and values once per query head whenever there is a mask. On a CPU torch's own
kernel takes grouped heads and the mask together, with bit for bit the host's result, so the copies are saved there.
Other devices keep the host's attention.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.host import attention_of, cache_layers, looks_attention_up, set_attention

TREE_ATTENTION = "hf_specdec_tree"


def usable(model: PreTrainedModel) -> bool:
    """Whether a target's trees are verified with this attention; the host's own is used otherwise.

    The rule, all of it known before the first token: its device gains by it, the target uses sdpa (eager stays eager:
    who asked for it wants its arithmetic, and soft caps and sinks exist only there), looks its attention up in the
    host's interface, and all its layers share one config, by which the lookup is made. Layers with an indexer compare
    the name of the attention with those that they know.
    """
    config = model.config.get_text_config(decoder=True)
    return (
        abilities(model.device).groups_heads
        and own_implementation(config) == "sdpa"
        and looks_attention_up(model)
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(isinstance(layer, DynamicIndexedLayer) for layer in cache_layers(model))
        and _layers_share(model, config)
    )


def _layers_share(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether all layers with grouped heads read this very config; looked up once per model: it walks all modules."""
    known = _SHARED.get(model)
    if known is None or known[0]() is not config:
        layers = [module for module in model.modules() if hasattr(module, "num_key_value_groups")]
        share = bool(layers) and all(layer.config is config for layer in layers)
        known = _SHARED[model] = (weakref.ref(config), share)
    return known[1]


_SHARED: weakref.WeakKeyDictionary[PreTrainedModel, tuple[weakref.ref[PreTrainedConfig], bool]] = (
    weakref.WeakKeyDictionary()
)


class tree_attention:  # noqa: N801  (a context like `torch.no_grad`; quicker than one made from a generator)
    """Forwards of the model with this text config use this attention meanwhile; only for models that are `usable`.

    Several threads may be in it at a time with one config; the last to leave puts back what the first has found.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.key, self.config = id(config), config

    def __enter__(self) -> None:
        with _IN_USE_LOCK:
            found = set_attention(self.config, TREE_ATTENTION)
            users, before = _IN_USE.get(self.key, (0, found))
            _IN_USE[self.key] = users + 1, before

    def __exit__(self, *error: object) -> None:
        with _IN_USE_LOCK:
            users, before = _IN_USE.pop(self.key)
            if users > 1:
                _IN_USE[self.key] = users - 1, before
            else:
                set_attention(self.config, before)


# By the id of a config: how many are in `tree_attention`, and what was there before.
_IN_USE: dict[int, tuple[int, str]] = {}
_IN_USE_LOCK = threading.Lock()


def own_implementation(config: PreTrainedConfig) -> str | None:
    """The attention that a target's text config asks for, whoever verifies trees with it at the moment."""
    in_use = _IN_USE.get(id(config))
    return attention_of(config) if in_use is None else in_use[1]


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What the host calls in each layer.

    Args:
        module: the attention layer.
        query: [batch, heads, nodes, head_dim].
        key: [batch, kv_heads, entries, head_dim].
        value: [batch, kv_heads, entries, value_dim].
        attention_mask: additive [batch, 1, nodes, entries]; anything else is the host's matter.
        dropout: as the host gives it.
        scaling: of the scores; head_dim ** -0.5 where omitted.
        kwargs: what else the host passes on.

    Returns:
        [batch, nodes, heads, value_dim], and no weights.
    """
    if attention_mask is None or dropout or not attention_mask.dtype.is_floating_point or "position_bias" in kwargs:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
