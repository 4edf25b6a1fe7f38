"""DFlash 2 as z-lab publishes it; `DFlash2Drafter` is saved in this layout too.

It is the layout of DFlash with further keys, in `dflash_config` or at the top level, and further tensors, all required.
Source: shared facts on formats of 2026, section 1; z-lab/dflash.
"""

from __future__ import annotations

from dataclasses import replace

from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, once
from hf_specdec.hub.formats.keys import Section
from hf_specdec.hub.formats.zlab import ZLAB
from hf_specdec.hub.formats.zlab import read as read_zlab

CONVOLUTIONS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_KEYS = (*CONVOLUTIONS, "output_multiplier", "input_embedding_scale")
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def is_dflash2(fields: Config) -> bool:
    """Whether a `config.json` has z-lab's layout of DFlash 2."""
    named = any("DFlash2" in name for name in fields.get("architectures") or ())
    return named or bool({"selector_rank", "conv_kernel_size"} & {*fields, *(fields.get("dflash_config") or ())})


def read(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DFlash 2 drafter in z-lab's layout.

    Raises:
        ValueError: a key is in two places, with different values.
    """
    nested = dict(fields.get("dflash_config") or {})
    block = {key: once(fields, nested, key) for key in _KEYS}
    cap = once(fields, nested, "final_logit_softcapping")
    nested |= {key: value for key, value in block.items() if value is not None}
    nested.pop("final_logit_softcapping", None)
    rest = {key: value for key, value in fields.items() if key not in _KEYS}
    rest |= {"dflash_config": nested, "final_logit_softcapping": cap if cap is not None and cap > 0 else None}
    reading = read_zlab(rest, stored)
    # Some checkpoints have the codebooks as embedding modules.
    tables = {f"{codebook}.weight": codebook for codebook in _CODEBOOKS}
    return Reading(reading.fields, {name: tables.get(ours, ours) for name, ours in reading.names.items()})


def _with_keys(section: Section, *further: str) -> Section:
    """A section of DFlash's layout with the additional keys."""
    only = {key: values for key, values in section.only.items() if key not in _KEYS}
    return replace(section, read=section.read.union(_KEYS, further), only=only)


_zlab = ZLAB.keys
assert _zlab is not None
_block = _with_keys(_zlab.nested["dflash_config"], "final_logit_softcapping")
DFLASH2 = Format(
    "DFlash 2",
    "dflash2",
    read,
    replace(_with_keys(_zlab), nested={**_zlab.nested, "dflash_config": _block}),
    refused=ZLAB.refused,
    recognises=is_dflash2,
    rank=30,
)
