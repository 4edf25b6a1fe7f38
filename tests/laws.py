"""Whether draws follow a law: the chi-square test of `hf_specdec.chi_square`, for laws that are known in full.

Seeds are fixed, so a test that has passed keeps passing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from hf_specdec import chi_square
from hf_specdec.chi_square import BOUND_SIGMA

__all__ = ["BOUND_SIGMA", "assert_follows", "deviation_sigma"]


def deviation_sigma(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> float:
    """How far `counts` are from `law`, in standard deviations; fails unless there is something to compare."""
    assert abs(sum(law.values()) - 1) < 1e-5, "the law does not sum to 1"
    enough = [outcome for outcome in law if sum(counts.values()) * law[outcome] >= chi_square.LEAST_EXPECTED]
    assert len(enough) > 1, "nothing to compare"
    return chi_square.deviation_sigma(counts, law)


def assert_follows(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> None:
    """Fails unless the counts are within `BOUND_SIGMA` of the law."""
    deviation = deviation_sigma(counts, law)
    assert deviation < BOUND_SIGMA, (
        f"{sum(counts.values())} draws are {deviation:.1f} sigma from the law (bound {BOUND_SIGMA}); most frequent: "
        f"{Counter(counts).most_common(3)}"
    )
