"""What devices can do, where a choice between ways to the same tokens depends on it: one rule per kind of device.

Such choices ask `abilities`. In `decoding/` the name of a device is asked for only where CUDA's own events, kernels and
properties are used. Kinds without a rule get the cautious one: float64 only if a trial succeeds, the host's own
attention, no work of their own accord.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


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
