"""DFlash as z-lab publishes it; `DFlashDrafter` has the same fields and names, and is saved in this layout.

Fields of DFlash are in `dflash_config`, in some files of others at the top level. JetSpec's drafters have this layout
too, with `causal_head` in `dflash_config`. Source: shared facts on formats, section 1 and A2, and of 2026, section 3;
z-lab/dflash, hao-ai-lab/JetSpec.
"""

from __future__ import annotations

from typing import Any

from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, Unsupported, architecture, as_it_is, once
from hf_specdec.hub.formats.dflash import check_causality
from hf_specdec.hub.formats.keys import OURS, Section, decoder

_NESTED = ("mask_token_id", "target_layer_ids", "sample_from_anchor", "own_embeddings", "own_head", "draft_vocab_size")
# Read in either place.
_EITHER = ("block_size", "num_target_layers")


def read(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DFlash drafter in z-lab's layout.

    Raises:
        ValueError: a key is in two places, with different values, or the hidden size is not the target's.
    """
    nested = dict(fields.get("dflash_config") or {})
    for key in (*_NESTED, *_EITHER):
        value = once(fields, nested, key)
        if key in _NESTED and value is not None:
            nested[key] = value
    causal = {f"dflash_config.{key}": nested.get(key) for key in ("causal", "causal_head")}
    check_causality({"is_causal": fields.get("is_causal")} | causal)
    if nested.get("target_hidden_size") not in (None, fields.get("hidden_size")):
        raise ValueError(
            f"dflash_config.target_hidden_size is {nested['target_hidden_size']!r} and hidden_size "
            f"{fields.get('hidden_size')!r}: DFlash drafters with another hidden size than their target are not "
            "supported."
        )
    if nested.get("layer_ids") not in (None, nested.get("target_layer_ids")):
        raise ValueError(
            f"dflash_config.layer_ids is {nested['layer_ids']!r} and target_layer_ids "
            f"{nested.get('target_layer_ids')!r}; only the second is read: correct it, or remove layer_ids."
        )
    rest = {key: value for key, value in fields.items() if key not in _NESTED}
    if rest.get("num_target_layers") is None and nested.get("num_target_layers") is not None:
        rest["num_target_layers"] = nested["num_target_layers"]
    return as_it_is(rest | {"dflash_config": nested}, stored)


# Parts of other networks with DFlash's class, and the values that switch them off.
_NOT_PLAIN: dict[str, tuple[Any, ...]] = {
    "enable_confidence_head": (False,),
    "input_embedding_scale": (1,),
    "markov_rank": (0,),
    "output_multiplier": (1,),
}
_BLOCK = Section(
    read=frozenset(
        (
            "attention_sink_bias", "causal", "causal_head", "layer_ids", "num_target_layers", "swa_window_size",
            "target_hidden_size", "use_swa", *_NESTED, *_EITHER,
        )
    ),
    idle=frozenset(("runtime_block_size",)),  # used by engines; smaller than the trained one
    only=_NOT_PLAIN
    | {
        "attention_mode": ("gqa", "mha"),  # follows from the numbers of heads
        "projector_type": ("dflash",),
        "pure_draft_prefix_len": (0,),
        "shift_label": (False,),
        "use_aux_hidden_state": (True,),
    },
)  # fmt: skip
ZLAB = Format(
    "dflash",
    "dflash",
    read,
    decoder(
        "dflash_config",
        "final_logit_softcapping",
        "is_causal",
        "is_neox_style",
        "num_target_layers",
        "rope_is_neox_style",
        *_NESTED,
        *_EITHER,
        *OURS,
        only=_NOT_PLAIN,
        nested={"dflash_config": _BLOCK},
    ),
    refused={"mask_embedding.pt": "a learned vector instead of the mask token's embedding, which is not supported"},
    # The `model_type` is that of a language model.
    recognises=lambda config: (
        "dflash_config" in config or any(name.startswith("DFlash") for name in config.get("architectures") or ())
    ),
    rank=71,
)
LAGUNA = Unsupported(
    "Laguna DFlash",
    "a norm for each tapped state and gated, fused attention",
    architecture("DFlashLaguna"),
    rank=70,
)
