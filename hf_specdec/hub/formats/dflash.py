"""What the DFlash layouts beside z-lab's have in common: embeddings, head and vocabulary map may be the drafter's own.

Source: shared facts on formats, sections 3.4 and 5.2. The layouts are in `speculators.py` and `deepspec.py`.
"""

from __future__ import annotations

import re

from hf_specdec.hub.formats.base import Config, Headers, Reading

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
    if block.get("own_head") and draft_vocab_size != fields["vocab_size"]:
        block["draft_vocab_size"] = draft_vocab_size
    else:
        names.pop("d2t", None)  # the constructor's default: an identity map
    return Reading(fields | {"dflash_config": block}, names)
