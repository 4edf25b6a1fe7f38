"""The progress bar of work that is counted in tokens."""

from __future__ import annotations

import sys

from tqdm.auto import tqdm

INTERVAL_S = 0.5 if sys.stderr.isatty() else 30.0  # a file keeps every line


def token_progress(action: str, total: int, *, max_seconds: float | None = None, shown: bool = True) -> tqdm:
    """A bar on standard error: tokens done, of how many, tokens per second and the time left.

    Lower its `total` for tokens that turn out not to be needed.

    Args:
        action: what is done to the tokens, at the start of the line.
        total: upper bound of the tokens to process; 0 shows no bar.
        max_seconds: no work is begun after this time; None for no limit.
        shown: False in all processes but one.
    """
    if max_seconds is not None:
        action += f", at most {max_seconds / 60:g} min"
    return tqdm(desc=action, total=total, unit=" tokens", mininterval=INTERVAL_S, disable=not (shown and total))
