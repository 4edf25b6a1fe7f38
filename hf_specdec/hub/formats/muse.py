"""transformers' DFlash drafter, of Muse Glimmer: z-lab's network with two other tensor names and a flat config.

It uses the target's embedding and head, and its config has no vocabulary size. No layer is causal inside the block.
Its sliding window excludes the token's own position, ours includes it. Missing fields have the defaults of its class.
Source: shared facts on formats of 2026, section 6.1; transformers, muse_glimmer_assistant.
"""

from __future__ import annotations

import re

from hf_specdec.hub.formats.base import (
    ROTARY,
    Config,
    Format,
    Headers,
    Reading,
    layer_list,
    rope_parameters,
    with_defaults,
)  # fmt: skip
from hf_specdec.hub.formats.keys import decoder

MODEL_TYPE = "muse_glimmer_assistant"
_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# Defaults of fields that are not in `with_defaults`.
_BLOCK_SIZE, _MASK_TOKEN_ID, _TARGET_LAYER_IDS, _ROPE_THETA = 16, 201818, [1, 13, 25, 37, 49], 500000.0


def read(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a `MuseGlimmerAssistantModel`.

    Raises:
        ValueError: a size is not valid.
    """
    ours = with_defaults(fields, MODEL_TYPE)
    if type(ours["sliding_window"]) is not int or ours["sliding_window"] < 0:
        raise ValueError(f"sliding_window is {ours['sliding_window']!r}; it must be an integer of at least 0.")
    ours |= {
        "vocab_size": ours.get("vocab_size"),
        "attention_bias": False,
        "is_causal": False,
        "sliding_window": ours["sliding_window"] + 1,
        "layer_types": fields.get("layer_types") or ["sliding_attention"] * ours["num_hidden_layers"],
        "rope_parameters": rope_parameters(fields, _ROPE_THETA),
        "tie_word_embeddings": False,
        "dflash_config": {
            "block_size": fields.get("block_size", _BLOCK_SIZE),
            "mask_token_id": fields.get("mask_token_id", _MASK_TOKEN_ID),
            "target_layer_ids": layer_list(fields, "target_layer_ids") or _TARGET_LAYER_IDS,
        },
    }
    return Reading(ours, {name: _NAMES.get(name, name) for name in stored or () if not re.search(ROTARY, name)})


MUSE = Format(
    "DFlash (transformers)",
    "dflash",
    read,
    decoder("block_size", "mask_token_id", "target_layer_ids", only={"attention_bias": (False,), "mlp_bias": (False,)}),
    recognises=lambda config: config.get("model_type") == MODEL_TYPE,
    rank=20,
)
