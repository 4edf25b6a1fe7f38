"""DFlash: a block-diffusion drafter on the target's features; loads and saves the published z-lab layout."""

from hf_specdec.drafters.dflash.candidates import ChainGenerator
from hf_specdec.drafters.dflash.configuration import DFlashConfig, DFlashOptions
from hf_specdec.drafters.dflash.modeling import DFlashDrafter
from hf_specdec.drafters.registry import register_family, register_marginal_method

__all__ = ["DFlashConfig", "DFlashDrafter", "DFlashOptions"]

register_family("dflash", drafter=DFlashDrafter)
register_marginal_method("dflash", lambda source, options: ChainGenerator(source))
