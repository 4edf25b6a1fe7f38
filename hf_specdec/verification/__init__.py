"""The self-test that any user can run on any pair of target and drafter, in about a minute.

Greedy: the tokens of plain `generate`, prompt by prompt; where two runs part, how near the target's two best tokens
were, since a near tie may fall either way in the rounding of any library (`differences.py`). Sampling: trees of a real
call are frozen, and the acceptance rule walks each of them again and again; then the call is made again in float64, and
the logits of its trees are held to those of plain forwards (`replay.py`, `precision.py`).
"""

from hf_specdec.verification.differences import Difference, first_difference, unit_in_the_last_place
from hf_specdec.verification.lossless import LosslessReport, verify_lossless

__all__ = ["Difference", "LosslessReport", "first_difference", "unit_in_the_last_place", "verify_lossless"]
