"""Experimental: drafters that learn while they serve, `AdaptiveDrafter`, and the policies that decide when."""

from hf_specdec.adaptation.drafter import AdaptationStats, AdaptiveDrafter
from hf_specdec.adaptation.policy import AlwaysUpdate, CostAwareBandit, FailSafe

__all__ = ["AdaptationStats", "AdaptiveDrafter", "AlwaysUpdate", "CostAwareBandit", "FailSafe"]
