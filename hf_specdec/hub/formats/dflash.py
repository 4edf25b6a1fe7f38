"""What the DFlash layouts have in common: tensor names, and fields that may be in several places of the config.

In layouts other than z-lab's, a checkpoint may have its own embeddings, head and vocabulary map. Source: shared facts
on formats, sections 1.4, 3.4 and 5.2. The layouts are in `zlab.py`, `muse.py`, `speculators.py` and `deepspec.py`.
"""

from __future__ import annotations

import re
from typing import Any

from hf_specdec.hub.formats.base import ROTARY, Config, Headers, Reading

# Rotary tables are computed from the config; some speculators checkpoints still hold weights of the verifier.
LEFT_OUT = re.compile(rf"{ROTARY}|^verifier_lm_head\.weight$|^verifier_norm\.weight$|^t2d$")


def dflash_reading(fields: Config, block: Config, stored: Headers | None) -> Reading:
    """Completes the fields of a `DFlashConfig` from the headers of the weights, and converts tensor names.

    Args:
        fields: the top-level fields of a `DFlashConfig`, and `draft_vocab_size`, the number of rows of the head.
        block: the fields in its `dflash_config`.
        stored: headers of the weights, or None before the weights are downloaded.
    """
    fields = dict(fields)
    draft_vocab_size = fields.pop("draft_vocab_size")
    fields.pop("mlp_bias", None)
    block = dict(block)
    names = {name: name for name in stored or () if not LEFT_OUT.search(name)}
    if stored is not None:
        block["own_embeddings"] = "embed_tokens.weight" in stored
        block["own_head"] = "lm_head.weight" in stored
    smaller = draft_vocab_size != fields["vocab_size"]
    if smaller and (stored is None or block.get("own_head") or "d2t" in stored):  # own head, or rows of the target's
        block["draft_vocab_size"] = draft_vocab_size
    else:
        names.pop("d2t", None)  # the identity map, which the constructor makes
    return Reading(fields | {"dflash_config": block}, names)


def once(fields: Config, nested: Config, key: str) -> Any:
    """The value of a key that may be at the top level or in `dflash_config`.

    Raises:
        ValueError: the key is in both, with different values.
    """
    top, inner = fields.get(key), nested.get(key)
    if top is not None and inner is not None and top != inner:
        raise ValueError(
            f"{key} is {top!r} at the top level and {inner!r} in dflash_config; remove the one that the drafter was "
            "not trained with."
        )
    return inner if top is None else top


def check_causality(fields: Config) -> None:
    """Raises ValueError if the keys that define whether attention inside a block is causal contradict each other."""
    fields = {key: value for key, value in fields.items() if value is not None}
    if len(set(map(bool, fields.values()))) > 1:
        values = ", ".join(f"{key} {value!r}" for key, value in fields.items())
        raise ValueError(f"{values}: they contradict each other. Remove those that the drafter was not trained with.")
