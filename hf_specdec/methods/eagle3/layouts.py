"""The layouts of EAGLE-3: SafeAILab's, SpecForge's, DeepSpec's and that of speculators.

SafeAILab: a Llama config with `draft_vocab_size`, tensors `midlayer.*`. The config has no target layers: the default
three are read. Checkpoints have a head and usually no embeddings. The default rotary base is 10000.

SpecForge: SafeAILab's tensor names, and more config fields. `norm_output`, true by default, is the norm before the head
in this layout; in others the same key selects the state that is passed to the next draft step.

DeepSpec: five taps, embeddings and head are stored.

Source: shared facts on formats, sections 3.1, 3.2, 4, 5, A2 and A6; SafeAILab/EAGLE, sgl-project/SpecForge,
deepseek-ai/DeepSpec, vllm-project/speculators.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from hf_specdec.hub.formats.base import (
    LEFT_OUT,
    WINDOWS,
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
from hf_specdec.hub.formats.deepspec import GEMMA_4_LAYERS, TAPS, TARGETS, TRAINING, taps
from hf_specdec.hub.formats.keys import Section, decoder
from hf_specdec.hub.formats.speculators import common, envelope, layer_config, layers_of, section, speculators, states


def eagle3_reading(fields: Config, stored: Headers | None) -> Reading:
    """Completes the fields of an `Eagle3Config` from the headers of the weights, and converts tensor names.

    Args:
        fields: the fields of an `Eagle3Config` that the config has; `draft_vocab_size` may be None.
        stored: headers of the weights, or None before the weights are downloaded.
    """
    if stored is not None and "sliding_attention" in (fields.get("layer_types") or ()):
        warnings.warn(
            f"The draft layers have a sliding window of {fields.get('sliding_window')}, but EAGLE-3 drafters have full "
            "attention here: on longer texts fewer drafts may be accepted.",
            stacklevel=2,
        )
    fields = {name: value for name, value in fields.items() if name not in WINDOWS}
    if stored is None:
        # Drafters with another hidden size than the target have their own embeddings; others may have them.
        return Reading(fields | {"own_embeddings": True}, {})
    names = {name: re.sub(r"^midlayer\.", "layers.0.", name) for name in stored if not LEFT_OUT.search(name)}
    ours = {new: stored[old] for old, new in names.items()}
    fields = fields | {
        "own_embeddings": "embed_tokens.weight" in ours,
        # Some checkpoints have the model type llama and the norms of a Qwen3 layer, or biases without a config field.
        "qk_norm": "layers.0.self_attn.q_norm.weight" in ours,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in ours,
        "norm_before_fc": fields.get("norm_before_fc", False) or "input_norm.weight" in ours,
        "fc_norm": fields.get("fc_norm", False) or "fc_norm.0.weight" in ours,
    }
    if fields.get("draft_vocab_size") is None and "lm_head.weight" in ours:
        fields["draft_vocab_size"] = ours["lm_head.weight"].shape[0]
    if fields.get("draft_vocab_size") == fields["vocab_size"]:
        names.pop("d2t", None)  # the identity map, which the constructor makes
    return Reading(fields, names)


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


def read_specforge(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of SpecForge's EAGLE-3 drafter."""
    ours = decoder_shape(fields, "llama") | {
        "draft_vocab_size": fields.get("draft_vocab_size"),
        "target_hidden_size": fields.get("target_hidden_size"),
        "fc_norm": bool(fields.get("fc_norm", False)),
        "norm_before_head": bool(fields.get("norm_output", True)),
    }
    return eagle3_reading(ours | eagle_config(fields), stored)


SPECFORGE = Format(
    "EAGLE-3 (SpecForge)",
    "eagle3",
    read_specforge,
    decoder("draft_vocab_size", "fc_norm", "norm_output", "target_hidden_size", **EAGLE_CONFIG),
    other_weights=("pytorch_model.bin",),
    check=check_vocabulary_maps,
    recognises=lambda config: any(name.endswith("Eagle3") for name in config.get("architectures") or ()),
    rank=81,
)
LATENT_ATTENTION = Unsupported(
    "EAGLE-3 with multi-head latent attention",
    "a draft layer with latent attention",
    architecture("Eagle3DeepseekV2"),
    rank=80,
)
SAFEAILAB = Format(
    "EAGLE-3 (SafeAILab)",
    "eagle3",
    read_specforge,  # the keys of SpecForge that are not among these have the values that are always so here
    decoder("draft_vocab_size", "target_hidden_size", **EAGLE_CONFIG),
    other_weights=("pytorch_model.bin",),
    check=check_vocabulary_maps,
    recognises=lambda config: "draft_vocab_size" in config and config.get("num_hidden_layers") == 1,
    recognises_names=lambda names: any(name.startswith("midlayer.") for name in names),
    rank=90,
)


