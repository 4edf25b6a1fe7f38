"""What a foreign layout is to the loader, and what several layouts have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from hf_specdec.hub.files import StoredTensor

Config = dict[str, Any]
Headers = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Reading:
    """A checkpoint in our terms.

    Attributes:
        fields: of the family's config class.
        names: our name of each stored tensor that is part of it; the others are left out knowingly. A tensor that the
            layout does not know keeps its name, so that the loader refuses it.
    """

    fields: Config
    names: Mapping[str, str]


@dataclass(frozen=True)
class Format:
    """A layout of checkpoints.

    Attributes:
        name: for messages.
        family: the drafter family that loads it.
        read: puts a `config.json` and the headers of the weights in our terms. Before the weights are there it is asked
            with None for them, and returns None where the config alone does not say enough. Raises ValueError, naming
            the field, if the checkpoint makes no sense.
        pickles: files that may hold the weights where there are no safetensors; opened with `weights_only` alone.
        check: looks at the loaded tensors, those left out included; raises ValueError or warns.
    """

    name: str
    family: str
    read: Callable[[Config, Headers | None], Reading | None]
    pickles: tuple[str, ...] = ()
    check: Callable[[Mapping[str, Tensor], str], None] = lambda tensors, name: None


def as_it_is(fields: Config, stored: Headers | None) -> Reading:
    """The reading of a family's own layout."""
    return Reading(fields, {name: name for name in stored or ()})


# What a decoder layer is made of; anything else in a foreign config is either read by name or means nothing to us.
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
)
_DECODERS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def decoder_shape(fields: Config, model_type: str | None = None) -> Config:
    """The decoder of a config, with everything that it leaves out at the defaults of the class it names.

    Args:
        fields: a Llama or Qwen3 config, with its rotary base as `rope_parameters`, as `rope_theta` or absent (10000).
        model_type: "llama" or "qwen3"; what the config says where None.

    Raises:
        ValueError: a decoder of another kind.
    """
    model_type = fields.get("model_type", "llama") if model_type is None else model_type
    if model_type not in _DECODERS:
        raise ValueError(f"model_type of the draft layers is {model_type!r}; known are {sorted(_DECODERS)}.")
    given = {name: fields[name] for name in _SHAPE if fields.get(name) is not None}
    config = _DECODERS[model_type](**given)
    shape = {name: getattr(config, name) for name in _SHAPE if hasattr(config, name)}
    if "layer_types" in given and "sliding_window" in given:
        shape["sliding_window"] = given["sliding_window"]  # Qwen3's own config drops it without use_sliding_window
    return shape | {"rope_parameters": rope_parameters(fields), "tie_word_embeddings": False}


def rope_parameters(fields: Config) -> Config:
    """The rotary settings of a config, old or new; a base that is named nowhere is 10000, as in Llama code.

    Example:
        >>> rope_parameters({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
        {'type': 'linear', 'factor': 2.0, 'rope_type': 'linear', 'rope_theta': 500000.0}
    """
    parameters = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    theta = fields.get("rope_theta")
    parameters.setdefault("rope_theta", 10000.0 if theta is None else theta)
    return parameters


def layer_list(fields: Config, key: str) -> list[int] | None:
    """A list of layer ids, None where absent.

    Raises:
        ValueError: it is something else.
    """
    layers = fields.get(key)
    if layers is None:
        return None
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{key} is {layers!r}; it must be a list of layer numbers.")
    return layers
