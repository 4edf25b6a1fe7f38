"""Inference mode, entered as seldom as can be: on a CPU entering and leaving it once takes 40 us of a round."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch

from hf_specdec.decoding.devices import abilities

P = ParamSpec("P")
T = TypeVar("T")

_NOTHING = nullcontext()


def inference_on_cpu(device: torch.device) -> AbstractContextManager[object]:
    """Inference mode on a CPU: what autograd notes of every small operation costs percents there, even under no_grad.

    Nothing elsewhere, where hooks of modules that are spread over devices may not bear it.
    """
    if not abilities(device).host_memory or torch.is_inference_mode_enabled():
        return _NOTHING
    return torch.inference_mode()


def in_inference_mode(method: Callable[P, T]) -> Callable[P, T]:
    """`torch.inference_mode()` for a method, which costs next to nothing where that is on already."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode():
            return method(*args, **kwargs)

    return run
