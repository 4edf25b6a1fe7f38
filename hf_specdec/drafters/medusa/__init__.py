"""Medusa: small heads on the target's last hidden state, one for each of the next tokens."""

from hf_specdec.drafters.medusa.candidates import MedusaMarginals
from hf_specdec.drafters.medusa.configuration import MedusaConfig, MedusaOptions
from hf_specdec.drafters.medusa.modeling import MedusaDrafter
from hf_specdec.drafters.registry import Serving, register
from hf_specdec.hub.formats.medusa import MEDUSA

__all__ = ["MedusaConfig", "MedusaDrafter", "MedusaMarginals", "MedusaOptions"]

register(
    "medusa",
    MedusaDrafter,
    layouts=(MEDUSA,),
    serving=Serving(
        "medusa",
        "vLLM serves Medusa heads in their published layout (method medusa in --speculative-config)",
        tokens=lambda drafter: drafter.config.medusa_num_heads,
        needs_export=lambda drafter, config: False,
    ),
)
