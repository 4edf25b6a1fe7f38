"""Which of our cache layers replaces which cache layer of transformers."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils

from hf_specdec.decoding.targets.entries import EntriesLayer, Extent, IndexedLayer
from hf_specdec.decoding.targets.recurrent import HybridLayer, RecurrentLayer
from hf_specdec.decoding.upstream import DummyLayer

# Class of transformers' layer -> class of ours; None for layers that store nothing.
KINDS: dict[type, type | None] = {
    cache_utils.DynamicLayer: EntriesLayer,
    cache_utils.DynamicSlidingWindowLayer: EntriesLayer,
    cache_utils.DynamicIndexedLayer: IndexedLayer,
    cache_utils.LinearAttentionLayer: RecurrentLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer: HybridLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: HybridLayer,
    DummyLayer: None,
}


def own_layer(like: object, extent: Extent) -> Any:
    """Our layer for a layer of transformers; None: transformers makes the layer when it is first written to."""
    kind = EntriesLayer if like is None else KINDS[type(like)]
    if kind is None:
        return DummyLayer()
    return kind(extent, like.number_of_states) if issubclass(kind, RecurrentLayer) else kind(extent)  # type: ignore
