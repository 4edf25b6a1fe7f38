"""P-EAGLE: EAGLE-3's layers drafting all depths in one forward, with a learned state in place of unknown ones."""

from hf_specdec.drafters.peagle.configuration import PEagleConfig, PEagleOptions
from hf_specdec.drafters.peagle.modeling import PEagleDrafter
from hf_specdec.drafters.registry import Serving, register
from hf_specdec.hub.formats.specforge import SPECFORGE_PEAGLE
from hf_specdec.hub.formats.speculators import SPECULATORS

__all__ = ["PEagleConfig", "PEagleDrafter", "PEagleOptions"]

register(
    "peagle",
    PEagleDrafter,
    layouts=(SPECFORGE_PEAGLE, SPECULATORS["peagle"]),
    serving=Serving(
        "eagle3",
        tokens=lambda drafter: drafter.config.num_draft_tokens,
        settings=lambda drafter: {"parallel_drafting": True},
    ),
)
