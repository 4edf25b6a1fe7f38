"""DFlash 2: DFlash with convolutions in its draft layers, and a selector conditioned on the previous drafted token."""

from hf_specdec.drafters.dflash2.configuration import DFlash2Config, DFlash2Options
from hf_specdec.drafters.dflash2.modeling import DFlash2Drafter
from hf_specdec.drafters.registry import register_family

__all__ = ["DFlash2Config", "DFlash2Drafter", "DFlash2Options"]

register_family("dflash2", drafter=DFlash2Drafter)
