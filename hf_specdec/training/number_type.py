"""Which number type a device trains in: a trial, since not every processor that takes bfloat16 computes in it.

A CPU without bfloat16 instructions still runs bfloat16, some 100 times slower than float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

SIZE = 256  # of the matrices in the trial; float32 fills a core's vector units from here on
LEAST_GAIN = 1.25  # what float32's precision is given up for


def chosen_bfloat16(processes: PartialState) -> bool:
    """The same answer for all processes of a run, by the trial of the first one, which says it in a line."""
    bf16, reason = computes_bfloat16(processes.device.type)
    (bf16,) = broadcast_object_list([bf16])
    number_type, other = ("bfloat16", "--no-bf16") if bf16 else ("float32", "--bf16")
    processes.print(f"number type: {number_type}, since {reason}; {other} chooses the other", flush=True)
    return bf16


def computes_bfloat16(device: str, trial: Callable[[], float] | None = None) -> tuple[bool, str]:
    """Whether training on this device is faster in bfloat16 than in float32.

    Args:
        device: "cpu" or "cuda".
        trial: of a CPU: how many times as fast as in float32 it is in bfloat16; `bfloat16_gain` by default.

    Returns:
        the answer and its reason, to print.
    """
    if device == "cuda":
        chosen = torch.cuda.is_bf16_supported(including_emulation=False)
        return chosen, f"{torch.cuda.get_device_name()} has {'' if chosen else 'no '}bfloat16 instructions"
    gain = (trial or bfloat16_gain)()
    return gain >= LEAST_GAIN, f"this CPU multiplies matrices {gain:.3g} times as fast in bfloat16 as in float32"


def bfloat16_gain(seconds: float = 0.25) -> float:
    """Time of a matrix product on the CPU in float32, divided by its time in bfloat16.

    On one thread, and the shortest of many: other processes, which delay a thread now and then, do not change it.

    Args:
        seconds: that are tried in each number type, three products at least.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for dtype in (torch.float32, torch.bfloat16):
            matrix = torch.ones(SIZE, SIZE, dtype=dtype)
            tried: list[float] = []
            until = time.perf_counter() + seconds
            while len(tried) < 3 or time.perf_counter() < until:
                started = time.perf_counter()
                torch.mm(matrix, matrix)
                tried.append(time.perf_counter() - started)
            times.append(min(tried))
    finally:
        torch.set_num_threads(threads)
    return times[0] / times[1]
