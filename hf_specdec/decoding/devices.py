"""Abilities of devices, and functions that depend on them: reading small tensors, inference mode, synchronisation.

Code that chooses between variants with the same tokens calls `abilities`. In `decoding/`, device names are compared
only where CUDA's own events, streams and properties are used. Device types without a rule get a safe default: float64
only if a test succeeds, transformers' own attention, no asynchronous work.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Abilities:
    """Abilities of one device.

    Attributes:
        host_memory: NumPy can read its tensors, a forward is finished when it returns, and for small operations the
            call takes longer than the computation.
        float64: supports double precision.
        groups_heads: torch's attention supports grouped heads together with a mask, without copying the keys.
        folds_heads: it does not, or not in each version, and the host would copy them; see `attention.attend`.
        works_ahead: runs asynchronously to the host, and has CUDA streams, events, pinned copies and graphs.
    """

    host_memory: bool = False
    float64: bool = True
    groups_heads: bool = False
    folds_heads: bool = False
    works_ahead: bool = False


@functools.cache
def _computes_in_float64(device: torch.device) -> bool:
    """Apple's GPUs (mps) and many of Intel's (xpu) do not."""
    try:
        return float(torch.ones(1, dtype=torch.float64, device=device) + 1) == 2
    except (RuntimeError, TypeError):
        return False


_CPU = Abilities(host_memory=True, groups_heads=True)
_CUDA = Abilities(folds_heads=True, works_ahead=True)
RULES: dict[str, Callable[[torch.device], Abilities]] = {"cpu": lambda _: _CPU, "cuda": lambda _: _CUDA}


def abilities(device: torch.device) -> Abilities:
    """What `device` can do.

    Examples:
        >>> abilities(torch.device("cpu")).float64
        True
    """
    rule = RULES.get(device.type)
    return Abilities(float64=_computes_in_float64(device)) if rule is None else rule(device)


def wait_for(device: torch.device) -> None:
    """Waits for what the current stream of the device was given, for time measurements."""
    if abilities(device).works_ahead:
        torch.cuda.current_stream(device).synchronize()
    elif not abilities(device).host_memory:
        torch.accelerator.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = 9) -> float:
    """The median time of `run` on a device, after two runs as warm-up."""
    seconds = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


class ToHost:
    """On CUDA, an asynchronous copy into pinned memory; reading it waits for this copy only. Elsewhere, no copy.

    Args:
        tensor: must not be written to afterwards.

    Examples:
        >>> ToHost(torch.tensor([[3, 1]])).tolist()
        [[3, 1]]
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._arrived = tensor, None
        if tensor.is_cuda:  # only an event shows when the copy is complete
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))  # the stream of the copy

    @property
    def has_arrived(self) -> bool:
        """Whether `tolist` would not wait."""
        return self._arrived is None or self._arrived.query()

    def tolist(self) -> Any:
        """The values; waits for the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()


_NOTHING = nullcontext()
_KEEPS_GRAD_TRACKING: ContextVar[bool] = ContextVar("keeps_grad_tracking", default=False)


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """In this context, `inference_on_cpu` and `in_inference_mode` do nothing; use it under `torch.no_grad`.

    Some quantised weights fail in inference mode, because they make tensors that share memory with others.
    """
    before = _KEEPS_GRAD_TRACKING.set(True)
    try:
        yield
    finally:
        _KEEPS_GRAD_TRACKING.reset(before)


def inference_on_cpu(device: torch.device) -> AbstractContextManager[object]:
    """Inference mode on a CPU, where autograd's bookkeeping takes a few percent of the time, even under no_grad.

    No effect on other devices: hooks of modules on several devices may not work in inference mode. Entering and leaving
    takes 40 us, so use it around as much code as possible.
    """
    if not abilities(device).host_memory or torch.is_inference_mode_enabled() or _KEEPS_GRAD_TRACKING.get():
        return _NOTHING
    return torch.inference_mode()


def in_inference_mode(method: Callable[P, T]) -> Callable[P, T]:
    """`torch.inference_mode()` for a method, with almost no overhead if it is on already."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled() or _KEEPS_GRAD_TRACKING.get():
            return method(*args, **kwargs)
        with torch.inference_mode():
            return method(*args, **kwargs)

    return run
