"""EAGLE-3: an autoregressive drafter on fused target features; its tree grows where its confidence is highest."""

from hf_specdec.drafters.eagle3.candidates import Eagle3Generator
from hf_specdec.drafters.eagle3.configuration import Eagle3Config, Eagle3Options
from hf_specdec.drafters.eagle3.modeling import Eagle3Drafter
from hf_specdec.drafters.registry import Serving, register
from hf_specdec.hub.formats.deepspec import DEEPSPEC_EAGLE3
from hf_specdec.hub.formats.safeailab import SAFEAILAB
from hf_specdec.hub.formats.specforge import SPECFORGE
from hf_specdec.hub.formats.speculators import SPECULATORS

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Generator", "Eagle3Options"]

register(
    "eagle3",
    Eagle3Drafter,
    layouts=(SAFEAILAB, SPECFORGE, DEEPSPEC_EAGLE3, SPECULATORS["eagle3"]),
    serving=Serving("eagle3"),
)
