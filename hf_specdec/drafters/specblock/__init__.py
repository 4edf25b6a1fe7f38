"""SpecBlock: blocks of dependent tokens from many starts per forward; a rank head decides the widths of the tree."""

from hf_specdec.drafters.registry import register_family
from hf_specdec.drafters.specblock.configuration import SpecBlockConfig, SpecBlockOptions
from hf_specdec.drafters.specblock.modeling import SpecBlockDrafter

__all__ = ["SpecBlockConfig", "SpecBlockDrafter", "SpecBlockOptions"]

register_family("specblock", drafter=SpecBlockDrafter)
