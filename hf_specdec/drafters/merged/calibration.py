"""What a merged drafter learns of its sources while it serves: how often they are right, and what asking them gains.

A few counts for each source and depth. What they lead to concerns speed alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)  # of stated probabilities
DEEPEST = 6  # depths from here on are counted together
PRIOR = 3.0  # how many cases the coarser estimate counts as
MEMORY = 0.99  # of every count per case: texts change
EXPECTED_EDGES = (0.3, 1.0, 2.0, 4.0)  # of tokens that cheaper sources are expected to get accepted
LEAST_GAIN = 0.05  # tokens per round for which a source is asked, where times are not to count
FIRST_PAUSE, LONGEST_PAUSE = 4, 128  # rounds in which a source that does not pay is not asked


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
    """Whether a source is worth its time, by how many tokens the cheaper ones are expected to get accepted.

    Attributes:
        seconds: of a draft of it, lately; 0 before the first.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._gains: dict[int, float] = {}  # accepted tokens a round that nobody else proposed, lately
        self._rest: dict[int, int] = {}
        self._pauses: dict[int, int] = {}

    def asks(self, expected: float) -> bool:
        """Whether to ask it in this round; `expected` accepted tokens are there already."""
        place = _bin(expected, EXPECTED_EDGES)
        if self._rest.get(place, 0) > 0:
            self._rest[place] -= 1
            return False
        return True

    def timed(self, seconds: float) -> None:
        """Takes the seconds of a draft."""
        # The first are slow from warming up, and single ones from other work.
        self.seconds = seconds if not self.seconds else min(0.8 * self.seconds + 0.2 * seconds, 2 * self.seconds)

    def note(self, expected: float, gain: float, least: float) -> None:
        """Takes the tokens that a round gained in which it was asked; below `least` on average it rests for a while."""
        place = _bin(expected, EXPECTED_EDGES)
        mean = self._gains.get(place)
        self._gains[place] = mean = max(1.0, gain) if mean is None else 0.85 * mean + 0.15 * gain
        if mean >= least:
            self._pauses[place] = FIRST_PAUSE
        else:
            self._rest[place] = self._pauses.get(place, FIRST_PAUSE)
            self._pauses[place] = min(2 * self._rest[place], LONGEST_PAUSE)


def _bin(value: float, edges: tuple[float, ...]) -> int:
    return sum(value >= edge for edge in edges) if not math.isnan(value) else 0
