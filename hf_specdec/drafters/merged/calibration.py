"""What a merged drafter learns of its sources while it serves: how often they are right, and what asking them gains.

A few counts for each source and depth. What they lead to concerns speed alone.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Hashable

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)  # of stated probabilities
DEEPEST = 6  # depths from here on are counted together
PRIOR = 3.0  # how many cases the coarser estimate counts as
MEMORY = 0.99  # of every count per case: texts change
EXPECTED_EDGES = (0.3, 1.0, 2.0, 4.0)  # of tokens that cheaper sources are expected to get accepted
PROBING = 0.01  # share of the time that looking again may take, where a source does not pay


class Calibration:
    """How likely the target follows a node, by who proposed it, its depth and the probability that was stated.

    Every estimate shrinks towards a coarser one: that of a bin of stated probabilities towards the stated one times
    how far the source is off at this depth.
    """

    def __init__(self) -> None:
        self._cases: dict[Hashable, list[float]] = {}  # [followed, weight]: of bins; [followed, stated]: of depths

    def probability(self, sources: Hashable, depth: int, stated: float) -> float:
        """That the target follows a node, given that it follows its parent.

        Args:
            sources: who proposed it.
            depth: of the node.
            stated: the largest probability that they stated for it.
        """
        depth = min(depth, DEEPEST)
        followed, expected = self._cases.get((sources, depth), (0.0, 0.0))
        prior = min(1.0, stated * (followed + PRIOR) / (expected + PRIOR))
        followed, seen = self._cases.get((sources, depth, _bin(stated, EDGES)), (0.0, 0.0))
        return (followed + PRIOR * prior) / (seen + PRIOR)

    def note(self, sources: Hashable, depth: int, stated: float, followed: bool) -> None:
        """Takes note of a node whose parent the target has followed."""
        depth = min(depth, DEEPEST)
        for case, weight in (((sources, depth), stated), ((sources, depth, _bin(stated, EDGES)), 1.0)):
            counts = self._cases.setdefault(case, [0.0, 0.0])
            counts[0] = MEMORY * counts[0] + followed
            counts[1] = MEMORY * counts[1] + weight


class Worth:
    """Whether a source is worth its time, by how many tokens the cheaper ones are expected to get accepted."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=9)
        self._gains: dict[int, float] = {}  # tokens a round that it adds to the expected ones, lately
        self._rest: dict[int, int] = {}

    def asks(self, expected: float) -> bool:
        """Whether to ask it in this round; `expected` accepted tokens are there already."""
        place = _bin(expected, EXPECTED_EDGES)
        if self._rest.get(place, 0) > 0:
            self._rest[place] -= 1
            return False
        return True

    def timed(self, seconds: float) -> None:
        """Takes the seconds of a draft."""
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Of a draft of it, lately; 0 before the first. A call's first draft reads the whole prompt, so the median."""
        return statistics.median_low(self._seconds) if self._seconds else 0.0

    def note(self, expected: float, gain: float, seconds_per_token: float, seconds_per_round: float) -> None:
        """Takes what a round in which it was asked has added to the tokens expected, and what tokens and rounds take.

        A source that gains less than the tokens that could be written in its time rests for so many rounds that looking
        again takes `PROBING` of the time; one that takes no longer than that never rests.
        """
        place = _bin(expected, EXPECTED_EDGES)
        mean = self._gains.get(place)
        self._gains[place] = mean = max(1.0, gain) if mean is None else 0.8 * mean + 0.2 * gain
        if mean * seconds_per_token < self.seconds:
            self._rest[place] = int(self.seconds / (PROBING * seconds_per_round))


def _bin(value: float, edges: tuple[float, ...]) -> int:
    return bisect.bisect_right(edges, value)
