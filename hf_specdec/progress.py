"""Progress on standard error: a bar in a terminal; elsewhere a line every ten seconds, which a log file can keep."""

from __future__ import annotations

import math
import sys
import threading

from tqdm import tqdm

quiet = False  # whether the command line was given --quiet


class Progress(tqdm):
    """A bar with a label, the share that is done and the time left.

    A thread draws it, so that time passes in long steps too. Lower `total` for what turns out not to be needed.

    Args:
        label: what is done, at the start of the line.
        total: upper bound of the units to process; 0 shows no bar.
        unit: what is counted.
        max_seconds: no work is begun after this time; None for no limit.
        shown: False in all processes but one.
        interval_s: between two lines outside a terminal.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        unit: str,
        max_seconds: float | None = None,
        shown: bool = True,
        interval_s: float = 10.0,
    ) -> None:
        if max_seconds is not None:
            label += f", at most {max_seconds / 60:g} min"
        self.closed, self.terminal = threading.Event(), sys.stderr.isatty()
        shown = shown and total > 0 and not quiet
        often = {"mininterval": math.inf, "smoothing": 0, "leave": self.terminal}  # the thread draws, not `update`
        super().__init__(desc=label, total=total, unit=f" {unit}", disable=not shown, **often)
        if shown:
            seconds = 0.5 if self.terminal else interval_s
            threading.Thread(target=self._draw, args=(seconds,), daemon=True).start()

    def _draw(self, interval_s: float) -> None:
        while not self.closed.wait(interval_s):
            self.refresh()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draws the bar; False if there is nothing to clear at its end."""
        if self.terminal:
            return bool(super().display(msg, pos))
        print(self, file=self.fp, flush=True)
        return False

    def clear(self, nolock: bool = False) -> None:
        """Makes room for the line of another: only a terminal needs it."""
        if self.terminal:
            super().clear(nolock)

    def close(self) -> None:
        self.closed.set()
        super().close()
