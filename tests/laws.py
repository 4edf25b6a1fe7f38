"""Whether draws follow a law: a chi-square test without a statistics package.

The statistic is brought to a standard normal by Wilson and Hilferty's cube root. At the bound used here a correct
sampler fails once in a million times; seeds are fixed, so a test that has passed keeps passing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

BOUND_SIGMA = 4.75  # a standard normal exceeds it with probability 1e-6
LEAST_EXPECTED = 8.0  # rarer outcomes are counted together, where the approximation would not hold


def deviation_sigma(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> float:
    """How far `counts` are from `law`, in standard deviations; infinite where an impossible outcome was seen.

    Example:
        >>> deviation_sigma({"a": 500, "b": 500}, {"a": 0.5, "b": 0.5}) < 1
        True
        >>> deviation_sigma({"a": 600, "b": 400}, {"a": 0.5, "b": 0.5}) > BOUND_SIGMA
        True
    """
    assert abs(sum(law.values()) - 1) < 1e-5, "the law does not sum to 1"
    if any(law.get(outcome, 0.0) == 0.0 for outcome in counts):
        return float("inf")
    draws = sum(counts.values())
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
    assert len(cells) > 1, "nothing to compare"
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    degrees = len(cells) - 1
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5


def assert_follows(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> None:
    """Fails unless the counts are within `BOUND_SIGMA` of the law."""
    deviation = deviation_sigma(counts, law)
    assert deviation < BOUND_SIGMA, (
        f"{sum(counts.values())} draws are {deviation:.1f} sigma from the law (bound {BOUND_SIGMA}); most frequent: "
        f"{Counter(counts).most_common(3)}"
    )
