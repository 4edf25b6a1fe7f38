"""transformers' own DFlash drafter, of Muse Glimmer: z-lab's network under two other tensor names, with a flat config.

It borrows the target's embedding and head, and its config names no vocabulary. No layer is causal inside the block.
Its window counts the distance, ours the positions: one more. Fields left out are at the defaults of its config class.
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
)
from hf_specdec.hub.formats.keys import decoder

MODEL_TYPE = "muse_glimmer_assistant"
_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# Defaults that are no decoder's.
_BLOCK_SIZE, _MASK_TOKEN_ID, _TARGET_LAYER_IDS, _ROPE_THETA = 16, 201818, [1, 13, 25, 37, 49], 500000.0


def is_muse(config: Config) -> bool:
    """Whether a `config.json` is of transformers' DFlash drafter."""
    return config.get("model_type") == MODEL_TYPE


def read(fields: Config, stored: Headers | None) -> Reading:
    """Our fields and tensor names for a `MuseGlimmerAssistantModel`.

    Raises:
        ValueError: a size is none.
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
)
