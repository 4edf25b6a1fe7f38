"""The layouts of DFlash: z-lab's, in which it is saved too, Muse Glimmer's, DeepSpec's and that of speculators.

z-lab: fields of DFlash are in `dflash_config`, in some files of others at the top level. JetSpec's drafters have this
layout too, with `causal_head` in `dflash_config`.

Muse Glimmer is transformers' DFlash drafter: z-lab's network with two other tensor names and a flat config. It uses the
target's embedding and head, and its config has no vocabulary size. No layer is causal inside the block. Its sliding
window excludes the token's own position, ours includes it. Missing fields have the defaults of its class.

DeepSpec has DFlash under the class name of DSpark; the slot of the root also predicts a token, and the configs have no
field for it. In layouts other than z-lab's, a checkpoint may have its own embeddings, head and vocabulary map.

Source: shared facts on formats, sections 1, 1.4, 3.4, 5.2, A2 and A3, and of 2026, sections 3 and 6.1; z-lab/dflash,
hao-ai-lab/JetSpec, deepseek-ai/DeepSpec, vllm-project/speculators; transformers, muse_glimmer_assistant.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import Tensor

from hf_specdec.drafting.registry import Serving
from hf_specdec.hub.formats.base import (
    LEFT_OUT,
    ROTARY,
    Config,
    Format,
    Headers,
    Reading,
    Unsupported,
    architecture,
    as_it_is,
    decoder_shape,
    layer_list,
    once,
    rope_parameters,
    with_defaults,
)
from hf_specdec.hub.formats.deepspec import TAPS, TARGETS, TRAINING, taps
from hf_specdec.hub.formats.keys import OURS, Section, decoder
from hf_specdec.hub.formats.speculators import common, envelope, layer_config, layers_of, section, speculators, states
from hf_specdec.methods.dflash.network import DFlashDrafter


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


_NESTED = ("mask_token_id", "target_layer_ids", "sample_from_anchor", "own_embeddings", "own_head", "draft_vocab_size")
# Read in either place.
_EITHER = ("block_size", "num_target_layers")


def read_zlab(fields: Config, stored: Headers | None) -> Reading:
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
    read_zlab,
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
MUSE_TYPE = "muse_glimmer_assistant"
_MUSE_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# Defaults of fields that are not in `with_defaults`.
_BLOCK_SIZE, _MASK_TOKEN_ID, _TARGET_LAYER_IDS, _ROPE_THETA = 16, 201818, [1, 13, 25, 37, 49], 500000.0


def read_muse(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a `MuseGlimmerAssistantModel`.

    Raises:
        ValueError: a size is not valid.
    """
    ours = with_defaults(fields, MUSE_TYPE)
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
    return Reading(ours, {name: _MUSE_NAMES.get(name, name) for name in stored or () if not re.search(ROTARY, name)})


MUSE = Format(
    "DFlash (transformers)",
    "dflash",
    read_muse,
    decoder("block_size", "mask_token_id", "target_layer_ids", only={"attention_bias": (False,), "mlp_bias": (False,)}),
    recognises=lambda config: config.get("model_type") == MUSE_TYPE,
    rank=20,
)


def is_deepspec_dflash(fields: Config) -> bool:
    """Whether a config with the class of DSpark describes a DFlash drafter: no Markov head and no confidence head."""
    named = "Qwen3DSparkModel" in (fields.get("architectures") or ())
    return named and fields.get("markov_rank") == 0 and not fields.get("enable_confidence_head", True)


def read_deepspec(fields: Config, stored: Headers | None) -> Reading:
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


DEEPSPEC_DFLASH = Format(
    "DFlash (DeepSpec)",
    "dflash",
    read_deepspec,
    decoder(
        "block_size", "enable_confidence_head", "markov_rank", "mask_token_id", "sample_from_anchor", *TAPS,
        idle=("confidence_head_with_markov", "markov_head_type", "num_anchors", *TARGETS),
    ),
    training=TRAINING,
    recognises=is_deepspec_dflash,
    rank=40,
)  # fmt: skip


def read_speculators_dflash(fields: Config, stored: Headers | None) -> Reading:
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


def write_dflash(fields: Config, target: Config) -> Config:
    """The `config.json` for a `DFlashDrafter` whose config has these fields; arguments as for `write_eagle3`."""
    return block_config("dflash", "DFlashDraftModel", fields, target)


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


BLOCK_KEYS = (
    "aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal",
)  # fmt: skip
SPECULATORS_DFLASH = speculators(
    "dflash", "DFlash", read_speculators_dflash, write_dflash, section(*BLOCK_KEYS, layer=decoder("is_causal"))
)


def _fields(drafter: DFlashDrafter) -> dict[str, Any]:
    """The config's fields, with the window and causality of each layer, which follow from several fields."""
    config = drafter.config
    layers = range(config.num_hidden_layers)
    return config.to_dict() | {
        "block_size": config.block_size,
        "target_layer_ids": config.target_layer_ids,
        "windows": [config.window(layer) for layer in layers],
        "causal": [config.block_is_causal(layer) for layer in layers],
    }


def _head_ids(drafter: DFlashDrafter) -> Tensor | None:
    """VLLM would apply the target's whole head, and use its first rows as those of the draft vocabulary."""
    return drafter.target_ids if drafter.config.maps_vocabulary and not drafter.config.own_head else None


# Of this method and those that draft blocks with its network.
BLOCK_SERVING = Serving(
    "dflash",
    tokens=lambda drafter: drafter.config.block_size - drafter.config.first_slot,
    # Earlier versions mask full layers causally (vllm-project/vllm#47745, #52816).
    since=((0, 28), "masks the layers of {method} drafters wrongly and accepts few drafts"),
    fields=_fields,
    head_ids=_head_ids,
)
