"""What the layouts of DeepSpec have in common. Source: shared facts on formats, section 5.2; deepseek-ai/DeepSpec."""

from __future__ import annotations

from hf_specdec.hub.formats.base import Config, layer_list


def taps(fields: Config) -> list[int]:
    """The layers in `target_layer_ids`; raises ValueError if there are none."""
    layers = layer_list(fields, "target_layer_ids")
    if layers is None:
        raise ValueError("target_layer_ids is missing, so the target layers that the drafter reads are unknown.")
    return layers


GEMMA_4_LAYERS = "draft layers of Gemma 4 shape: four norms, scaled embeddings"
# According to DeepSpec's README, for all its drafters.
TRAINING = {"chat_template": True, "thinking": False}
# The configs are copies of the target's: its partial_rotary_factor does not apply to draft layers.
TARGETS = ("partial_rotary_factor", "target_model_type", "target_text_model_type")
TAPS = ("num_target_layers", "target_layer_ids", "target_model_name_or_path")
