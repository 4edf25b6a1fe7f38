"""ToHost: a small tensor on its way from the device to the host, which can go on meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def works_ahead(device: torch.device) -> bool:
    """Whether a device goes on with what it was given while the host does something else."""
    return device.type == "cuda"


class ToHost:
    """Copies into pinned memory behind what the device is doing; whoever reads waits for this copy and no longer.

    Args:
        tensor: may be written over as soon as this returns.

    Example:
        >>> ToHost(torch.tensor([[3, 1]])).tolist()
        [[3, 1]]
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(tensor.device))  # where the copy is under way

    def tolist(self) -> Any:
        """The values, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()
