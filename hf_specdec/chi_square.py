"""Whether counts follow a law: a chi-square test without a statistics package.

At `BOUND_SIGMA` a correct sampler is refused once in a million times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import torch

BOUND_SIGMA = 4.75  # a standard normal exceeds it with probability 1e-6
LEAST_EXPECTED = 8.0  # rarer outcomes are counted together, where the chi-square law would not hold


def p_value(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """How probable it is that draws from a law give counts that are as far from it, by Pearson's chi-square.

    Where all rare outcomes together are rare too, also by the Poisson law of their number. Of such small numbers as
    1e-6 the true probability is up to five times as large, by simulation: the chi-square law is an approximation.

    Args:
        counts: outcome -> how often it was seen.
        law: outcome -> probability.

    Returns:
        0 where an outcome was seen that the law has not.

    Example:
        >>> p_value({"a": 500, "b": 500}, {"a": 0.5, "b": 0.5})
        1.0
        >>> p_value({"a": 600, "b": 400}, {"a": 0.5, "b": 0.5}) < 1e-9
        True
    """
    draws = sum(counts.values())
    if any(law.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    cells: list[tuple[float, int]] = []
    rare_expected, rare_seen = 0.0, 0
    for outcome, probability in law.items():
        expected, seen = draws * probability, counts.get(outcome, 0)
        if expected < LEAST_EXPECTED:
            rare_expected, rare_seen = rare_expected + expected, rare_seen + seen
        else:
            cells.append((expected, seen))
    values = []
    if rare_expected >= LEAST_EXPECTED:
        cells.append((rare_expected, rare_seen))
    elif rare_seen:
        values.append(float(torch.special.gammainc(_double(rare_seen), _double(rare_expected))))
    if len(cells) > 1:
        statistic = sum((seen - expected) ** 2 / expected for expected, seen in cells)
        values.append(float(torch.special.gammaincc(_double((len(cells) - 1) / 2), _double(statistic / 2))))
    return min(1.0, len(values) * min(values)) if values else 1.0


def deviation_sigma(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """`p_value` as the standard deviations that a normal law exceeds with that probability; infinite where it is 0.

    Example:
        >>> deviation_sigma({"a": 500, "b": 500}, {"a": 0.5, "b": 0.5}) < 1
        True
        >>> deviation_sigma({"a": 600, "b": 400}, {"a": 0.5, "b": 0.5}) > BOUND_SIGMA
        True
    """
    value = p_value(counts, law)
    return -NormalDist().inv_cdf(min(value, 1 - 1e-9)) if value > 0 else math.inf


def _double(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
