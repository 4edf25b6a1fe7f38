"""Stopwatch: the time of each stage of a `generate` call, measured in laps and without device syncs."""

from __future__ import annotations

import time

import torch

# With this many unread pairs of events, those that are complete are read.
FOLD_AT = 64


class Stopwatch:
    """Laps without gaps: each adds the time since the previous lap to a stage, so the stages add up to the total time.

    On CUDA laps are events on the device's current stream, which measure device time and are recorded without a sync.
    Elsewhere they are host times.

    Args:
        device: runs the work.

    Examples:
        >>> watch = Stopwatch("cpu")
        >>> watch.lap("draft")
        >>> watch.lap("verify")
        >>> list(watch.seconds)
        ['draft', 'verify']
    """

    def __init__(self, device: torch.device | str) -> None:
        self._seconds: dict[str, float] = {}
        self._device = torch.device(device)
        self._on_cuda = self._device.type == "cuda"
        self._unread: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._event: torch.cuda.Event | None = None
        if self._on_cuda:
            self._event = self._record()
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Adds the time since the last lap, or since the start, to `stage`."""
        if self._on_cuda:
            now = self._record()
            assert self._event is not None
            self._unread.append((stage, self._event, now))
            self._event = now
            if len(self._unread) >= FOLD_AT:
                self._read()
            return
        moment = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + moment - self._last
        self._last = moment

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage, in the order of their first laps. On CUDA this waits for the last lap."""
        self._read()
        if self._unread:
            self._unread[-1][2].synchronize()
            self._read()
        return dict(self._seconds)

    def _read(self) -> None:
        """Reads the laps that are complete on the device."""
        num_read = 0
        for stage, began, ended in self._unread:
            if not ended.query():
                break
            self._seconds[stage] = self._seconds.get(stage, 0.0) + began.elapsed_time(ended) / 1000  # ms
            num_read += 1
        del self._unread[:num_read]

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # another device may be the current one
        return event
