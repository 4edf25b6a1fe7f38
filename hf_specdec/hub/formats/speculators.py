"""The speculators layout of vllm-project: fields of the drafter, and a nested config of its layers.

It is used for EAGLE-3, P-EAGLE, DFlash, DFlash 2 and DSpark drafters. Its layer ids are indices of
`output_hidden_states`, which are one more than ours. Missing fields of the nested config have the defaults of its
class; we write all fields, since readers have different defaults. Tensors have our names. Source: shared facts on
formats, sections 3.1, 3.2, 3.4, 10.2 and 10.3, and of 2026, section 1.6; vllm-project/speculators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from hf_specdec.hub.formats.base import (
    Config,
    Format,
    Headers,
    Reading,
    Unsupported,
    check_vocabulary_maps,
    decoder_shape,
    layer_list,
)
from hf_specdec.hub.formats.dflash import dflash_reading
from hf_specdec.hub.formats.dflash2 import CONVOLUTIONS
from hf_specdec.hub.formats.dspark import HEADS as DSPARK_HEADS
from hf_specdec.hub.formats.dspark import with_heads
from hf_specdec.hub.formats.eagle3 import eagle3_reading, peagle_reading
from hf_specdec.hub.formats.keys import TRANSFORMERS, Section, decoder

# Of the training class.
DFLASH2_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def speculators_type(fields: Config) -> str | None:
    """The kind of drafter; None for a config in another layout."""
    if "speculators_model_type" not in fields and "speculators_config" not in fields:
        return None
    return (
        fields.get("speculators_model_type") or (fields.get("speculators_config") or {}).get("algorithm") or "unknown"
    )


def common(fields: Config) -> Config:
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"transformer_layer_config is {layer!r}; it must be the config of the draft layers.")
    verifier: Any = (fields.get("speculators_config") or {}).get("verifier") or {}
    return decoder_shape(layer) | {
        "draft_vocab_size": fields.get("draft_vocab_size", 32000),
        "target_name_or_path": verifier.get("name_or_path"),
    }


def layers_of(fields: Config, key: str) -> list[int] | None:
    """The target layers whose outputs are read: the input of layer L is the output of layer L - 1."""
    states = layer_list(fields, key)
    return None if states is None else [index - 1 for index in states]


def read_eagle3(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of an EAGLE-3 drafter in the speculators layout."""
    # All defaults are those of the training class; in vLLM a missing norm_before_residual is true.
    ours = common(fields) | {flag: bool(fields.get(flag, False)) for flag in EAGLE3_FLAGS}
    ours |= {
        "target_layer_ids": layers_of(fields, "eagle_aux_hidden_state_layer_ids"),
        "target_hidden_size": fields.get("target_hidden_size"),
    }
    return eagle3_reading(ours, stored)


