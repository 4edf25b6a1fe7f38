"""SpecBound: the target drafts for itself, with exit heads on its shallow layers, stored as LoRA adapters."""

from hf_specdec.drafters.registry import register_family
from hf_specdec.drafters.specbound.configuration import SpecBoundConfig, SpecBoundOptions, is_specbound
from hf_specdec.drafters.specbound.modeling import SpecBoundDrafter

__all__ = ["SpecBoundConfig", "SpecBoundDrafter", "SpecBoundOptions"]

register_family("specbound", drafter=SpecBoundDrafter, recognises=is_specbound)
