"""Progress of work that is counted in tokens: done, of how many, tokens per second, and the time left.

In a terminal one line is written over again; elsewhere (a file, a pipe) a line appears every half minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

TERMINAL_INTERVAL_S = 0.5
LINE_INTERVAL_S = 30.0


class TokenProgress:
    """Shows how much of a number of tokens is done. Shows nothing before the first token.

    Args:
        action: what is done to the tokens, at the start of the line.
        total: most tokens that there are to do; `skip` lowers it.
        max_seconds: work that is begun later than this is not done; None for no limit.
        stream: where the line goes; standard error where None.
        clock: gives the time in seconds.

    Example:
        >>> with TokenProgress("target writes", 30, stream=sys.stdout) as progress:
        ...     progress.add(20)
        ...     progress.skip(10)  # doctest: +ELLIPSIS
        target writes: 20 of 20 tokens, ... tokens/s, 0:00 left
    """

    def __init__(
        self,
        action: str,
        total: int,
        *,
        max_seconds: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.action, self.total, self.max_seconds = action, total, max_seconds
        self.stream = sys.stderr if stream is None else stream
        self.clock = clock
        self.done = 0
        self._terminal = self.stream.isatty()
        self._started = self._shown = clock()

    def __enter__(self) -> TokenProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.done:
            self._show("\n")

    def add(self, tokens: int) -> None:
        """Counts `tokens` as done."""
        self.done += tokens
        if self.clock() - self._shown >= (TERMINAL_INTERVAL_S if self._terminal else LINE_INTERVAL_S):
            self._show("" if self._terminal else "\n")

    def skip(self, tokens: int) -> None:
        """Takes back `tokens` that need not be done."""
        self.total -= tokens

    def _show(self, end: str) -> None:
        self._shown = self.clock()
        elapsed = self._shown - self._started
        rate = self.done / max(elapsed, 1e-9)
        left = (self.total - self.done) / rate
        if self.max_seconds is not None and elapsed + left > self.max_seconds:
            until = self.max_seconds - elapsed
            rest = f"{_clock(until)} left" if until > 0 else "time is up, last batch"
        else:
            rest = f"{_clock(left)} left"
        line = f"{self.action}: {self.done:,} of {self.total:,} tokens, {rate:,.1f} tokens/s, {rest}"
        # "\x1b[K" clears what a longer line has left behind.
        self.stream.write(f"\r{line}\x1b[K{end}" if self._terminal else f"{line}{end}")
        self.stream.flush()


def _clock(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds.

    Example:
        >>> _clock(75), _clock(3700)
        ('1:15', '1:01:40')
    """
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