def read_peagle(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a P-EAGLE drafter in the speculators layout."""
    return peagle_reading(read_eagle3(fields, stored), fields)


def read_dflash(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DFlash drafter in the speculators layout."""
    ours = common(fields)
    taps = layers_of(fields, "aux_hidden_state_layer_ids")
    if taps is None:
        raise ValueError(
            "aux_hidden_state_layer_ids is missing, so the target layers that the drafter reads are unknown; add them "
            "(indices of output_hidden_states) to its config.json."
        )
    if fields.get("target_hidden_size") not in (None, ours["hidden_size"]):
        raise ValueError(
            f"target_hidden_size is {fields['target_hidden_size']!r} and hidden_size {ours['hidden_size']!r}: DFlash "
            "drafters with another hidden size than their target are not supported."
        )
    causal = fields["transformer_layer_config"].get("is_causal")
    if fields.get("sliding_window_non_causal"):
        if causal:
            raise ValueError(
                "sliding_window_non_causal is true, and transformer_layer_config.is_causal too: remove the one that "
                "the drafter was not trained with."
            )
        causal = False
    if causal is not None:  # otherwise sliding layers are causal inside the block, and full layers are not
        ours["is_causal"] = bool(causal)
    block = {
        "block_size": fields.get("block_size", 8),
        "mask_token_id": fields.get("mask_token_id"),
        "target_layer_ids": taps,
        "sample_from_anchor": bool(fields.get("sample_from_anchor", False)),
    }
    return dflash_reading(ours, block, stored)


def read_dspark(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DSpark drafter in the speculators layout."""
    # Defaults of the class; engines have different ones for the slots (shared facts on formats of 2026, section 2.6).
    given = {"sample_from_anchor": True, "markov_rank": 256, "markov_head_type": "vanilla"} | fields
    reading = read_dflash(given, stored)
    heads = {key: given[key] for key in DSPARK_HEADS if given.get(key) is not None}
    block = {"projector_type": "dspark"} | reading.fields["dflash_config"] | heads
    return with_heads(Reading(reading.fields | {"dflash_config": block}, reading.names), stored)


def read_dflash2(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DFlash 2 drafter in the speculators layout."""
    given = {"sliding_window_non_causal": True} | DFLASH2_DEFAULTS | fields
    reading = read_dflash(given, stored)
    block = reading.fields["dflash_config"] | {key: given[key] for key in CONVOLUTIONS}
    return Reading(reading.fields | {"dflash_config": block}, reading.names)


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


def write_peagle(fields: Config, target: Config) -> Config:
    """The `config.json` for a `PEagleDrafter` whose config has these fields; arguments as for `write_eagle3`."""
    if fields["fc_norm"]:
        raise ValueError("fc_norm is true, and vLLM does not read it for P-EAGLE drafters.")
    tokens = fields["num_draft_tokens"]
    about = envelope("peagle", fields, target, "PEagleSpeculator", speculative_tokens=tokens)
    return write_eagle3(fields, target) | about | {"mask_token_id": fields["mask_token_id"]}


def write_dflash(fields: Config, target: Config) -> Config:
    """The `config.json` for a `DFlashDrafter` whose config has these fields; arguments as for `write_eagle3`."""
    return block_config("dflash", "DFlashDraftModel", fields, target)


def write_dflash2(fields: Config, target: Config) -> Config:
    """The `config.json` for a `DFlash2Drafter` whose config has these fields; arguments as for `write_eagle3`."""
    block = fields["dflash_config"]
    for key in ("output_multiplier", "input_embedding_scale"):
        if block.get(key, 1) != 1:
            raise ValueError(f"{key} is {block[key]!r}, and this layout has no field for it.")
    config = block_config("dflash2", "DFlash2DraftModel", fields, target)
    return config | {key: block[key] for key in CONVOLUTIONS}


def write_dspark(fields: Config, target: Config) -> Config:
    """The `config.json` for a `DSparkDrafter` whose config has these fields; arguments as for `write_eagle3`."""
    block = fields["dflash_config"]
    if not block.get("markov_rank") or block.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(
            f"markov_rank is {block.get('markov_rank', 0)!r} and markov_head_type {block.get('markov_head_type')!r}, "
            "and vLLM has vanilla Markov heads only."
        )
    config = block_config("dspark", "DSparkDraftModel", fields, target)
    return config | {key: block.get(key) or False for key in DSPARK_HEADS} | {"markov_head_type": "vanilla"}


def block_config(kind: str, architecture: str, fields: Config, target: Config) -> Config:
    """The fields that the configs of DFlash, DFlash 2 and DSpark have in common; arguments as for `envelope`."""
    block, layers = fields["dflash_config"], fields["num_hidden_layers"]
    if block.get("attention_sink_bias"):
        raise ValueError("attention_sink_bias is set, and this layout has no attention sinks.")
    if fields["vocab_size"] is None:
        raise ValueError(
            "vocab_size is None, and this layout needs the target's: set drafter.config.vocab_size to the number of "
            "rows of the target's embedding first."
        )
    if fields.get("final_logit_softcapping") is not None:
        raise ValueError("final_logit_softcapping is set, and this layout has no field for it.")
    kinds = {(fields["windows"][layer], fields["causal"][layer]) for layer in range(layers)}
    sliding = {causal for window, causal in kinds if window is not None}
    if (None, True) in kinds or len(sliding) > 1 or len({window for window, _ in kinds} - {None}) > 1:
        raise ValueError(
            f"The draft layers have the kinds (window, causal inside the block) {sorted(kinds, key=str)}; in this "
            "layout full layers are not causal, and all sliding layers are of one kind."
        )
    if len(kinds) > 1:
        warnings.warn(
            "The drafter has full and sliding draft layers: vLLM needs its V2 model runner for them"
            + (
                ", and will accept fewer drafts because of a wrong mask for full layers (vllm-project/vllm#56692)."
                if True in sliding
                else "."
            ),
            stacklevel=2,
        )
    anchored = bool(block.get("sample_from_anchor"))
    if anchored and kind != "dspark":
        raise ValueError("sample_from_anchor is True, and vLLM refuses DFlash drafters whose root slot predicts.")
    config = envelope(kind, fields, target, architecture, fields["block_size"] - (not anchored)) | {
        "draft_vocab_size": block.get("draft_vocab_size", fields["vocab_size"]),
        "block_size": fields["block_size"],
        "mask_token_id": block["mask_token_id"],
        "aux_hidden_state_layer_ids": states(fields["target_layer_ids"], target),
        "sample_from_anchor": anchored,
        "sliding_window_non_causal": sliding == {False},
    }
    types = ["full_attention" if window is None else "sliding_attention" for window in fields["windows"]]
    layer = layer_config(fields, "qwen3") | {"num_hidden_layers": layers, "layer_types": types}
    if sliding:
        window = max(window for window in fields["windows"] if window is not None)
        layer |= {"sliding_window": window, "use_sliding_window": True}
    if True not in sliding:
        # vLLM applies sliding_window_non_causal to full layers too (vllm-project/vllm#47745); since 0.28 this field of
        # the draft model's config takes precedence.
        layer["is_causal"] = False
    return config | {"transformer_layer_config": layer}


def envelope(kind: str, fields: Config, target: Config, architecture: str, speculative_tokens: int) -> Config:
    """The fields of every speculators config, without the layer config.

    Args:
        kind: "eagle3", "peagle", "dflash", "dflash2" or "dspark".
        fields: the fields of our config.
        target: `id`, the Hub id or the path of a folder; `architectures`, empty if unknown; `num_layers`, None if
            unknown.
        architecture: class of the drafter.
        speculative_tokens: number of tokens that vLLM drafts by default.
    """
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens}],
            "verifier": {"name_or_path": target["id"], "architectures": target["architectures"]},
        },
        "torch_dtype": fields["torch_dtype"],
    }


