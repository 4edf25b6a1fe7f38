"""Chains on caches that cannot be cropped, in transformers' own loop: snapshot, then replay.

The cache is copied before each forward. When transformers crops the cache by the rejected tokens, the copy is restored
and the accepted tokens run again. This takes one more forward for every round with a rejected token. It is exact if
several tokens in one forward are exact (`trial.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from hf_specdec.decoding.upstream import CACHE

# Arguments of a forward with one column per token of the text, or per token of the forward.
_BY_TOKEN = ("attention_mask", "input_ids", "position_ids", "token_type_ids")


@contextmanager
def replaying(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """In this context, `cache.crop` restores the cache before the last forward of `model`, and replays kept tokens."""
    before: dict[str, Any] = {}
    last: dict[str, Any] = {}

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal before, last
        if kwargs.get(CACHE) is cache:  # ignore forwards of other threads
            before, last = _copied(cache), kwargs

    def crop(tokens: int) -> None:
        """Like transformers': `tokens` is negative, the number of tokens to drop."""
        if not tokens:
            return
        vars(cache).update(before)
        kept = {
            name: value[..., :tokens] if name in _BY_TOKEN and isinstance(value, Tensor) else value
            for name, value in last.items()
        }
        model.forward(**kept)  # bypasses the hook: only transformers' own forwards are recorded

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    own, kind = {"crop": crop, "activate_past_recording": lambda: None}, type(cache)
    vars(cache).update(own)
    cache.__class__ = type(kind.__name__, (kind,), {"is_croppable": True})  # transformers asks for it since 5.24
    try:
        yield
    finally:
        handle.remove()
        cache.__class__ = kind
        for name in own:
            del vars(cache)[name]


@contextmanager
def recording(cache: Cache) -> Iterator[None]:
    """In this context transformers' loop may make layers record their past; afterwards they are as before."""
    before = [getattr(layer, "record_past", None) for layer in cache.layers]
    try:
        yield
    finally:
        for layer, recorded in zip(cache.layers, before, strict=False):  # layers may have been added
            if recorded is not None:
                layer.record_past = recorded


def _copied(cache: Cache) -> dict[str, Any]:
    """The attributes of a cache, without functions. Keys and values are not copied: updates replace their tensors."""
    attributes = {name: value for name, value in vars(cache).items() if not callable(value)}
    layers = attributes.pop("layers")
    layers = [copy.copy(each) if type(each) is DynamicLayer else copy.deepcopy(each) for each in layers]
    return {**copy.deepcopy(attributes), "layers": layers}
