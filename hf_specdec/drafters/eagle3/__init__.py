"""EAGLE-3: an autoregressive drafter on fused target features; its tree grows where its confidence is highest."""

from hf_specdec.drafters.eagle3.candidates import Eagle3Generator
from hf_specdec.drafters.eagle3.configuration import Eagle3Config, Eagle3Options
from hf_specdec.drafters.eagle3.modeling import Eagle3Drafter
from hf_specdec.drafters.registry import register_family

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Generator", "Eagle3Options"]

register_family("eagle3", drafter=Eagle3Drafter)