def read_deepspec(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of DeepSpec's EAGLE-3 drafter."""
    ours = decoder_shape(fields, "qwen3") | {
        "draft_vocab_size": fields.get("draft_vocab_size"),
        "target_layer_ids": taps(fields),
        "target_hidden_size": fields.get("target_hidden_size"),
        "target_name_or_path": fields.get("target_model_name_or_path"),
    }
    return eagle3_reading(ours, stored)


DEEPSPEC_EAGLE3 = Format(
    "EAGLE-3 (DeepSpec)",
    "eagle3",
    read_deepspec,
    decoder(
        "draft_vocab_size", "target_hidden_size", *TAPS,
        idle=("draft_num_hidden_layers", "step_loss_decay", "ttt_length", *TARGETS),
    ),
    training=TRAINING,
    recognises=architecture("Qwen3Eagle3Model"),
    rank=40,
)  # fmt: skip
DEEPSPEC_GEMMA_4 = Unsupported("DeepSpec EAGLE-3 for Gemma 4", GEMMA_4_LAYERS, architecture("Gemma4Eagle3"), rank=40)
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def read_speculators_eagle3(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of an EAGLE-3 drafter in the speculators layout."""
    # All defaults are those of the training class; in vLLM a missing norm_before_residual is true.
    ours = common(fields) | {flag: bool(fields.get(flag, False)) for flag in EAGLE3_FLAGS}
    ours |= {
        "target_layer_ids": layers_of(fields, "eagle_aux_hidden_state_layer_ids"),
        "target_hidden_size": fields.get("target_hidden_size"),
    }
    return eagle3_reading(ours, stored)


def write_eagle3(fields: Config, target: Config) -> Config:
    """The `config.json` for an `Eagle3Drafter` whose config has these fields.

    Args:
        fields: all fields of an `Eagle3Config`.
        target: see `envelope`.

    Raises:
        ValueError: the layout or vLLM does not support the value of a field.
    """
    if not fields["norm_before_head"]:
        raise ValueError("norm_before_head is false, and in this layout there is always a norm before the head.")
    taps = fields["target_layer_ids"]
    if taps is None:
        layers = target["num_layers"]
        if layers is None:
            raise ValueError(
                "The drafter reads EAGLE-3's default target layers, which depend on the number of layers of the "
                "target: pass num_target_layers."
            )
        taps = [1, layers // 2 - 1, layers - 4]
    config = envelope("eagle3", fields, target, "Eagle3DraftModel", speculative_tokens=5) | {
        "draft_vocab_size": fields["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": states(taps, target),
    }
    config |= {flag: fields[flag] for flag in EAGLE3_FLAGS}
    if fields["target_hidden_size"] != fields["hidden_size"]:
        config["target_hidden_size"] = fields["target_hidden_size"]
    for key in ("attention_bias", "mlp_bias"):
        if fields["qk_norm"] and fields[key]:
            # vLLM's Qwen3 layer, which has the norms, has no biases on o_proj and the MLP.
            raise ValueError(f"{key} and qk_norm are both set, and vLLM has no draft layer with both.")
    layer = layer_config(fields, "qwen3" if fields["qk_norm"] else "llama") | {
        "num_hidden_layers": fields["num_hidden_layers"]
    }
    if len(taps) != 3:
        # vLLM uses this nested config as the draft model's, and its Llama class reads the number of taps only from this
        # field; the default is three (vllm-project/vllm, llama_eagle3.py).
        layer["num_aux_hidden_states"] = len(taps)
    return config | {"transformer_layer_config": layer}


SPECULATORS_EAGLE3 = speculators(
    "eagle3",
    "EAGLE-3",
    read_speculators_eagle3,
    write_eagle3,
    # The number of taps is the length of their list.
    section("eagle_aux_hidden_state_layer_ids", *EAGLE3_FLAGS, layer=decoder(idle=("num_aux_hidden_states",))),
)
