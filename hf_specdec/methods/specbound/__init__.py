"""SpecBound: the target drafts for itself, with exit heads on its shallow layers, stored as LoRA adapters."""

from hf_specdec.drafting.registry import Serving, register
from hf_specdec.methods.specbound.drafting import ReplayGenerator
from hf_specdec.methods.specbound.network import (
    SpecBoundConfig,
    SpecBoundDrafter,
    SpecBoundOptions,
    adapter_shapes,
)
from hf_specdec.methods.specbound.training import RECIPE
from hf_specdec.training.recipe import register_recipe

__all__ = ["SpecBoundConfig", "SpecBoundDrafter", "SpecBoundOptions"]

register(
    "specbound",
    SpecBoundDrafter,
    own_files=adapter_shapes,
    serving=Serving(not_exported="SpecBound changes how the target runs, and vLLM has no class for it"),
    replays=ReplayGenerator,
)
register_recipe(RECIPE)
