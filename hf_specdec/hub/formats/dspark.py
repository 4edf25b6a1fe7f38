"""DSpark in the layouts of DeepSpec, SpecForge and AngelSpec; `DSparkDrafter` is saved in SpecForge's.

DeepSpec has the keys at the top level and stores embeddings and head; SpecForge has the keys in `dflash_config` and
uses the target's embeddings and head. Some files mix the two, so keys are read in either place, and tensor names
determine which heads exist. Slots are next-token by default, in AngelSpec's layout fill-in. Source: shared facts on
formats of 2026, section 2.
"""

from __future__ import annotations

import re
from dataclasses import replace
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
    once,
)
from hf_specdec.hub.formats.deepspec import GEMMA_4_LAYERS
from hf_specdec.hub.formats.dflash import check_causality, dflash_reading
from hf_specdec.hub.formats.keys import OURS, ROPES, Section, decoder

HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_BLOCK = ("block_size", "mask_token_id", "target_layer_ids", "sample_from_anchor", "causal", "projector_type", *HEADS)
_IN_BLOCK_MASK = ("is_causal", "dflash_query_causal")
# DSpark classes with Qwen3 layers.
_CLASSES = ("Qwen3DSparkModel", "DSparkDraftModel", "Lfm2DSparkDraftModel")
# AngelSpec's names, and ours.
_ANGELSPEC = {"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}


def is_dspark(fields: Config) -> bool:
    """Whether a `config.json` describes a DSpark drafter with Qwen3 layers."""
    block: Any = fields.get("dflash_config") or {}
    named = any(name in _CLASSES for name in fields.get("architectures") or ())
    ranked = bool(fields.get("markov_rank") or block.get("markov_rank"))
    return named or block.get("projector_type") == "dspark" or ranked


def read(fields: Config, stored: Headers | None) -> Reading:
    """Converts fields and tensor names of a DSpark drafter.

    Raises:
        ValueError: a key is in two places, with different values.
    """
    angelspec = fields.get("model_type") == "dspark"
    nested = dict(fields.get("dflash_config") or {})
    block = {key: once(fields, nested, key) for key in _BLOCK}
    block = {key: value for key, value in block.items() if value is not None}
    block.setdefault("sample_from_anchor", not angelspec)
    alpha = once(fields, nested, "confidence_head_alpha")  # weight of its loss: positive if it was trained
    block.setdefault("enable_confidence_head", bool(alpha))
    causal = {key: fields[key] for key in _IN_BLOCK_MASK if fields.get(key) is not None}
    check_causality(causal | {"causal": block.get("causal")})
    rope = once(fields, nested, "rope_is_neox_style")
    shape = decoder_shape(fields, "qwen3")
    shape["rope_parameters"].pop("partial_rotary_factor", None)  # the target's; draft layers rotate all dimensions
    ours = shape | {
        "draft_vocab_size": once(fields, nested, "draft_vocab_size") or fields.get("vocab_size"),
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        # In AngelSpec's configs, num_target_layers is the number of layers that are read.
        "num_target_layers": fields.get("target_num_hidden_layers" if angelspec else "num_target_layers"),
        "is_causal": next(map(bool, causal.values()), None),
        "target_name_or_path": fields.get("target_name_or_path", fields.get("target_model_name_or_path")),
        **{key: fields[key] for key in OURS if fields.get(key) is not None},
        **({} if rope is None else {"rope_is_neox_style": rope}),
    }
    if nested.get("own_head") or nested.get("own_embeddings"):  # saved by this library; headers may still be unknown
        block |= {key: bool(nested.get(key)) for key in ("own_head", "own_embeddings")}
    return with_heads(dflash_reading(ours, block, stored), stored)


def with_heads(reading: Reading, stored: Headers | None) -> Reading:
    """Completes a reading with the heads that the headers have, and converts tensor names."""
    if stored is None:
        return reading
    block = dict(reading.fields["dflash_config"])
    names = {name: _our_name(ours) for name, ours in reading.names.items()}
    of = {ours: stored[name].shape for name, ours in names.items()}
    proj = of.get("confidence_head.proj.weight")
    block["enable_confidence_head"] = proj is not None
    if proj is not None:
        block["confidence_head_with_markov"] = proj[-1] > reading.fields["hidden_size"]
    return Reading(reading.fields | {"dflash_config": block}, names)


def _our_name(name: str) -> str:
    name = re.sub(r"^(draft_model|logit_head)\.", "", name)
    for theirs, ours in _ANGELSPEC.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


_READ = (*_BLOCK, "confidence_head_alpha", "rope_is_neox_style", "draft_vocab_size")
# Training settings, and fields of the target in configs that were copied from its config.
_IDLE = (
    "attention_mode", "has_lm_head", "has_own_embed_tokens", "loss_decay_gamma", "num_anchors", "partial_rotary_factor",
    "target_hidden_size", "target_model_type", "target_text_model_type",
)  # fmt: skip
DSPARK = Format(
    "DSpark",
    "dspark",
    read,
    decoder(
        "final_logit_softcapping", "num_target_layers", "target_model_name_or_path", "target_num_hidden_layers",
        *_IN_BLOCK_MASK, *_READ, *OURS,
        idle=_IDLE,
        only={"attention_sink_bias": (False,), "enable_qwen35_gated_q_proj": (False,), "fusion_type": ("concat_fc",)},
        nested={
            **{key: replace(rope, idle=rope.idle | {"partial_rotary_factor"}, only={}) for key, rope in ROPES.items()},
            "dflash_config": Section(
                frozenset((*_READ, "own_embeddings", "own_head")),
                frozenset((*_IDLE, "num_target_layers")),
                {"attention_sink_bias": (False,)},
            ),
        },
    ),
    check=check_vocabulary_maps,
    recognises=is_dspark,
    rank=51,
)  # fmt: skip
NOT_READ = (
    Unsupported(
        "Domino",
        "a recurrent net over the drafted prefix that corrects the logits",
        architecture("Domino"),
        rank=50,
    ),
    Unsupported("DSpark for Gemma 4", GEMMA_4_LAYERS, architecture("Gemma4DSpark"), rank=52),
    Unsupported(
        "DSpark for Qwen3.5",
        "draft layers with gated queries and norms of gain 1 + w",
        architecture("Qwen35DSpark"),
        rank=52,
    ),
    Unsupported("DSpark of another architecture", "draft layers that are not Qwen3's", architecture("DSpark"), rank=53),
)