def layer_config(fields: Config, model_type: str) -> Config:
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "rope_parameters",
    )  # fmt: skip
    layer = {"model_type": model_type, "tie_word_embeddings": False} | {name: fields[name] for name in names}
    if fields["hidden_act"] != "silu":
        raise ValueError(f"hidden_act is {fields['hidden_act']!r}, and vLLM has these layers with silu only.")
    if fields.get("mlp_bias"):
        layer["mlp_bias"] = True
    # Older readers, without rope_parameters, read the base at the top level.
    return layer | {"rope_theta": fields["rope_parameters"]["rope_theta"]}


def states(taps: list[int], target: Config) -> list[int]:
    """Indices of hidden states for 0-based layers."""
    if target["num_layers"] is not None and max(taps) >= target["num_layers"] - 1:
        raise ValueError(
            f"The drafter reads target layers {taps} of {target['num_layers']}, and engines differ in the output of "
            "the last one: with or without the final norm."
        )
    return [layer + 1 for layer in taps]


# How engines draft with the drafter, and its target.
_DRAFTING = Section(
    idle=frozenset(("algorithm", "default_proposal_method", "proposal_methods")),
    nested={
        "verifier": Section(frozenset(("name_or_path",)), frozenset(("architectures",)), descriptive=True),
    },
    descriptive=True,
)


# Class attributes of the config class, which older versions of speculators wrote.
_OF_THE_CLASS = (
    "attribute_map", "base_config_key", "base_model_ep_plan", "base_model_pp_plan", "base_model_tp_plan",
    "has_no_defaults_at_init", "is_composition", "keys_to_ignore_at_inference", "sub_configs",
)  # fmt: skip


def section(*read: str, layer: Section) -> Section:
    """The keys of a config with this layer config."""
    return Section(
        frozenset(("draft_vocab_size", "speculators_model_type", "target_hidden_size", *read)),
        TRANSFORMERS.union(("embed_requires_grad", "speculators_version", *_OF_THE_CLASS)),
        nested={"speculators_config": _DRAFTING, "transformer_layer_config": layer},
    )


BLOCK_KEYS = (
    "aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal",
)  # fmt: skip


def is_kind(kind: str) -> Callable[[Config], bool]:
    """Recognises configs of drafters of this kind."""
    return lambda config: speculators_type(config) == kind


def speculators(
    family: str,
    name: str,
    read: Callable[[Config, Headers | None], Reading],
    write: Callable[[Config, Config], Config],
    keys: Section,
) -> Format:
    """The layout of a family's drafters; `name` is the family's in messages."""
    return Format(
        f"{name} (speculators)",
        family,
        read,
        keys,
        check=check_vocabulary_maps,
        recognises=is_kind(family),
        write=write,
        rank=0,
    )


SPECULATORS_EAGLE3 = speculators(
    "eagle3",
    "EAGLE-3",
    read_eagle3,
    write_eagle3,
    # The number of taps is the length of their list.
    section("eagle_aux_hidden_state_layer_ids", *EAGLE3_FLAGS, layer=decoder(idle=("num_aux_hidden_states",))),
)
SPECULATORS_PEAGLE = speculators(
    "peagle",
    "P-EAGLE",
    read_peagle,
    write_peagle,
    section("eagle_aux_hidden_state_layer_ids", "mask_token_id", *EAGLE3_FLAGS, layer=decoder()),
)
SPECULATORS_DFLASH = speculators(
    "dflash", "DFlash", read_dflash, write_dflash, section(*BLOCK_KEYS, layer=decoder("is_causal"))
)
SPECULATORS_DFLASH2 = speculators(
    "dflash2", "DFlash 2", read_dflash2, write_dflash2, section(*BLOCK_KEYS, *CONVOLUTIONS, layer=decoder("is_causal"))
)
SPECULATORS_DSPARK = speculators(
    "dspark", "DSpark", read_dspark, write_dspark, section(*BLOCK_KEYS, *DSPARK_HEADS, layer=decoder("is_causal"))
)
SPECULATORS_EAGLE = Unsupported(
    "speculators eagle", "a reader for EAGLE-1, whose drafters have no head", is_kind("eagle"), rank=0
)
OTHER_KIND = Unsupported(
    "speculators",
    "another kind in speculators_model_type",
    lambda config: speculators_type(config) is not None,
    rank=10,
)
