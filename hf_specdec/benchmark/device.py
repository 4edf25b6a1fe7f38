"""Where a run measures and in what type: chosen, and looked at before anything is loaded."""

from __future__ import annotations

import torch

from hf_specdec.hub.loading import floating_dtype


def usable_device(name: str | None) -> torch.device:
    """The device of that name; CUDA where there is one, else the CPU, for None.

    Raises:
        ValueError: there is none of that name here.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device {name!r} cannot be used here ({reason}): use cpu, or leave it out.") from error


def dtype_on(device: torch.device, name: str | None) -> torch.dtype:
    """The floating-point type of that name; bfloat16 on CUDA, else float32, for None.

    Raises:
        ValueError: there is none of that name.
    """
    return floating_dtype(name) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
