"""Whether counts follow a law: a chi-square test without a statistics package.

At `BOUND_SIGMA` a correct sampler is refused once in a million times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

BOUND_SIGMA = 4.75  # a standard normal exceeds it with probability 1e-6
LEAST_EXPECTED = 8.0  # rarer outcomes are counted together, where the chi-square law would not hold


def deviation_sigma(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """How far counts are from a law: chi-square, brought to standard deviations by Wilson and Hilferty's cube root.

    Args:
        counts: outcome -> how often it was seen.
        law: outcome -> probability.

    Returns:
        Standard deviations, negative where counts are closer to the law than chance has it; infinite where an outcome
        was seen that the law has not.

    Example:
        >>> deviation_sigma({"a": 500, "b": 500}, {"a": 0.5, "b": 0.5}) < 1
        True
        >>> deviation_sigma({"a": 600, "b": 400}, {"a": 0.5, "b": 0.5}) > BOUND_SIGMA
        True
    """
    draws = sum(counts.values())
    if any(law.get(outcome, 0.0) == 0.0 for outcome in counts):
        return math.inf
    cells: list[tuple[float, int]] = []
    rare_expected, rare_seen = 0.0, 0
    for outcome, probability in law.items():
        expected, seen = draws * probability, counts.get(outcome, 0)
        if expected < LEAST_EXPECTED:
            rare_expected, rare_seen = rare_expected + expected, rare_seen + seen
        else:
            cells.append((expected, seen))
    if rare_expected >= LEAST_EXPECTED:
        cells.append((rare_expected, rare_seen))
    elif rare_seen > rare_expected + BOUND_SIGMA * math.sqrt(LEAST_EXPECTED):
        return math.inf
    if len(cells) < 2:
        return 0.0
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    degrees = len(cells) - 1
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5
