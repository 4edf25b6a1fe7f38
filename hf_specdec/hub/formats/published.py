"""The published layouts, in the order in which they can be told apart: the first that recognises a config has it."""

from __future__ import annotations

from hf_specdec.hub.formats import (
    deepspec,
    dflash2,
    dspark,
    gemma4_assistant,
    medusa,
    mtp,
    muse,
    safeailab,
    specblock,
    specforge,
    speculators,
    zlab,
)
from hf_specdec.hub.formats.base import Format, Unsupported

PUBLISHED: tuple[Format | Unsupported, ...] = (
    *speculators.LAYOUTS,
    *muse.LAYOUTS,
    *gemma4_assistant.LAYOUTS,
    *specblock.LAYOUTS,
    *dflash2.LAYOUTS,
    *deepspec.LAYOUTS,
    *dspark.LAYOUTS,
    specforge.SPECFORGE_PEAGLE,  # its configs have a dflash_config, too
    *zlab.LAYOUTS,
    *specforge.LAYOUTS,
    *safeailab.LAYOUTS,
    *medusa.LAYOUTS,
    *mtp.LAYOUTS,
)
