"""What is found out about a model once in its life, since looking takes as long as a round."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def once_per_model(find: Callable[[Any], T]) -> Callable[[Any], T]:
    """The same function, which is asked once for each model; what it finds must not hold the model itself."""
    found: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()

    @functools.wraps(find)
    def ask(model: Any) -> T:
        if model not in found:
            found[model] = find(model)
        return found[model]

    return ask
