"""The interface of a layout to the loader, and what several layouts have in common."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, MuseGlimmerAssistantConfig, Qwen3Config

from hf_specdec.hub.formats.keys import DECODER, Section

Config = dict[str, Any]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file, as its header describes it."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


Headers = Mapping[str, StoredTensor]
Shapes = dict[str, tuple[int, ...]]

# Rotary tables are computed from the config; some checkpoints store them too.
ROTARY = r"rotary_emb\.inv_freq$"
# Some speculators checkpoints still hold weights of the verifier.
LEFT_OUT = re.compile(rf"{ROTARY}|^verifier_lm_head\.weight$|^verifier_norm\.weight$|^t2d$")


@dataclass(frozen=True)
class Reading:
    """Config fields and tensor names of a checkpoint, converted to those of this library.

    Attributes:
        fields: fields of the family's config class.
        names: stored name -> our name, of each tensor to load. Known tensors that are not needed, such as `t2d`, are
            missing. A tensor that is unknown in the layout keeps its name, so that the loader refuses it.
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


PLAIN = 1000  # the rank of plain language models, which are drafters only where no other layout is found


@dataclass(frozen=True)
class Format:
    """A layout of checkpoints.

    Attributes:
        name: its name, for messages.
        family: the drafter family that loads it.
        read: converts a `config.json` and the headers of the weights. It is called with None for the headers before
            the weights are downloaded, and returns None if the config alone is not sufficient. Raises ValueError,
            naming the field, if the checkpoint is not consistent.
        keys: the keys of its `config.json`; None for plain language models, whose configs transformers reads.
        other_weights: files that may hold the weights if there is no `model.safetensors`; the first that exists is
            read. Pickles are opened with `weights_only`.
        beside: optional further files, and the tensors (our names) that each holds.
        check: checks the stored tensors, including those that are not loaded; raises ValueError or warns.
        problems: for plain language models: differences between the headers and the config.
        own_files: for `inspect_drafter`: further safetensors files, with suffixes of tensor names and their shapes.
        missing: for `inspect_drafter`: problems with other checkpoints that the config names. The folder is the
            checkpoint's, or None for a checkpoint on the Hub.
        refused: files that are not supported, but without which the drafter would draft badly, and the reason.
        training: entries of the training record that are the same for all drafters of this layout.
        recognises: whether a `config.json` is of this layout; None for layouts of this library, which are recognised by
            their `model_type`.
        recognises_names: whether tensors of these names are of this layout, where the config does not tell; None if the
            config always tells.
        write: the `config.json` in this layout from the fields of our config and the target, see `hub/export.py`, for
            layouts that vLLM serves. Raises ValueError if the layout has no field for something.
        rank: its place in the order of recognition, smallest first: a layout whose condition also holds for configs of
            another one has the larger rank.
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
    recognises: Callable[[Config], bool] | None = None
    recognises_names: Callable[[Collection[str]], bool] | None = None
    write: Callable[[Config, Config], Config] | None = None
    rank: int = 100


@dataclass(frozen=True)
class Unsupported:
    """A layout that is recognised and not read.

    Attributes:
        name: its name, for messages.
        missing: what its drafters need and this library does not have.
        recognises: as for `Format`.
        recognises_names: as for `Format`.
        rank: as for `Format`.
    """

    name: str
    missing: str
    recognises: Callable[[Config], bool] | None = None
    recognises_names: Callable[[Collection[str]], bool] | None = None
    rank: int = 100


def architecture(*parts: str) -> Callable[[Config], bool]:
    """Recognises configs with a class whose name contains one of these."""
    return lambda config: any(part in name for name in config.get("architectures") or () for part in parts)


def as_it_is(fields: Config, stored: Headers | None) -> Reading:
    """The reading of a layout of this library: fields and names are not converted."""
    return Reading(fields, {name: name for name in stored or () if not re.search(ROTARY, name)})


# Fields of windows in Qwen3 configs.
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
# The fields of a config that define a decoder; `rope_parameters` below reads those of the rotary embedding.
_SHAPE = sorted(DECODER - {"rope_theta"} | {"initializer_range"})


def _of_the_class(config_class: Any) -> Config:
    """The defaults of a config class, without those of windows: a config that has none says so by leaving them out."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    return {name: defaults[name] for name in _SHAPE if defaults.get(name) is not None and name not in WINDOWS}


