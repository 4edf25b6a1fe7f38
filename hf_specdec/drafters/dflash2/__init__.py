"""DFlash 2: DFlash with convolutions in its draft layers, and a selector conditioned on the previous drafted token."""

from hf_specdec.drafters.dflash import BLOCK_SERVING
from hf_specdec.drafters.dflash2.configuration import DFlash2Config, DFlash2Options
from hf_specdec.drafters.dflash2.modeling import DFlash2Drafter
from hf_specdec.drafters.registry import register
from hf_specdec.hub.formats.dflash2 import DFLASH2
from hf_specdec.hub.formats.speculators import SPECULATORS

__all__ = ["DFlash2Config", "DFlash2Drafter", "DFlash2Options"]

register("dflash2", DFlash2Drafter, layouts=(DFLASH2, SPECULATORS["dflash2"]), serving=BLOCK_SERVING)
