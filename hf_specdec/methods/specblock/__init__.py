"""SpecBlock: blocks of dependent tokens from many starts per forward; a rank head decides the widths of the tree."""

from hf_specdec.drafting.registry import Serving, register
from hf_specdec.hub.formats.specblock import SPECBLOCK
from hf_specdec.methods.specblock.network import SpecBlockConfig, SpecBlockDrafter, SpecBlockOptions

__all__ = ["SpecBlockConfig", "SpecBlockDrafter", "SpecBlockOptions"]

register(
    "specblock",
    SpecBlockDrafter,
    layouts=(SPECBLOCK,),
    serving=Serving(not_exported="only the authors' fork of SGLang supports SpecBlock"),
)
