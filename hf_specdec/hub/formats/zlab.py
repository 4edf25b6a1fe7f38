"""DFlash as z-lab publishes it, which is also how `DFlashDrafter` is saved: fields and names are ours.

What is particular to DFlash is in `dflash_config`, or at the top of files that others made. Source: shared facts on
formats, section 1 and A2; z-lab/dflash.
"""

from __future__ import annotations

from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, as_it_is
from hf_specdec.hub.formats.dflash import dflash_shapes

_NESTED = ("mask_token_id", "target_layer_ids", "sample_from_anchor", "own_embeddings", "own_head", "draft_vocab_size")
# `DFlashConfig` reads it in either place.
_EITHER = ("block_size",)


def is_zlab(config: Config) -> bool:
    """Whether a `config.json` is of the z-lab DFlash layout; its `model_type` says nothing."""
    return "dflash_config" in config or any(name.startswith("DFlash") for name in config.get("architectures") or ())


def read(fields: Config, stored: Headers | None) -> Reading:
    """Our fields and tensor names for a DFlash drafter of the z-lab layout.

    Raises:
        ValueError: a field is at the top and in `dflash_config`, with two values.
    """
    top = {key: fields[key] for key in (*_NESTED, *_EITHER) if fields.get(key) is not None}
    nested = dict(fields.get("dflash_config") or {})
    for key, value in top.items():
        if nested.get(key) is None:
            if key in _NESTED:
                nested[key] = value
        elif nested[key] != value:
            raise ValueError(
                f"{key} is {value!r} at the top and {nested[key]!r} in dflash_config; remove the one that the drafter "
                "was not trained with."
            )
    rest = {key: value for key, value in fields.items() if key not in _NESTED}
    return as_it_is(rest | {"dflash_config": nested}, stored)


ZLAB = Format(
    "dflash",
    "dflash",
    read,
    shapes=dflash_shapes,
    refused={"mask_embedding.pt": "a learned vector in place of the mask token's embedding, which is not supported"},
)
