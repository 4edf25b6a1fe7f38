"""ToHost: a small tensor on its way from the device to the host, which can go on meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_specdec.decoding.devices import abilities


def works_ahead(device: torch.device) -> bool:
    """Whether a device goes on with what it was given while the host does something else."""
    return abilities(device).works_ahead


class ToHost:
    """Copies into pinned memory behind what the device is doing; whoever reads waits for this copy and no longer.

    On a device that does not work ahead the copy is made at once.

    Args:
        tensor: may be written over as soon as this returns.

    Example:
        >>> ToHost(torch.tensor([[3, 1]])).tolist()
        [[3, 1]]
    """

    def __init__(self, tensor: Tensor) -> None:
        ahead = works_ahead(tensor.device)
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=ahead)
        self._copy.copy_(tensor, non_blocking=ahead)  # without an event nothing would tell when it has arrived
        self._arrived = torch.cuda.Event() if ahead else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(tensor.device))  # where the copy is under way

    def tolist(self) -> Any:
        """The values, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()
