"""What a merged drafter measures of its sources: how often they are right, and how many tokens each adds.

A few counts per source and depth. They affect only the speed.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Hashable

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)  # of stated probabilities
DEEPEST = 6  # larger depths are counted as this one
PRIOR = 3.0  # number of cases that the coarser estimate counts as
MEMORY = 0.99  # decay of each count per case, since texts change
EXPECTED_EDGES = (0.3, 1.0, 2.0, 4.0)  # of the expected number of accepted tokens of cheaper sources
PROBING = 0.01  # share of the time for trying a source again that does not gain


class Calibration:
    """The probability that the target follows a node, given its sources, depth and stated probability.

    Every estimate shrinks towards a coarser one. The prior of a bin of stated probabilities is the stated probability,
    corrected by the ratio of followed to stated at this depth.
    """

    def __init__(self) -> None:
        self._cases: dict[Hashable, list[float]] = {}  # [followed, weight]: of bins; [followed, stated]: of depths

    def probability(self, sources: Hashable, depth: int, stated: float) -> float:
        """The probability that the target follows a node, given that it follows its parent.

        Args:
            sources: that proposed it.
            depth: of the node.
            stated: the largest probability that they stated for it.
        """
        depth = min(depth, DEEPEST)
        followed, expected = self._cases.get((sources, depth), (0.0, 0.0))
        prior = min(1.0, stated * (followed + PRIOR) / (expected + PRIOR))
        followed, seen = self._cases.get((sources, depth, _bin(stated, EDGES)), (0.0, 0.0))
        return (followed + PRIOR * prior) / (seen + PRIOR)

    def note(self, sources: Hashable, depth: int, stated: float, followed: bool) -> None:
        """Counts a node whose parent the target has followed."""
        depth = min(depth, DEEPEST)
        for case, weight in (((sources, depth), stated), ((sources, depth, _bin(stated, EDGES)), 1.0)):
            counts = self._cases.setdefault(case, [0.0, 0.0])
            counts[0] = MEMORY * counts[0] + followed
            counts[1] = MEMORY * counts[1] + weight


class SourceGain:
    """Whether a source gains more than its drafts cost, given the expected accepted tokens of cheaper sources."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=9)
        self._gains: dict[int, float] = {}  # running mean of the expected tokens that it adds per round
        self._rounds_to_skip: dict[int, int] = {}

    def should_draft(self, expected: float) -> bool:
        """Whether it drafts in this round, after sources with `expected` accepted tokens; counts skipped rounds."""
        bin_index = _bin(expected, EXPECTED_EDGES)
        if self._rounds_to_skip.get(bin_index, 0) > 0:
            self._rounds_to_skip[bin_index] -= 1
            return False
        return True

    def add_time(self, seconds: float) -> None:
        """Records the seconds of a draft."""
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Median time of its latest drafts; 0 before the first. A call's first draft is slow: it reads the prompt."""
        return statistics.median_low(self._seconds) if self._seconds else 0.0

    def note(self, expected: float, gain: float, seconds_per_token: float, seconds_per_round: float) -> None:
        """Records how many expected tokens a draft has added.

        A source that adds fewer tokens than could be decoded in its time is skipped for so many rounds that trying it
        again takes `PROBING` of the time.

        Args:
            expected: accepted tokens before it drafted.
            gain: expected tokens that it added.
            seconds_per_token: of a row.
            seconds_per_round: of the call.
        """
        bin_index = _bin(expected, EXPECTED_EDGES)
        mean = self._gains.get(bin_index)
        self._gains[bin_index] = mean = max(1.0, gain) if mean is None else 0.8 * mean + 0.2 * gain
        if mean * seconds_per_token < self.seconds:
            self._rounds_to_skip[bin_index] = int(self.seconds / (PROBING * seconds_per_round))


def _bin(value: float, edges: tuple[float, ...]) -> int:
    return bisect.bisect_right(edges, value)
