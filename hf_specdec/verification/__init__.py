"""A self-test of any pair of target and drafter, in about a minute.

Greedy: tokens are compared with those of plain `generate`. At the first difference, the gap between the two tokens is
compared with the target's rounding, which may decide a near tie in any library (`differences.py`). Sampling: draft
trees of a real call are recorded, and the acceptance rule is applied to each many times; then the call is repeated in
float64, and the logits of its trees are compared with those of plain forwards (`replay.py`, `precision.py`).
"""

from hf_specdec.verification.differences import Difference, first_difference, unit_in_the_last_place
from hf_specdec.verification.lossless import LosslessReport, verify_lossless

__all__ = ["Difference", "LosslessReport", "first_difference", "unit_in_the_last_place", "verify_lossless"]
