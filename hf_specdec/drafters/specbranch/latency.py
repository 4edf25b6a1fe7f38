"""The possible gain of parallel drafting: the latency model of SpecBranch, Section 4.1 and Appendix B.

Times are in units of `draft_s`, the time of one forward of the draft model (T_q, the paper's t). A verification takes
`speed_ratio` (c) of them, a draft has `length` (gamma) tokens, and each is accepted with probability `acceptance`
(alpha), independently of the others. The model has no branches and no H-RAD, so it is a bound for PEARL.
"""

from __future__ import annotations


def expected_accepted(acceptance: float, length: int) -> float:
    """Mean accepted tokens of a draft: alpha (1 - alpha^gamma) / (1 - alpha). SpecBranch, Lemma 1.

    Example:
        >>> round(expected_accepted(0.5, 3), 3), expected_accepted(1.0, 3)
        (0.875, 3.0)
    """
    if acceptance == 1:
        return float(length)
    return acceptance * (1 - acceptance**length) / (1 - acceptance)


def serial_latency(acceptance: float, length: int, speed_ratio: float, draft_s: float = 1.0) -> float:
    """Time per token if drafting and verifying alternate: (gamma + c) t over 1 + the accepted tokens.

    Section 4.1 gives it for full acceptance. After a rejection the target still adds the bonus token.

    Example:
        >>> serial_latency(1.0, 8, 8.0) == (8 + 8) / 9
        True
    """
    return (length + speed_ratio) * draft_s / (1 + expected_accepted(acceptance, length))


def parallel_latency(acceptance: float, length: int, speed_ratio: float, draft_s: float = 1.0) -> float:
    """Time per token if both run in parallel and a rejection wastes the parallel drafts. SpecBranch, Theorem 1.

    2 max(gamma t, c t) / ((1 + alpha^gamma) E[accepted]): two rounds, of which the second adds its tokens only if the
    first was accepted completely. Bonus tokens are not counted, so for low acceptance the model overestimates the time.

    Raises:
        ValueError: an argument is out of range; with acceptance 0 the time would be infinite.

    Example:
        >>> parallel_latency(1.0, 8, 8.0)  # Eq. 1: one draft token's time per token
        1.0
        >>> round(parallel_latency(0.8, 8, 8.0), 3)
        4.116
    """
    if not 0 < acceptance <= 1 or length < 1 or speed_ratio <= 0:
        raise ValueError(
            f"acceptance={acceptance}, length={length}, speed_ratio={speed_ratio}: the model needs an acceptance above "
            "0 and at most 1, a length of at least 1 and a positive speed ratio."
        )
    both = 2 * max(length, speed_ratio) * draft_s
    return both / ((1 + acceptance**length) * expected_accepted(acceptance, length))
