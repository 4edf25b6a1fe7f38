"""Attention of a draft tree's nodes, registered with the host's `AttentionInterface` and used while a tree is verified.

What it saves over the host's own sdpa: grouped heads read the cache's keys and values as they lie there (the host
copies them once per query head whenever there is a mask), and on CUDA the committed prefix needs no mask at all. There

    attention = softmax over [prefix ; nodes] = (Z_p a_p + Z_t a_t) / (Z_p + Z_t)

with a_p, Z_p the attention over a row's prefix and its sum of exponentials, a_t, Z_t those over the nodes of the tree:
the prefix is an interval of entries, and only the small tree part has a mask. `merged_attention` is that formula in
torch, `attention_kernel.py` the same in Triton. On a CPU torch's own kernel takes grouped heads and the whole mask
in one go, with bit for bit the host's result, so there is nothing to split. Other devices keep the host's attention.

The mask that the host passes around stays the full one; the intervals only accompany it (`Spans`). Whatever changes the
mask on its way loses them, and is then answered from the mask alone.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.tiles import tile_of

TREE_ATTENTION = "hf_specdec_tree"
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Spans:
    """The prefix part of a tree's attention mask, as intervals.

    Attributes:
        first: [batch, nodes] int32, the first entry that a node sees; left padding and windows move it up.
        stop: [batch] int32, where the row's committed entries end.
        nodes: how many of the last keys are the tree's; all before them are the prefix.
    """

    first: Tensor
    stop: Tensor
    nodes: int


def attach(mask: Tensor, spans: Spans) -> Tensor:
    """Lets `spans` travel with the mask that says the same; returns the mask."""
    mask.tree_spans = spans  # type: ignore[attr-defined]
    return mask


def is_split(mask: Tensor | None) -> bool:
    """Whether intervals travel with this mask, so that `tree_attention_forward` need not read all of it."""
    return mask is not None and hasattr(mask, "tree_spans")


def usable(model: PreTrainedModel) -> bool:
    """Whether a target's trees are verified with this attention; the host's own is used otherwise.

    The rule, all of it known before the first token: its device gains by it, the target uses sdpa (eager stays eager:
    who asked for it wants its arithmetic, and soft caps and sinks exist only there), looks its attention up in the
    host's interface, and all its layers share one config, by which the lookup is made.
    """
    config = model.config.get_text_config(decoder=True)
    device = abilities(model.device)
    return (
        (device.groups_heads or device.splits_prefix)
        and own_implementation(config) == "sdpa"
        and bool(model._supports_attention_backend)
        and getattr(config, "attn_logit_softcapping", None) is None
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
        # The field that the lookup reads, past the config's setter, which would check it and walk over all parts.
        self.key, self.fields = id(config), vars(config)

    def __enter__(self) -> None:
        with _IN_USE_LOCK:
            users, before = _IN_USE.get(self.key, (0, self.fields["_attn_implementation_internal"]))
            _IN_USE[self.key] = users + 1, before
            self.fields["_attn_implementation_internal"] = TREE_ATTENTION

    def __exit__(self, *error: object) -> None:
        with _IN_USE_LOCK:
            users, before = _IN_USE.pop(self.key)
            if users > 1:
                _IN_USE[self.key] = users - 1, before
            else:
                self.fields["_attn_implementation_internal"] = before


# By the id of a config: how many are in `tree_attention`, and what was there before.
_IN_USE: dict[int, tuple[int, str]] = {}
_IN_USE_LOCK = threading.Lock()


def own_implementation(config: PreTrainedConfig) -> str | None:
    """The attention that a target's text config asks for, whoever verifies trees with it at the moment."""
    in_use = _IN_USE.get(id(config))
    return config._attn_implementation if in_use is None else in_use[1]


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
        attention_mask: additive [batch, 1, nodes, entries], with spans or without; anything else is the host's matter.
        dropout: as the host gives it.
        scaling: of the scores; head_dim ** -0.5 where omitted.
        kwargs: what else the host passes on.

    Returns:
        [batch, nodes, heads, value_dim], and no weights.
    """
    if attention_mask is None or dropout or not attention_mask.dtype.is_floating_point or "position_bias" in kwargs:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spans: Spans | None = getattr(attention_mask, "tree_spans", None)
    if spans is not None:
        attend = merged_attention
        if kernel_serves(query, key, value):
            from hf_specdec.decoding.attention_kernel import merged_attention_kernel as attend
        return attend(query, key, value, attention_mask, spans, scale), None
    if not abilities(query.device).groups_heads:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
    )
    return attended.transpose(1, 2).contiguous(), None


def kernel_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel may take the place of `merged_attention`, whose arguments these are."""
    one_size = value.shape[-1] == key.shape[-1]  # which DeepSeek's are not
    known = query.is_cuda and query.dtype in KERNEL_DTYPES
    return known and one_size and has_triton() and tile_of(query, key) is not None


@functools.cache
def has_triton() -> bool:
    """Whether the kernel can be compiled here; torch's builds for GPUs bring Triton along."""
    return importlib.util.find_spec("triton") is not None


def merged_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, spans: Spans, scale: float
) -> Tensor:
    """The formula of this file's head in torch: prefix without a mask, tree with one, merged by their sums.

    Args:
        query: [batch, heads, nodes, head_dim].
        key: [batch, kv_heads, entries, head_dim].
        value: [batch, kv_heads, entries, value_dim].
        attention_mask: additive [batch, 1, nodes, entries]; only its last `spans.nodes` columns are read.
        spans: the rest of the mask.
        scale: of the scores.

    Returns:
        [batch, nodes, heads, value_dim] of the query's dtype.
    """
    batch, heads, nodes, _ = query.shape
    kv_heads, split = key.shape[1], key.shape[2] - spans.nodes
    # Grouped heads as further queries of their key's head: no key is copied.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * nodes, -1)
    entries = torch.arange(split, device=key.device)
    seen = (entries >= spans.first.unsqueeze(-1)) & (entries < spans.stop[:, None, None])
    outside = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
    parts = []
    for part, mask in (
        (slice(0, split), outside.unsqueeze(1)),
        (slice(split, None), attention_mask[..., -spans.nodes :]),
    ):
        scores = grouped @ key[:, :, part].transpose(2, 3) * scale + mask.repeat(1, 1, heads // kv_heads, 1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        # An empty prefix has no largest score; the root always sees itself, so the tree part is never empty.
        largest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -1e30)
        weights = (scores - largest.clamp(min=torch.finfo(scores.dtype).min)).exp()
        parts.append((largest, weights.sum(-1, keepdim=True), weights.to(value.dtype) @ value[:, :, part]))
    largest = torch.maximum(parts[0][0], parts[1][0])
    shares = [(top - largest).exp() for top, _, _ in parts]
    total = sum(share * sums for share, (_, sums, _) in zip(shares, parts, strict=True))
    merged = sum(share / total * attended for share, (_, _, attended) in zip(shares, parts, strict=True))
    assert isinstance(merged, Tensor)
    return merged.to(query.dtype).view(batch, heads, nodes, -1).transpose(1, 2).contiguous()


AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
