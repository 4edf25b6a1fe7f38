"""Whether draws follow a law: the chi-square test of `hf_specdec.chi_square`, for laws that are known in full.

Seeds are fixed, so a test that has passed keeps passing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from statistics import NormalDist

from hf_specdec.chi_square import LEAST_EXPECTED, p_value

BOUND_SIGMA = 4.75  # a standard normal variable exceeds it with probability 1e-6


def deviation_sigma(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> float:
    """The p-value of `counts` under `law`, as standard deviations of a normal variable; infinite for 0.

    Fails unless there is something to compare.
    """
    assert abs(sum(law.values()) - 1) < 1e-5, "the law does not sum to 1"
    enough = [outcome for outcome in law if sum(counts.values()) * law[outcome] >= LEAST_EXPECTED]
    assert len(enough) > 1, "nothing to compare"
    value = p_value(counts, law)
    return -NormalDist().inv_cdf(min(value, 1 - 1e-9)) if value > 0 else math.inf


def assert_follows(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> None:
    """Fails unless the counts are within `BOUND_SIGMA` of the law."""
    deviation = deviation_sigma(counts, law)
    assert deviation < BOUND_SIGMA, (
        f"{sum(counts.values())} draws are {deviation:.1f} sigma from the law (bound {BOUND_SIGMA}); most frequent: "
        f"{Counter(counts).most_common(3)}"
    )
