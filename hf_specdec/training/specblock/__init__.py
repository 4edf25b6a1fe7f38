"""Training SpecBlock drafters: losses, the step, and the recipe of the training command."""

from hf_specdec.training.specblock.losses import BlockLosses, block_losses, smoothed_classes
from hf_specdec.training.specblock.recipe import new_drafter
from hf_specdec.training.specblock.step import SpecBlockStep

__all__ = [
    "BlockLosses",
    "SpecBlockStep",
    "block_losses",
    "new_drafter",
    "smoothed_classes",
]
