"""Attention for the nodes of a draft tree, registered with `AttentionInterface` of transformers, for verification.

`attend` serves drafters too.

If there is a mask and several queries, transformers' sdpa copies keys and values for every query head. On a CPU,
torch's kernel supports grouped heads together with a mask and, in float32, gives bitwise the same result, so that no
copies are needed. On CUDA that depends on kernel and version, and in bfloat16 the CPU's kernel is slow with few
queries: there the query heads of a group become further queries of its key head (`_fold_heads`), which every kernel
supports. On other devices targets use transformers' attention.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.targets.nodes import NodesOfRound, current_nodes
from hf_specdec.decoding.upstream import attention_of, cache_layers, looks_attention_up, set_attention

TREE_ATTENTION = "hf_specdec_tree"
# Dtypes in which a CPU takes up to 5 times as long for grouped heads as for as many further queries of one head.
_SLOW_GROUPS = (torch.bfloat16, torch.float16)


def usable(model: PreTrainedModel) -> bool:
    """Whether a target's trees are verified with this attention; otherwise with transformers' own.

    The conditions are known before the first token: it is faster on the device; the target uses sdpa (a target with
    eager attention keeps it: the user chose its arithmetic, and only eager has soft caps and sinks); the target looks
    its attention up in transformers' interface; all its layers share one config, which the look-up reads; and no layer
    has an indexer, because indexers accept only known names of attention implementations.
    """
    config, device = model.config.get_text_config(decoder=True), abilities(model.device)
    return (
        (device.groups_heads or device.folds_heads)
        and own_implementation(config) == "sdpa"
        and looks_attention_up(model)
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(isinstance(layer, DynamicIndexedLayer) for layer in cache_layers(model))
        and _layers_share(model, config)
    )


def _layers_share(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether all layers with grouped heads refer to this config object. Cached, since it visits all modules."""
    known = _SHARED.get(model)
    if known is None or known[0]() is not config:
        layers = [module for module in model.modules() if hasattr(module, "num_key_value_groups")]
        share = bool(layers) and all(layer.config is config for layer in layers)
        known = _SHARED[model] = (weakref.ref(config), share)
    return known[1]


_SHARED: weakref.WeakKeyDictionary[PreTrainedModel, tuple[weakref.ref[PreTrainedConfig], bool]] = (
    weakref.WeakKeyDictionary()
)


class tree_attention:  # noqa: N801  (a context like `torch.no_grad`; faster than a generator-based one)
    """In this context, forwards of the model with this text config use this attention; the model must be `usable`.

    Several threads may use it at the same time with one config; the last one to leave restores the original value.
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


# By the id of a config: the number of users of `tree_attention`, and the original attention implementation.
_IN_USE: dict[int, tuple[int, str]] = {}
_IN_USE_LOCK = threading.Lock()


def own_implementation(config: PreTrainedConfig) -> str | None:
    """The attention that a target's text config asks for, also while `tree_attention` replaces it."""
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
    """The attention function that transformers calls in each layer.

    Args:
        module: the attention layer.
        query: [batch, heads, nodes, head_dim].
        key: [batch, kv_heads, entries, head_dim].
        value: [batch, kv_heads, entries, value_dim].
        attention_mask: additive [batch, 1, nodes, entries]; for anything else transformers' sdpa runs.
        dropout: from transformers; if not 0, transformers' sdpa runs.
        scaling: of the scores; head_dim ** -0.5 if omitted.
        kwargs: other arguments of transformers.

    Returns:
        [batch, nodes, heads, value_dim], and None in place of attention weights.
    """
    nodes = current_nodes()
    if nodes is not None and nodes.alone:
        return attend_alone(module, query, key, value, nodes, dropout=dropout, scaling=scaling, **kwargs), None
    if attention_mask is None or dropout or not attention_mask.dtype.is_floating_point or "position_bias" in kwargs:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return attend(query, key, value, attention_mask, scaling=scaling).contiguous(), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention with grouped heads, without copies of keys and values where the device allows it.

    Args:
        query: [batch, heads, nodes, head_dim].
        key: [batch, kv_heads, entries, head_dim].
        value: [batch, kv_heads, entries, value_dim].
        mask: [batch, 1, nodes, entries], additive or bool (True = may attend); None for no mask.
        scaling: of the scores; head_dim ** -0.5 if None.
        is_causal: causal attention without a mask.

    Returns:
        [batch, nodes, heads, value_dim], not always contiguous.
    """
    _, kv_heads, _, head_dim = key.shape
    grouped = query.shape[1] != kv_heads
    small = query.shape[2] < 2 * kv_heads * head_dim  # the mask repeated, compared with keys and values repeated
    able = abilities(query.device)
    folds = able.folds_heads or (able.groups_heads and query.dtype in _SLOW_GROUPS)
    if mask is not None and grouped and small and folds:
        return _fold_heads(query, key, value, mask, scaling)
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scaling, enable_gqa=grouped
    )
    return attended.transpose(1, 2)


def _fold_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """The heads of a group as queries of one head, for kernels without grouped heads; see `attend`.

    All heads share the mask, so that query head h at node i is query (h % groups) * nodes + i of key head h // groups.
    Keys and values are read in place; query, mask and output, which are small, are copied instead.
    """
    heads, nodes = query.shape[1:3]
    groups = heads // key.shape[1]
    attended = nn.functional.scaled_dot_product_attention(
        query.unflatten(1, (-1, groups)).flatten(2, 3), key, value, attn_mask=_repeated(mask, groups), scale=scaling
    )
    return attended.unflatten(2, (groups, nodes)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _repeated(mask: Tensor, groups: int) -> Tensor:
    """`mask` repeated to [batch, 1, groups * nodes, entries], once per forward: all its layers pass the same tensor."""
    known = _REPEATED.get(mask)
    if known is None or known[0] != groups:
        batch, _, nodes, entries = mask.shape
        # Rows begin at multiples of 16 numbers, otherwise the memory-efficient kernel copies the mask in each layer.
        room = mask.new_zeros(batch, 1, groups, nodes, -(-entries // 16) * 16)
        room[..., :entries] = mask.unsqueeze(2)
        known = _REPEATED[mask] = (groups, room.flatten(2, 3)[..., :entries])
    return known[1]


_REPEATED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by a mask: groups, and the mask repeated


def attend_alone(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, nodes: NodesOfRound, **settings: Any
) -> Tensor:
    """The attention of each node by itself, as plain decoding computes it: one query, over the entries of its path.

    Args:
        module: the attention layer.
        query: [batch, heads, nodes, head_dim].
        key: [batch, kv_heads, entries, head_dim].
        value: [batch, kv_heads, entries, value_dim].
        nodes: of this forward.
        settings: other arguments of transformers.

    Returns:
        [batch, nodes, heads, value_dim].
    """
    attended = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    for path in nodes.paths():
        queries = query[path.row, :, path.nodes].transpose(0, 1).unsqueeze(2)
        keys, values = path.entries_of(key), path.entries_of(value)
        mask = None if path.mask is None else path.mask.expand(len(queries), 1, 1, -1)
        output, _ = sdpa_attention_forward(module, queries, keys, values, mask, **settings)
        attended[path.row, path.nodes] = output.squeeze(1)
    return attended


AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
