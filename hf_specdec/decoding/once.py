"""Facts about a model that are computed once, because computing them takes as long as a round."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def once_per_model(find: Callable[[Any], T]) -> Callable[[Any], T]:
    """Caches the result of `find` per model; the result must not refer to the model itself."""
    found: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()

    @functools.wraps(find)
    def cached(model: Any) -> T:
        if model not in found:
            found[model] = find(model)
        return found[model]

    return cached
