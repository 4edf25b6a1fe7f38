"""Chains on caches that cannot be cut back, in the host's own loop: snapshot, then replay.

Before each forward a copy is kept of what the cache holds. Where the host cuts the cache back by the tokens that it has
rejected, the copy is put back and the tokens that it has kept run once more. That costs a forward for every round that
is not accepted whole, and is exact wherever several tokens in one forward are (`trial.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from hf_specdec.decoding.host import CACHE

# Arguments of a forward that have a column for each token of the text, or of the forward.
_BY_TOKEN = ("attention_mask", "input_ids", "position_ids", "token_type_ids")


@contextmanager
def replaying(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """Meanwhile `cache.crop` puts back what was before the last forward of `model`, and runs what is kept again."""
    before: dict[str, Any] = {}
    last: dict[str, Any] = {}

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal before, last
        if kwargs.get(CACHE) is cache:  # another thread's forward has another
            before, last = _copied(cache), kwargs

    def crop(tokens: int) -> None:
        """As the host's, of minus the number of tokens to drop."""
        if not tokens:
            return
        vars(cache).update(before)
        kept = {
            name: value[..., :tokens] if name in _BY_TOKEN and isinstance(value, Tensor) else value
            for name, value in last.items()
        }
        model.forward(**kept)  # past the hook: nothing drops tokens twice

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    own = {"crop": crop, "activate_past_recording": lambda: None}
    vars(cache).update(own)
    try:
        yield
    finally:
        handle.remove()
        for name in own:
            del vars(cache)[name]


def _copied(cache: Cache) -> dict[str, Any]:
    """What a cache holds, apart from its functions; entries are not copied, since updates make new tensors of them."""
    held = {name: value for name, value in vars(cache).items() if not callable(value)}
    layers = [copy.copy(each) if type(each) is DynamicLayer else copy.deepcopy(each) for each in held.pop("layers")]
    return {**copy.deepcopy(held), "layers": layers}
