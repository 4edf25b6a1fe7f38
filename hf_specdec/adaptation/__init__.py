"""Experimental: drafters that learn from what they serve.

`AdaptiveDrafter` learns in the process that serves, and a policy decides when; `AuroraDrafter` is trained by another
process, `aurora_trainer.py`.
"""

from hf_specdec.adaptation.adaptive_drafter import AdaptationStats, AdaptiveDrafter
from hf_specdec.adaptation.aurora import AuroraDrafter
from hf_specdec.adaptation.policy import AlwaysUpdate, CostAwareBandit, FailSafe

__all__ = [
    "AdaptationStats",
    "AdaptiveDrafter",
    "AlwaysUpdate",
    "AuroraDrafter",
    "CostAwareBandit",
    "FailSafe",
]
