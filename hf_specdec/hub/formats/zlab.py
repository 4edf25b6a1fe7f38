"""DFlash as z-lab publishes it, which is also how `DFlashDrafter` is saved: fields and names are ours.

What is particular to DFlash is in `dflash_config`, or at the top of files that others made. JetSpec's drafters are of
this layout, with `causal_head` in `dflash_config`. Source: shared facts on formats, section 1 and A2, and of 2026,
section 3; z-lab/dflash, hao-ai-lab/JetSpec.
"""

from __future__ import annotations

from typing import Any

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
        ValueError: something is said twice, with two values, or of a drafter of another width than its target.
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
    _check_causality(fields.get("is_causal"), nested)
    if nested.get("target_hidden_size") not in (None, fields.get("hidden_size")):
        raise ValueError(
            f"dflash_config.target_hidden_size is {nested['target_hidden_size']!r} and hidden_size "
            f"{fields.get('hidden_size')!r}: DFlash drafters of another width than their target are not supported."
        )
    rest = {key: value for key, value in fields.items() if key not in _NESTED}
    return as_it_is(rest | {"dflash_config": nested}, stored)


def _check_causality(top: Any, block: Config) -> None:
    """Raises ValueError if the ways to say whether slots see later slots of their block contradict each other."""
    said = {"is_causal": top} | {f"dflash_config.{key}": block.get(key) for key in ("causal", "causal_head")}
    said = {key: value for key, value in said.items() if value is not None}
    if len(set(map(bool, said.values()))) > 1:
        values = ", ".join(
            f"{key} {value!r}{' at the top' if key == 'is_causal' else ''}" for key, value in said.items()
        )
        raise ValueError(f"{values}: they contradict each other. Remove those that the drafter was not trained with.")


ZLAB = Format(
    "dflash",
    "dflash",
    read,
    shapes=dflash_shapes,
    refused={"mask_embedding.pt": "a learned vector in place of the mask token's embedding, which is not supported"},
)
