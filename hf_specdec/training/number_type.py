"""Chooses the dtype of training on a device: that of what was written before, or by a trial.

A CPU without bfloat16 instructions emulates bfloat16, about 100 times slower than float32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

SIZE = 256  # of the matrices in the trial; the smallest size at which float32 fills a core's vector units
AGAIN, CLOSE = 10, 1.05  # a shortest time counts if so many others are at most 5% longer
LEAST_GAIN = 1.25  # speedup from which bfloat16 is chosen despite its lower precision


def chosen_bfloat16(processes: PartialState, recipes: Iterable[Path] = ()) -> bool:
    """Whether to train in bfloat16. The first process decides, and prints it, for all processes.

    Args:
        processes: all of them.
        recipes: of answers that may be there already, see `answer_files.py`: those in another dtype could not be
            continued, so the first one decides. Without any, a trial does.
    """
    earlier = next((file for file in recipes if file.is_file()), None)
    if earlier is None:
        bf16, reason = computes_bfloat16(processes.device.type)
    else:
        bf16 = json.loads(earlier.read_text())["dtype"] == "bfloat16"
        reason = f"the answers in {earlier.parent} were begun in it"
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


def bfloat16_gain(seconds: float = 3.0) -> float:
    """Time of a matrix product on the CPU in float32, divided by its time in bfloat16, on one thread.

    Args:
        seconds: after which the trial ends in any case.
    """
    single, half = (torch.ones(SIZE, SIZE, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return relative_time(lambda: torch.mm(single, single), lambda: torch.mm(half, half), seconds)
    finally:
        torch.set_num_threads(threads)


def relative_time(
    first: Callable[[], object],
    second: Callable[[], object],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The shortest time of one call, divided by that of another.

    They take turns until each one's shortest time was nearly met several times, so that other processes, which can only
    make a call longer, do not change the result.

    Args:
        first: a call.
        second: the other one.
        seconds: after which the comparison ends in any case.
        clock: in seconds.
    """
    calls, times, begun = (first, second), ([0.0] * 0, [0.0] * 0), clock()
    while not all(sum(time <= CLOSE * min(own) for time in own) > AGAIN for own in times):
        for _ in range(AGAIN):
            for call, own in zip(calls, times, strict=True):
                started = clock()
                call()
                own.append(clock() - started)
        if clock() - begun > seconds:
            break
    return min(times[0]) / min(times[1])
