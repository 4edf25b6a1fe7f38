"""Drafting beside the target: a thread that drafts while the target verifies, and the times of both.

`specbranch` and `ssd` draft in it. On a GPU it has a stream of its own: in the target's stream its drafts, and what the
host reads of them, would come after the target's forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.stopwatch import Stopwatch
from hf_specdec.decoding.target import TargetOutput


class DraftingThread:
    """A thread with its own number of intra-op threads on a CPU, or its own stream on a GPU.

    Whatever changes the drafter's cache must run in the thread or in `here`, that is in the stream: torch gives freed
    memory to the stream that has allocated it, whichever stream still reads it. Tensors of the caller that the thread
    reads must be kept until its work is done.

    Args:
        device: of the stream.
        target_device: where `verify` runs.
        num_threads: of the thread, on a CPU.

    Attributes:
        overlap: the times of rounds that ran beside the target.
    """

    def __init__(self, device: torch.device, target_device: torch.device, num_threads: int) -> None:
        self.executor = ThreadPoolExecutor(
            1,
            thread_name_prefix="hf_specdec-drafting",
            initializer=torch.set_num_threads,  # of the calling thread
            initargs=(num_threads,),
        )
        self.stream = torch.cuda.Stream(device) if abilities(device).works_ahead else None
        self.device, self.target_device = device, target_device
        self.overlap = SpeculationStats()
        self._unread: tuple[Stopwatch, float, float, float] | None = None  # times of a round, see `count`

    @contextmanager
    def here(self) -> Iterator[None]:
        """In this context the calling thread works in the stream, in order with its own stream before and after."""
        self._follow()
        with torch.cuda.stream(self.stream):  # no effect if there is no stream
            yield
        self._lead()

    def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of work in the thread."""
        with self.here():
            return self.executor.submit(self._run, work, *arguments).result()[0]

    def beside(
        self, verify: Callable[[], TargetOutput], work: Callable[..., Any], *arguments: Any
    ) -> tuple[TargetOutput, Any]:
        """The results of `verify`, and of work in the thread at the same time."""
        self._follow()  # work comes after what was launched before; `verify` is launched later
        clock = _clock(self.target_device)
        watch, launched, busy_from = Stopwatch(self.target_device), time.perf_counter(), clock()
        pending = self.executor.submit(self._run, work, *arguments)
        output = verify()
        watch.lap("verify")
        verify_s = clock() - busy_from
        result, draft_s = pending.result()
        self._lead()
        self._unread = watch, draft_s, verify_s, time.perf_counter() - launched
        return output, result

    def count(self) -> float:
        """Adds the times of a round with `beside`, once the host has read its verdict; returns its wall time."""
        if self._unread is None:
            return 0.0
        (watch, draft_s, verify_s, wall_s), self._unread = self._unread, None
        if abilities(self.target_device).works_ahead:  # what was measured on the host is only the launch
            verify_s = watch.seconds["verify"]
            wall_s = max(wall_s, verify_s)
        self.overlap.count_ahead(draft_s, verify_s, wall_s)
        return wall_s

    def _run(self, work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        clock = _clock(self.device)
        began = clock()
        with torch.cuda.stream(self.stream):
            return work(*arguments), clock() - began

    def _follow(self) -> None:
        """Lets the stream wait for that of the calling thread."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def _lead(self) -> None:
        """Lets the stream of the calling thread wait for this one."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def _clock(device: torch.device) -> Callable[[], float]:
    """Processor time of the calling thread, without the time that others take of its core; wall time on a GPU."""
    return time.thread_time if abilities(device).host_memory else time.perf_counter
