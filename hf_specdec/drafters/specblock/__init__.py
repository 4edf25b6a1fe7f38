"""SpecBlock: blocks of dependent tokens from many starts per forward; a rank head decides the widths of the tree."""

from hf_specdec.drafters.registry import Serving, register
from hf_specdec.drafters.specblock.modeling import SpecBlockConfig, SpecBlockDrafter, SpecBlockOptions
from hf_specdec.hub.formats.specblock import SPECBLOCK

__all__ = ["SpecBlockConfig", "SpecBlockDrafter", "SpecBlockOptions"]

register(
    "specblock",
    SpecBlockDrafter,
    layouts=(SPECBLOCK,),
    serving=Serving(not_exported="only the authors' fork of SGLang supports SpecBlock"),
)
