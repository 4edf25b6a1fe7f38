"""DeepSpec's drafters: DFlash under the class name of DSpark, and EAGLE-3 with five taps.

In DeepSpec's DFlash, the slot of the root also predicts a token, unlike in z-lab's; the configs have no field for it.
Both kinds store embeddings and head. Source: shared facts on formats, section 5.2 and A3; deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from hf_specdec.hub.formats.base import (
    Config,
    Format,
    Headers,
    Reading,
    Unsupported,
    architecture,
    decoder_shape,
    layer_list,
)
from hf_specdec.hub.formats.dflash import dflash_reading
from hf_specdec.hub.formats.eagle3 import eagle3_reading
from hf_specdec.hub.formats.keys import decoder


def is_deepspec_dflash(fields: Config) -> bool:
    """Whether a config with the class of DSpark describes a DFlash drafter: no Markov head and no confidence head."""
    named = "Qwen3DSparkModel" in (fields.get("architectures") or ())
    return named and fields.get("markov_rank") == 0 and not fields.get("enable_confidence_head", True)


def taps(fields: Config) -> list[int]:
    layers = layer_list(fields, "target_layer_ids")
    if layers is None:
        raise ValueError("target_layer_ids is missing, so the target layers that the drafter reads are unknown.")
    return layers


def read_dflash(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of DeepSpec's DFlash drafter."""
    ours = decoder_shape(fields, "qwen3") | {
        "draft_vocab_size": fields.get("vocab_size"),
        "num_target_layers": fields.get("num_target_layers"),
        "target_name_or_path": fields.get("target_model_name_or_path"),
    }
    block = {
        "block_size": fields.get("block_size"),
        "mask_token_id": fields.get("mask_token_id"),
        "target_layer_ids": taps(fields),
        "sample_from_anchor": bool(fields.get("sample_from_anchor", True)),
    }
    return dflash_reading(ours, block, stored)


def read_eagle3(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of DeepSpec's EAGLE-3 drafter."""
    ours = decoder_shape(fields, "qwen3") | {
        "draft_vocab_size": fields.get("draft_vocab_size"),
        "target_layer_ids": taps(fields),
        "target_hidden_size": fields.get("target_hidden_size"),
        "target_name_or_path": fields.get("target_model_name_or_path"),
    }
    return eagle3_reading(ours, stored)


GEMMA_4_LAYERS = "draft layers of Gemma 4 shape: four norms, scaled embeddings"
# According to DeepSpec's README, for all its drafters.
TRAINING = {"chat_template": True, "thinking": False}
# The configs are copies of the target's: its partial_rotary_factor does not apply to draft layers.
TARGETS = ("partial_rotary_factor", "target_model_type", "target_text_model_type")
TAPS = ("num_target_layers", "target_layer_ids", "target_model_name_or_path")
DEEPSPEC_DFLASH = Format(
    "DFlash (DeepSpec)",
    "dflash",
    read_dflash,
    decoder(
        "block_size", "enable_confidence_head", "markov_rank", "mask_token_id", "sample_from_anchor", *TAPS,
        idle=("confidence_head_with_markov", "markov_head_type", "num_anchors", *TARGETS),
    ),
    training=TRAINING,
    recognises=is_deepspec_dflash,
    rank=40,
)  # fmt: skip
DEEPSPEC_EAGLE3 = Format(
    "EAGLE-3 (DeepSpec)",
    "eagle3",
    read_eagle3,
    decoder(
        "draft_vocab_size", "target_hidden_size", *TAPS,
        idle=("draft_num_hidden_layers", "step_loss_decay", "ttt_length", *TARGETS),
    ),
    training=TRAINING,
    recognises=architecture("Qwen3Eagle3Model"),
    rank=40,
)  # fmt: skip
DEEPSPEC_GEMMA_4 = Unsupported("DeepSpec EAGLE-3 for Gemma 4", GEMMA_4_LAYERS, architecture("Gemma4Eagle3"), rank=40)
