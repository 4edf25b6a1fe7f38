"""What the DFlash layouts have in common: tensor names, and fields that may be in several places of the config.

In layouts other than z-lab's, a checkpoint may have its own embeddings, head and vocabulary map. Source: shared facts
on formats, sections 1.4, 3.4 and 5.2. The layouts are in `zlab.py`, `muse.py`, `speculators.py` and `deepspec.py`.
"""

from __future__ import annotations

from hf_specdec.hub.formats.base import LEFT_OUT, Config, Headers, Reading


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


def check_causality(fields: Config) -> None:
    """Raises ValueError if the keys that define whether attention inside a block is causal contradict each other."""
    fields = {key: value for key, value in fields.items() if value is not None}
    if len(set(map(bool, fields.values()))) > 1:
        values = ", ".join(f"{key} {value!r}" for key, value in fields.items())
        raise ValueError(f"{values}: they contradict each other. Remove those that the drafter was not trained with.")
