"""The speculators layout of vllm-project: fields of the drafter, and a nested config of its layers.

It is used for EAGLE-3, P-EAGLE, DFlash, DFlash 2 and DSpark drafters. Its layer ids are indices of
`output_hidden_states`, which are one more than ours. Missing fields of the nested config have the defaults of its
class; we write all fields, since readers have different defaults. Tensors have our names. Source: shared facts on
formats, sections 3.1, 3.2, 3.4, 10.2 and 10.3, and of 2026, section 1.6; vllm-project/speculators.
"""

from __future__ import annotations

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
from hf_specdec.hub.formats.keys import TRANSFORMERS, Section


def speculators_type(fields: Config) -> str | None:
    """The kind of drafter; None for a config in another layout."""
    if "speculators_model_type" not in fields and "speculators_config" not in fields:
        return None
    return (
        fields.get("speculators_model_type") or (fields.get("speculators_config") or {}).get("algorithm") or "unknown"
    )


def common(fields: Config) -> Config:
    """Our fields for what the configs of all kinds have."""
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
    """The nested config of the draft layers."""
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


OTHER_KIND = Unsupported(
    "speculators",
    "another kind in speculators_model_type",
    lambda config: speculators_type(config) is not None,
    rank=10,
)
