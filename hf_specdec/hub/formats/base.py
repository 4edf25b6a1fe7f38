"""What a foreign layout is to the loader, and what several layouts have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_specdec.hub.files import StoredTensor
from hf_specdec.hub.formats.keys import Section

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Config = dict[str, Any]
Headers = Mapping[str, StoredTensor]
Shapes = dict[str, tuple[int, ...]]

# Rotary tables follow from the config; some savers write them.
ROTARY = r"rotary_emb\.inv_freq$"


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

    def stored(self, headers: Headers) -> dict[str, StoredTensor]:
        """The stored tensors that are loaded, by our names.

        Raises:
            ValueError: two stored tensors have the same name here, so that one of them would be ignored.
        """
        found: dict[str, str] = {}
        for theirs, ours in self.names.items():
            if ours in found:
                raise ValueError(
                    f"The weights hold both {found[ours]} and {theirs}, which are two names of the same weight: remove "
                    "the one that the drafter was not trained with."
                )
            found[ours] = theirs
        return {ours: headers[theirs] for ours, theirs in found.items()}


@dataclass(frozen=True)
class Format:
    """A layout of checkpoints.

    Attributes:
        name: for messages.
        family: the drafter family that loads it.
        read: puts a `config.json` and the headers of the weights in our terms. Before the weights are there it is asked
            with None for them, and returns None where the config alone does not say enough. Raises ValueError, naming
            the field, if the checkpoint makes no sense.
        keys: of its `config.json`; None for plain language models, whose configs are the host's own to read.
        other_weights: files that may hold the weights where there is no `model.safetensors`, the first that is there;
            pickles among them are opened with `weights_only` alone.
        beside: further files of the layout, and the tensors (our names) that each holds where it is there.
        check: looks at the loaded tensors, those left out included; raises ValueError or warns.
        problems: for plain language models: differences between the headers and the config.
        own_files: for `inspect_drafter`: further safetensors files, and ends of names of tensors with their shapes.
        missing: for `inspect_drafter`: what else the config names and is not there, seen from the checkpoint's folder;
            None for one on the Hub, of which nothing else is known.
        refused: files without which a drafter of this layout would draft badly and that are not read, and why.
        training: what is known of how all drafters of this layout were trained, as in a training record.
    """

    name: str
    family: str
    read: Callable[[Config, Headers | None], Reading | None]
    keys: Section | None = None
    other_weights: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Callable[[Mapping[str, Tensor], str], None] = lambda tensors, name: None
    problems: Callable[[Config, Headers], list[str]] = lambda fields, stored: []
    own_files: Callable[[Config], Mapping[str, Shapes]] = lambda fields: {}
    missing: Callable[[Config, Path | None], list[str]] = lambda fields, folder: []
    refused: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


def as_it_is(fields: Config, stored: Headers | None) -> Reading:
    """The reading of a layout whose fields and names are ours."""
    return Reading(fields, {name: name for name in stored or () if not re.search(ROTARY, name)})


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
# What Llama and Qwen3 configs mean by leaving a field out: the defaults of transformers' config classes.
_DEFAULTS: dict[str, Config] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "attention_bias": False,
    },
    "muse_glimmer_assistant": {
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 2048,
    },
}


def decoder_shape(fields: Config, model_type: str | None = None) -> Config:
    """The decoder of a config, with everything that it leaves out at the defaults of the class it names.

    Args:
        fields: a Llama or Qwen3 config, with its rotary base as `rope_parameters`, as `rope_theta` or absent (10000).
        model_type: "llama" or "qwen3"; what the config says where None.

    Raises:
        ValueError: a decoder of another kind, or a size that is no number.
    """
    shape = with_defaults(fields, fields.get("model_type", "llama") if model_type is None else model_type)
    return shape | {"rope_parameters": rope_parameters(fields), "tie_word_embeddings": False}


def with_defaults(fields: Config, model_type: str) -> Config:
    """The fields that shape a decoder, completed as the config class of `model_type` completes them."""
    if model_type not in _DEFAULTS:
        raise ValueError(f"model_type of the draft layers is {model_type!r}; known are {sorted(_DEFAULTS)}.")
    shape = _DEFAULTS[model_type] | {name: fields[name] for name in _SHAPE if fields.get(name) is not None}
    check_sizes(shape)
    shape.setdefault("num_key_value_heads", shape["num_attention_heads"])
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    return shape


def check_sizes(fields: Config) -> None:
    """Raises ValueError if a size of a decoder is given and is not a positive integer."""
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim",
    ):  # fmt: skip
        size = fields.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{name} is {size!r}; it must be a positive integer.")


def rope_parameters(fields: Config, base: float = 10000.0) -> Config:
    """The rotary settings of a config, old or new.

    Args:
        fields: of the config.
        base: where it names none; that of Llama code.

    Example:
        >>> rope_parameters({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
        {'type': 'linear', 'factor': 2.0, 'rope_type': 'linear', 'rope_theta': 500000.0}
    """
    parameters = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    theta = fields.get("rope_theta")
    parameters.setdefault("rope_theta", base if theta is None else theta)
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
