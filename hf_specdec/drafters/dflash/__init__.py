"""DFlash: a block-diffusion drafter on the target's features; loads and saves the published z-lab layout."""

from typing import Any

from torch import Tensor

from hf_specdec.drafters.dflash.candidates import ChainGenerator
from hf_specdec.drafters.dflash.configuration import DFlashConfig, DFlashOptions
from hf_specdec.drafters.dflash.modeling import DFlashDrafter
from hf_specdec.drafters.registry import Serving, register, register_marginal_method
from hf_specdec.hub.formats.deepspec import DEEPSPEC_DFLASH
from hf_specdec.hub.formats.muse import MUSE
from hf_specdec.hub.formats.speculators import SPECULATORS
from hf_specdec.hub.formats.zlab import ZLAB

__all__ = ["BLOCK_SERVING", "DFlashConfig", "DFlashDrafter", "DFlashOptions"]


def _fields(drafter: DFlashDrafter) -> dict[str, Any]:
    """The config's fields, with the window and causality of each layer, which follow from several fields."""
    config = drafter.config
    layers = range(config.num_hidden_layers)
    return config.to_dict() | {
        "block_size": config.block_size,
        "target_layer_ids": config.target_layer_ids,
        "windows": [config.window(layer) for layer in layers],
        "causal": [config.block_is_causal(layer) for layer in layers],
    }


def _head_ids(drafter: DFlashDrafter) -> Tensor | None:
    """VLLM would apply the target's whole head, and use its first rows as those of the draft vocabulary."""
    return drafter.target_ids if drafter.config.maps_vocabulary and not drafter.config.own_head else None


# Of this method and those that draft blocks with its network.
BLOCK_SERVING = Serving(
    "dflash",
    tokens=lambda drafter: drafter.config.block_size - drafter.config.first_slot,
    # Earlier versions mask full layers causally (vllm-project/vllm#47745, #52816).
    since=((0, 28), "masks the layers of {method} drafters wrongly and accepts few drafts"),
    fields=_fields,
    head_ids=_head_ids,
)
register(
    "dflash",
    DFlashDrafter,
    layouts=(ZLAB, DEEPSPEC_DFLASH, MUSE, SPECULATORS["dflash"]),
    serving=BLOCK_SERVING,
)
register_marginal_method("dflash", lambda source, options: ChainGenerator(source))
