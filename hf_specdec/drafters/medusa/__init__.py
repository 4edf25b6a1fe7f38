"""Medusa: small heads on the target's last hidden state, one for each of the next tokens."""

from hf_specdec.drafters.medusa.candidates import MedusaMarginals
from hf_specdec.drafters.medusa.configuration import MedusaConfig, MedusaOptions
from hf_specdec.drafters.medusa.modeling import MedusaDrafter
from hf_specdec.drafters.registry import register_family

__all__ = ["MedusaConfig", "MedusaDrafter", "MedusaMarginals", "MedusaOptions"]

register_family("medusa", drafter=MedusaDrafter)
