"""Chooses the dtype of training on a device by a trial.

A CPU without bfloat16 instructions emulates bfloat16, about 100 times slower than float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.utils.benchmark import Timer

SIZE = 256  # of the matrices in the trial; the smallest size at which float32 fills a core's vector units
LEAST_GAIN = 1.25  # speedup from which bfloat16 is chosen despite its lower precision


def chosen_bfloat16(processes: PartialState) -> bool:
    """Whether to train in bfloat16. The first process decides by a trial, and prints it, for all processes."""
    bf16, reason = computes_bfloat16(processes.device.type)
    (bf16,) = broadcast_object_list([bf16])
    number_type, other = ("bfloat16", "--no-bf16") if bf16 else ("float32", "--bf16")
    processes.print(f"dtype: {number_type}, because {reason}; {other} overrides this", flush=True)
    return bf16


def computes_bfloat16(device: str, trial: Callable[[], float] | None = None) -> tuple[bool, str]:
    """Whether training on this device is faster in bfloat16 than in float32.

    Args:
        device: "cpu" or "cuda".
        trial: measures a CPU's speed in bfloat16 relative to float32; `bfloat16_gain` by default.

    Returns:
        the decision, and its reason to print.
    """
    if device == "cuda":
        chosen = torch.cuda.is_bf16_supported(including_emulation=False)
        return chosen, f"{torch.cuda.get_device_name()} has {'' if chosen else 'no '}bfloat16 instructions"
    gain = (trial or bfloat16_gain)()
    return gain >= LEAST_GAIN, f"this CPU multiplies matrices {gain:.3g} times as fast in bfloat16 as in float32"


def bfloat16_gain(seconds: float = 0.25) -> float:
    """Time of a matrix product on the CPU in float32, divided by its time in bfloat16.

    The shortest time of many on one thread, so that other processes do not change the result.

    Args:
        seconds: duration of the trial per dtype.
    """
    times = []
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(SIZE, SIZE, dtype=dtype)
        product = Timer("torch.mm(matrix, matrix)", globals={"torch": torch, "matrix": matrix}, num_threads=1)
        times.append(min(product.blocked_autorange(min_run_time=seconds).times))
    return times[0] / times[1]
