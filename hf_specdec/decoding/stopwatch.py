"""Stopwatch: where the time of a `generate` call goes, one lap after another, without waiting for the device."""

from __future__ import annotations

import time

import torch

# How many unread pairs of events are kept before those that have passed are read.
FOLD_AT = 64


class Stopwatch:
    """Laps that leave no gap: each gives the time since the one before to a stage, so stages add up to the whole.

    On CUDA laps are events on the current stream: they tell when the device got there, and recording them waits for
    nothing. Elsewhere they are host times.

    Args:
        device: that the work runs on.

    Example:
        >>> watch = Stopwatch("cpu")
        >>> watch.lap("draft")
        >>> watch.lap("verify")
        >>> list(watch.seconds)
        ['draft', 'verify']
    """

    def __init__(self, device: torch.device | str) -> None:
        self._seconds: dict[str, float] = {}
        self._on_cuda = torch.device(device).type == "cuda"
        self._unread: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._event: torch.cuda.Event | None = None
        if self._on_cuda:
            self._event = self._record()
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Gives the time since the last lap, or since the start, to `stage`."""
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
        if self._unread:
            self._unread[-1][2].synchronize()
            self._read()
        return dict(self._seconds)

    def _read(self) -> None:
        """Adds up the laps that the device has passed."""
        passed = 0
        for stage, began, ended in self._unread:
            if not ended.query():
                break
            self._seconds[stage] = self._seconds.get(stage, 0.0) + began.elapsed_time(ended) / 1000  # ms
            passed += 1
        del self._unread[:passed]

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
