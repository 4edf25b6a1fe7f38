"""SpecBlock: blocks of dependent tokens from many starts per forward; a rank head decides the widths of the tree."""

from hf_specdec.drafting.registry import Serving, register
from hf_specdec.methods.specblock.layouts import SPECBLOCK
from hf_specdec.methods.specblock.network import SpecBlockConfig, SpecBlockDrafter, SpecBlockOptions
from hf_specdec.methods.specblock.training import RECIPE
from hf_specdec.training.recipe import register_recipe

__all__ = ["SpecBlockConfig", "SpecBlockDrafter", "SpecBlockOptions"]

register(
    "specblock",
    SpecBlockDrafter,
    layouts=(SPECBLOCK,),
    serving=Serving(not_exported="only the authors' fork of SGLang supports SpecBlock"),
)
register_recipe(RECIPE)
