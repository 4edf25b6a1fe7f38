"""Experimental: drafters that learn from what they serve.

`AdaptiveDrafter` learns in the process that serves, and a policy decides when; `AuroraDrafter` is trained by another
process.
"""

from hf_specdec.adaptation.aurora import AuroraDrafter
from hf_specdec.adaptation.aurora_trainer import AuroraTrainer
from hf_specdec.adaptation.drafter import AdaptationStats, AdaptiveDrafter
from hf_specdec.adaptation.policy import AlwaysUpdate, CostAwareBandit, FailSafe

__all__ = [
    "AdaptationStats",
    "AdaptiveDrafter",
    "AlwaysUpdate",
    "AuroraDrafter",
    "AuroraTrainer",
    "CostAwareBandit",
    "FailSafe",
]
