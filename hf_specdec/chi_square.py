"""A chi-square test without a statistics package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

LEAST_EXPECTED = 8.0  # rarer outcomes are counted together: the chi-square approximation needs large counts


def p_value(counts: Mapping[Any, int], probs: Mapping[Any, float]) -> float:
    """p-value of counts under a distribution, by Pearson's chi-square test.

    If all rare outcomes together are still rare, they get a test of their own, by the Poisson distribution of their
    number; the smaller p-value is then doubled. The chi-square distribution is an approximation: by simulation, the
    true probability of a p-value below 1e-6 is up to 5e-6.

    Args:
        counts: outcome -> how often it was seen.
        probs: outcome -> probability.

    Returns:
        0 if an outcome was seen whose probability is 0.

    Examples:
        >>> p_value({"a": 500, "b": 500}, {"a": 0.5, "b": 0.5})
        1.0
        >>> p_value({"a": 600, "b": 400}, {"a": 0.5, "b": 0.5}) < 1e-9
        True
    """
    draws = sum(counts.values())
    if any(probs.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    cells: list[tuple[float, int]] = []
    rare_expected, rare_seen = 0.0, 0
    for outcome, probability in probs.items():
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


def _double(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
