"""What the DFlash layouts have in common: which tensors there are, and what may be said in several places.

In layouts other than z-lab's, embeddings, head and vocabulary map may be the drafter's own. Source: shared facts on
formats, sections 1.4, 3.4 and 5.2. The layouts are in `zlab.py`, `muse.py`, `speculators.py` and `deepspec.py`.
"""

from __future__ import annotations

import re
from typing import Any

from hf_specdec.hub.formats.base import (
    Config,
    Headers,
    Reading,
)

_LEFT_OUT = re.compile(r"rotary_emb\.inv_freq$|^verifier_lm_head\.weight$|^verifier_norm\.weight$|^t2d$")


def dflash_reading(fields: Config, block: Config, stored: Headers | None) -> Reading:
    """Completes the fields of a `DFlashConfig` by what the tensors tell, and names the tensors.

    Args:
        fields: the layer shape, and what else is at the top of a `DFlashConfig`; `draft_vocab_size` is the head's.
        block: what is in its `dflash_config`.
        stored: headers of the weights, or None before they are there.
    """
    fields = dict(fields)
    draft_vocab_size = fields.pop("draft_vocab_size")
    fields.pop("mlp_bias", None)
    block = dict(block)
    names = {name: name for name in stored or () if not _LEFT_OUT.search(name)}
    if stored is not None:
        block["own_embeddings"] = "embed_tokens.weight" in stored
        block["own_head"] = "lm_head.weight" in stored
    smaller = draft_vocab_size != fields["vocab_size"]
    if smaller and (stored is None or block.get("own_head") or "d2t" in stored):  # of its head, or of the target's
        block["draft_vocab_size"] = draft_vocab_size
    else:
        names.pop("d2t", None)  # the constructor's default: an identity map
    return Reading(fields | {"dflash_config": block}, names)


def once(fields: Config, nested: Config, key: str) -> Any:
    """The value of a key that may be at the top or in `dflash_config`.

    Raises:
        ValueError: it is in both, with two values.
    """
    top, inner = fields.get(key), nested.get(key)
    if top is not None and inner is not None and top != inner:
        raise ValueError(
            f"{key} is {top!r} at the top and {inner!r} in dflash_config; remove the one that the drafter was not "
            "trained with."
        )
    return inner if top is None else top


def check_causality(said: Config) -> None:
    """Raises ValueError if the keys that say whether slots see no later slots of their block contradict each other."""
    said = {key: value for key, value in said.items() if value is not None}
    if len(set(map(bool, said.values()))) > 1:
        values = ", ".join(f"{key} {value!r}" for key, value in said.items())
        raise ValueError(f"{values}: they contradict each other. Remove those that the drafter was not trained with.")
