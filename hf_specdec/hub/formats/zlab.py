"""DFlash as z-lab publishes it, which is also how `DFlashDrafter` is saved: fields and names are ours.

Source: shared facts on formats, section 1; z-lab/dflash.
"""

from __future__ import annotations

from hf_specdec.hub.formats.base import Config, Format, as_it_is
from hf_specdec.hub.formats.dflash import dflash_shapes


def is_zlab(config: Config) -> bool:
    """Whether a `config.json` is of the z-lab DFlash layout; its `model_type` says nothing."""
    return "dflash_config" in config or any(name.startswith("DFlash") for name in config.get("architectures") or ())


ZLAB = Format("dflash", "dflash", as_it_is, shapes=dflash_shapes)
