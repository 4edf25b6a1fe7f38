"""P-EAGLE: EAGLE-3's layers drafting all depths in one forward, with a learned state in place of unknown ones."""

from hf_specdec.drafters.peagle.configuration import PEagleConfig, PEagleOptions
from hf_specdec.drafters.peagle.modeling import PEagleDrafter
from hf_specdec.drafters.registry import register_family

__all__ = ["PEagleConfig", "PEagleDrafter", "PEagleOptions"]

register_family("peagle", drafter=PEagleDrafter)
