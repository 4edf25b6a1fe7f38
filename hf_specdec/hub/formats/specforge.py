"""EAGLE-3 and P-EAGLE as SpecForge exports them: SafeAILab's tensor names, and more config fields.

`norm_output`, true by default, is the norm before the head in this layout; in others the same key selects the state
that is passed to the next draft step. Source: shared facts on formats, section 5.1 and A2, A6; sgl-project/SpecForge.
"""

from __future__ import annotations

from typing import Any

from hf_specdec.hub.formats.base import (
    Config,
    Format,
    Headers,
    Reading,
    Unsupported,
    architecture,
    check_vocabulary_maps,
    decoder_shape,
    layer_list,
)
from hf_specdec.hub.formats.eagle3 import eagle3_reading, peagle_reading
from hf_specdec.hub.formats.keys import Section, decoder

# Keys of configs with an `eagle_config`, as nvidia's trainer writes it; those in `only` define the layer.
EAGLE_CONFIG: dict[str, Any] = {
    "idle": ("bias", "target_model_type", "truncated_vocab_size"),  # follow from the tensors, or are the target's
    "nested": {
        "eagle_config": Section(
            read=frozenset(("eagle_aux_hidden_state_layer_ids", "norm_before_fc")),
            only={
                "next_layer_regular": (True,),
                "parallel_draft_step": (1,),
                "use_aux_hidden_state": (True,),
                "use_input_layernorm_in_first_layer": (True,),
                "use_last_layernorm": (True,),
                "use_mtp_layernorm": (False,),
            },
        )
    },
}


def eagle_config(fields: Config) -> Config:
    """Our fields for the nested `eagle_config` of SpecForge's and nvidia's drafters, if there is one.

    Its layer ids have the same meaning as ours: 0-based layers whose outputs are read.
    """
    nested = fields.get("eagle_config") or {}
    found: Config = {"target_layer_ids": layer_list(nested, "eagle_aux_hidden_state_layer_ids")}
    if nested.get("norm_before_fc"):
        found["norm_before_fc"] = True
    return found


def read(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of SpecForge's EAGLE-3 drafter."""
    ours = decoder_shape(fields, "llama") | {
        "draft_vocab_size": fields.get("draft_vocab_size"),
        "target_hidden_size": fields.get("target_hidden_size"),
        "fc_norm": bool(fields.get("fc_norm", False)),
        "norm_before_head": bool(fields.get("norm_output", True)),
    }
    return eagle3_reading(ours | eagle_config(fields), stored)


def read_peagle(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of SpecForge's P-EAGLE drafter."""
    return peagle_reading(read(fields, stored), fields)


SPECFORGE = Format(
    "EAGLE-3 (SpecForge)",
    "eagle3",
    read,
    decoder("draft_vocab_size", "fc_norm", "norm_output", "target_hidden_size", **EAGLE_CONFIG),
    other_weights=("pytorch_model.bin",),
    check=check_vocabulary_maps,
    recognises=lambda config: any(name.endswith("Eagle3") for name in config.get("architectures") or ()),
    rank=81,
)
SPECFORGE_PEAGLE = Format(
    "P-EAGLE (SpecForge)",
    "peagle",
    read_peagle,
    decoder(
        "draft_vocab_size", "fc_norm", "mask_token_id", "norm_output", "target_hidden_size",
        idle=EAGLE_CONFIG["idle"],
        nested={**EAGLE_CONFIG["nested"], "dflash_config": Section(read=frozenset(("mask_token_id",)))},
    ),
    other_weights=("pytorch_model.bin",),
    check=check_vocabulary_maps,
    recognises=architecture("PEagle"),
    rank=60,  # its configs have a dflash_config, as those of the next ones
)  # fmt: skip
LATENT_ATTENTION = Unsupported(
    "EAGLE-3 with multi-head latent attention",
    "a draft layer with latent attention",
    architecture("Eagle3DeepseekV2"),
    rank=80,
)