# Defaults of transformers' config classes, for fields that a config does not have.
_DEFAULTS: dict[str, Config] = {
    "llama": _of_the_class(LlamaConfig),
    "qwen3": _of_the_class(Qwen3Config),
    "muse_glimmer_assistant": _of_the_class(MuseGlimmerAssistantConfig)
    | {"sliding_window": MuseGlimmerAssistantConfig.sliding_window},
}


def decoder_shape(fields: Config, model_type: str | None = None) -> Config:
    """The decoder fields of a config; missing fields get the defaults of the config class.

    Args:
        fields: a Llama or Qwen3 config; its rotary base is in `rope_parameters`, in `rope_theta`, or missing (10000).
        model_type: "llama" or "qwen3"; None for that of the config.

    Raises:
        ValueError: the model type is another one, or a size is not a positive integer.
    """
    shape = with_defaults(fields, fields.get("model_type", "llama") if model_type is None else model_type)
    return shape | {"rope_parameters": rope_parameters(fields), "tie_word_embeddings": False}


def with_defaults(fields: Config, model_type: str) -> Config:
    """The fields that define a decoder, completed with the defaults of the config class of `model_type`."""
    if model_type not in _DEFAULTS:
        raise ValueError(f"model_type of the draft layers is {model_type!r}; known are {sorted(_DEFAULTS)}.")
    shape = _DEFAULTS[model_type] | {name: fields[name] for name in _SHAPE if fields.get(name) is not None}
    check_sizes(shape)
    shape.setdefault("num_key_value_heads", shape["num_attention_heads"])
    shape.setdefault("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    return shape


def check_sizes(fields: Config) -> None:
    """Raises ValueError if a size of a decoder is set and is not a positive integer."""
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim",
    ):  # fmt: skip
        size = fields.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{name} is {size!r}; it must be a positive integer.")


def rope_parameters(fields: Config, base: float = 10000.0) -> Config:
    """The rotary settings of a config, from `rope_parameters` or the older `rope_scaling` and `rope_theta`.

    Args:
        fields: the config.
        base: rotary base if the config has none; the default is that of Llama.

    Examples:
        >>> rope_parameters({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
        {'type': 'linear', 'factor': 2.0, 'rope_type': 'linear', 'rope_theta': 500000.0}
    """
    parameters = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    theta = fields.get("rope_theta")
    parameters.setdefault("rope_theta", base if theta is None else theta)
    return parameters


def layer_list(fields: Config, key: str) -> list[int] | None:
    """The list of layer ids under a key; None if the key is missing.

    Raises:
        ValueError: the value is not a list of integers.
    """
    layers = fields.get(key)
    if layers is None:
        return None
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{key} is {layers!r}; it must be a list of layer numbers.")
    return layers


def once(fields: Config, nested: Config, key: str) -> Any:
    """The value of a key that may be at the top level or in `dflash_config`.

    Raises:
        ValueError: the key is in both, with different values.
    """
    top, inner = fields.get(key), nested.get(key)
    if top is not None and inner is not None and top != inner:
        raise ValueError(
            f"{key} is {top!r} at the top level and {inner!r} in dflash_config; remove the one that the drafter was "
            "not trained with."
        )
    return inner if top is None else top


def check_vocabulary_maps(tensors: Mapping[str, Tensor], name: str) -> None:
    """Checks the two vocabulary maps of a checkpoint.

    `d2t` holds offsets: target id = draft id + d2t[draft id]. `t2d` is True at these target ids, which are ascending.

    Args:
        tensors: the tensors of the files, by their stored names.
        name: the name of the drafter, for messages.

    Raises:
        ValueError: the two maps contradict each other.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or (t2d is not None and t2d.numel() == d2t.numel()):
        return
    if not d2t.any():
        warnings.warn(
            f"The vocabulary map d2t of {name!r} is all zeros, so its {d2t.numel()} draft ids are read as the target's "
            "first ids. The map was probably lost when the drafter was saved: expect few accepted drafts.",
            stacklevel=2,
        )
        return
    if t2d is None:
        return
    offsets, marked = d2t.tolist(), t2d.nonzero().flatten().tolist()
    if [index + offset for index, offset in enumerate(offsets)] != marked:
        absolute = offsets == marked
        why = "d2t holds target ids instead of offsets (target id minus draft id)" if absolute else "they differ"
        raise ValueError(
            f"The vocabulary maps d2t and t2d of {name!r} do not name the same target ids: {why}. Save the drafter "
            "again with the maps it was trained with."
        )
