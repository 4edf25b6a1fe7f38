"""Facts about a model that are computed once, because computing them takes as long as a round.

Some are found by running the model: `undisturbed` keeps such a run from changing what later calls find.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
T = TypeVar("T")

# What a forward may raise that a model does not allow.
REFUSED_RUN = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def once_per_model(find: Callable[P, T], state: Callable[[Any], Hashable] = type) -> Callable[P, T]:
    """Caches the result of `find` per model; the result must not refer to the model itself.

    Args:
        find: computes it from a model and perhaps other arguments, which are hashable and not passed by name.
        state: of a model, for results that are others in other states of it.
    """
    found: weakref.WeakKeyDictionary[Any, dict[Hashable, T]] = weakref.WeakKeyDictionary()

    @functools.wraps(find)
    def cached(*args: P.args, **kwargs: P.kwargs) -> T:
        model, *others = args
        of_model, now = found.setdefault(model, {}), (state(model), *others)
        if now not in of_model:
            of_model[now] = find(*args, **kwargs)
        return of_model[now]

    return cached


def products_of(model: nn.Module) -> Hashable:
    """What the bits of a model's products depend on, besides its weights: number type and threads."""
    return next(model.parameters()).dtype, torch.get_num_threads()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """In this context, forwards leave no data in the modules of a model, such as the offsets of a prompt's positions.

    Data that a call has left there is restored at the end. Functions are not, because other threads may swap them.
    """
    data = [each for module in model.modules() for each in (module.__dict__, module.__dict__["_buffers"])]
    before = [(attributes, dict(attributes)) for attributes in data]
    try:
        yield
    finally:
        for attributes, earlier in before:
            for name in attributes.keys() - earlier.keys():
                if not callable(attributes[name]):
                    del attributes[name]
            for name, value in earlier.items():
                if attributes.get(name, before) is not value and not callable(value):
                    attributes[name] = value
