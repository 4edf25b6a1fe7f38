"""What devices can do, and what follows from it: reading small tensors, inference mode, waiting for the device.

A choice between ways to the same tokens that depends on the device asks `abilities`. In `decoding/` the name of a
device is asked for only where CUDA's own events, streams and properties are used. Kinds of devices without a rule get
the cautious one: float64 only if a trial succeeds, the host's own attention, no work beside the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Abilities:
    """Of one device.

    Attributes:
        host_memory: tensors lie where NumPy can read them, a forward has ended when it returns, and small operations
            cost more to call than to compute.
        float64: it computes in double precision.
        groups_heads: torch's attention takes grouped heads and a mask in one go, without a copy of the keys.
        works_ahead: it goes on with what it was given while the host does something else, and has CUDA's streams,
            events, pinned copies and graphs.
    """

    host_memory: bool = False
    float64: bool = True
    groups_heads: bool = False
    works_ahead: bool = False


@functools.cache
def _computes_in_float64(device: torch.device) -> bool:
    """Apple's GPUs (mps) and many of Intel's (xpu) do not."""
    try:
        return float(torch.ones(1, dtype=torch.float64, device=device) + 1) == 2
    except (RuntimeError, TypeError):
        return False


def _cautious(device: torch.device) -> Abilities:
    return Abilities(float64=_computes_in_float64(device))


_CPU = Abilities(host_memory=True, groups_heads=True)
_CUDA = Abilities(works_ahead=True)
RULES: dict[str, Callable[[torch.device], Abilities]] = {"cpu": lambda _: _CPU, "cuda": lambda _: _CUDA}


def abilities(device: torch.device) -> Abilities:
    """What `device` can do.

    Example:
        >>> abilities(torch.device("cpu")).float64
        True
    """
    return RULES.get(device.type, _cautious)(device)


def wait_for(device: torch.device) -> None:
    """Returns when the device has done all that it was given, for time measurements."""
    if not abilities(device).host_memory:
        torch.accelerator.synchronize(device)


class ToHost:
    """Copies into pinned memory behind what the device is doing; whoever reads waits for this copy and no longer.

    On other devices than CUDA's there is nothing to be done before it is read.

    Args:
        tensor: not to be written to any more.

    Example:
        >>> ToHost(torch.tensor([[3, 1]])).tolist()
        [[3, 1]]
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._arrived = tensor, None
        if tensor.is_cuda:  # without an event nothing would tell when the copy has arrived
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))  # where the copy is under way

    def tolist(self) -> Any:
        """The values, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()


_NOTHING = nullcontext()


def inference_on_cpu(device: torch.device) -> AbstractContextManager[object]:
    """Inference mode on a CPU: what autograd notes of every small operation costs percents there, even under no_grad.

    Nothing elsewhere, where hooks of modules that are spread over devices may not bear it. Entering and leaving takes
    40 us, so it is entered as seldom as possible.
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
