"""Gemma 4 assistants as transformers has them: a nested `gemma4_text` config whose layers all share keys and values.

Head dimensions and heads of full layers are in `per_layer_config`, or in older files under names of their own. The
embedding of the small stack is its head where the two are tied, and of no use elsewhere. Keys left out are at the
defaults of the config classes. Source: shared facts on formats of 2026, section 6.2; transformers, gemma4_assistant,
gemma4_unified_assistant, gemma4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

from hf_specdec.hub.formats.base import ROTARY, Config, Format, Headers, Reading, check_sizes
from hf_specdec.hub.formats.keys import OURS, TRANSFORMERS, Section

if TYPE_CHECKING:
    from torch import Tensor

# By `model_type`, the target's hidden size where none is named.
BACKBONES = {"gemma4_assistant": 1536, "gemma4_unified_assistant": 3840}
TEXT_DEFAULTS: Config = {
    key: getattr(Gemma4TextConfig, key)
    for key in (
        "attention_bias", "final_logit_softcapping", "head_dim", "hidden_activation", "hidden_size",
        "initializer_range", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "rms_norm_eps", "sliding_window", "vocab_size",
    )
}  # fmt: skip
# Of the text config of the other kind, where it differs.
UNIFIED_DEFAULTS: Config = {"sliding_window": Gemma4UnifiedTextConfig.sliding_window}
GLOBAL_HEAD_DIM = 512
DEFAULT_ROPES: Config = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_CLUSTERS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}
# Savers may write projections for layers that share keys and values; readers ignore them.
_NOT_READ = re.compile(rf"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.|{ROTARY}")
_ROPE = ("factor", "partial_rotary_factor", "rope_theta", "rope_type")
_TOKENS = (
    "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index", "eoi_token_id",
    "image_token_id", "video_token_id",
)  # fmt: skip
_ORDERING = "masked_embedding.token_ordering"


def read(fields: Config, stored: Headers | None) -> Reading:
    """Our fields and tensor names for a Gemma 4 assistant.

    Raises:
        ValueError: there is no text config, or something in it is not what layers without keys of their own can have.
    """
    kind, text = fields["model_type"], fields.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"text_config is {text!r}; it must hold the config of the assistant's layers.")
    defaults = TEXT_DEFAULTS | (UNIFIED_DEFAULTS if "unified" in kind else {})
    ours = defaults | {key: text[key] for key in defaults if text.get(key) is not None}
    ours["hidden_act"] = ours.pop("hidden_activation")
    check_sizes(ours)
    layers = ours["num_hidden_layers"]
    if text.get("num_kv_shared_layers") not in (None, 0, layers):
        raise ValueError(
            f"num_kv_shared_layers is {text['num_kv_shared_layers']!r} and num_hidden_layers {layers}: all layers of "
            "an assistant read the target's keys and values."
        )
    pattern = ["sliding_attention" if layer % 6 < 5 else "full_attention" for layer in range(layers)]
    types = text.get("layer_types") or pattern
    types = [*types[:-1], "full_attention"]  # the config class sets the last one so
    ours |= _of_full_layers(text, types) | {
        "layer_types": types,
        "rope_parameters": text.get("rope_parameters") or DEFAULT_ROPES,
        "backbone_hidden_size": fields.get("backbone_hidden_size", BACKBONES[kind]),
        "target_model_type": "gemma4",
        "tie_word_embeddings": False,
        **{key: fields[key] for key in OURS if fields.get(key) is not None},
    }
    if fields.get("use_ordered_embeddings"):
        ours |= {key: fields.get(key, default) for key, default in _CLUSTERS.items()}
    return Reading(ours, _names(stored or {}, tied=fields.get("tie_word_embeddings", True)))


def _of_full_layers(text: Config, types: list[Any]) -> Config:
    """Head dimension and heads of keys in full layers.

    Raises:
        ValueError: full layers differ, or others have overrides too.
    """
    by_layer = text.get("per_layer_config")
    if by_layer is None:
        head_dim, heads = text.get("global_head_dim"), text.get("num_global_key_value_heads")
        found: Any = {"head_dim": GLOBAL_HEAD_DIM if head_dim is None else head_dim}
        if heads is not None and text.get("attention_k_eq_v"):
            found["num_key_value_heads"] = heads
    else:
        full = [str(layer) for layer, kind in enumerate(types) if kind == "full_attention"]
        given = list(by_layer.values()) if isinstance(by_layer, dict) else [None]
        found = given[0] if given else {}
        known = {"head_dim", "num_key_value_heads"}
        same = isinstance(found, dict) and found.keys() <= known and all(each == found for each in given)
        if not same or (given and sorted(by_layer) != sorted(full)):
            raise ValueError(
                f"per_layer_config is {by_layer!r}; it must say {' and '.join(sorted(known))} of the full layers, "
                f"{full}, the same of each, and nothing else."
            )
    check_sizes(found)
    return {
        "global_head_dim": found.get("head_dim"),
        "num_global_key_value_heads": found.get("num_key_value_heads"),
    }


def _names(stored: Headers, *, tied: bool) -> dict[str, str]:
    names = {}
    own_head = "lm_head.weight" in stored or not tied
    for name in stored:
        if _NOT_READ.search(name) or (own_head and name == "model.embed_tokens.weight"):
            continue
        ours = "lm_head.weight" if name == "model.embed_tokens.weight" else name.removeprefix("model.")
        names[name] = ours.replace("masked_embedding.", "clusters.")
    return names


def check(tensors: Mapping[str, Tensor], name: str) -> None:
    """Raises ValueError if the order of tokens by cluster leaves some out, or has some twice."""
    ordering = tensors.get(_ORDERING)
    if ordering is not None and ordering.sort().values.tolist() != list(range(len(ordering))):
        raise ValueError(
            f"{_ORDERING} of {name!r} must hold each of the {len(ordering)} token ids once, cluster after cluster, and "
            "does not: the checkpoint is damaged. Copy or download it again."
        )


GEMMA4_ROPES = Section(nested=dict.fromkeys(DEFAULT_ROPES, Section(frozenset(_ROPE))))
_TEXT = Section(
    read=frozenset((
        *TEXT_DEFAULTS, "attention_k_eq_v", "global_head_dim", "layer_types", "num_global_key_value_heads",
        "num_kv_shared_layers", "per_layer_config",
    )),
    # Those of experts and of per-layer inputs matter where these are switched on.
    idle=TRANSFORMERS | {
        "max_position_embeddings", "moe_intermediate_size", "num_experts", "top_k_experts",
        "vocab_size_per_layer_input",
    },
    only={
        "enable_moe_block": (False,),
        "hidden_size_per_layer_input": (0,),
        "use_bidirectional_attention": ("vision",),  # of images in the target's own layers
        "use_double_wide_mlp": (False,),
    },
    nested={"rope_parameters": GEMMA4_ROPES},
)  # fmt: skip
GEMMA4_ASSISTANT = Format(
    "Gemma 4 assistant (transformers)",
    "gemma4_assistant",
    read,
    Section(
        OURS.union(("backbone_hidden_size", "tie_word_embeddings", "use_ordered_embeddings", *_CLUSTERS)),
        # Tokens of the target's, and a number of drafts of other readers.
        TRANSFORMERS | {*_TOKENS, "block_size"},
        nested={"text_config": _TEXT},
    ),
    check=check,
    recognises=lambda config: config.get("model_type") in BACKBONES,
    rank=20,
)
OWN_KEYS = Section(
    OURS.union((
        "attention_bias", "backbone_hidden_size", "centroid_intermediate_top_k", "final_logit_softcapping",
        "global_head_dim", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
        "num_attention_heads", "num_centroids", "num_global_key_value_heads", "num_hidden_layers",
        "num_key_value_heads", "rms_norm_eps", "sliding_window", "target_model_type", "vocab_size",
    )),
    TRANSFORMERS,
    nested={"rope_parameters": GEMMA4_ROPES},
)  # fmt: skip
