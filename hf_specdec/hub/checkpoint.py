"""A checkpoint before its weights are read: which format it is of, and a config that is safe to build from.

Needs neither torch nor transformers, so that `inspect_drafter` and `load_drafter` begin alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_specdec.host_keys import CODE, listed, without_host_keys
from hf_specdec.hub.files import CONFIG_FILE, INDEX_FILE, Source, read_headers, read_json, weight_files
from hf_specdec.hub.formats.base import Format
from hf_specdec.hub.formats.keys import check_keys
from hf_specdec.hub.formats.medusa import MEDUSA
from hf_specdec.hub.formats.safeailab import SAFEAILAB
from hf_specdec.hub.recognition import recognise

MAX_MODULES = 1024  # layers or heads of a drafter
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("architectures", "layer_types"), list),
    **dict.fromkeys(("model_type", "speculators_model_type"), str),
    **dict.fromkeys(
        (
            "dflash_config",
            "eagle_config",
            "rope_parameters",
            "rope_scaling",
            "speculators_config",
            "transformer_layer_config",
            "verifier",
        ),
        dict,
    ),
}
_IN_WORDS: dict[Any, str] = {list: "a list of names", str: "a name", dict: "an object"}
_COUNTS = ("num_hidden_layers", "medusa_num_heads", "medusa_num_layers")


def read_config(
    folder: Path,
    source: Source,
    families: Iterable[tuple[Callable[[dict[str, Any]], bool], Format]] = (),
    defaults: Callable[[Format], Mapping[str, Any]] = lambda format: {},
) -> tuple[Format, dict[str, Any]]:
    """The format of a checkpoint, and its `config.json`; warns of keys that are dropped or mean nothing here.

    Args:
        folder: where `config.json` is.
        source: what the user asked for; the headers of weights are fetched from it where the config leaves doubt.
        families: as for `recognise`.
        defaults: gives what missing fields mean to the host's config class of a format's drafters.

    Raises:
        OSError: a file is not there.
        ValueError: it is no drafter, is quantised, has a field, a key or a file that cannot be read, or is of a size
            that no drafter has.
    """
    name = source.name
    fields = read_json(folder / CONFIG_FILE, name)
    _check_kinds(fields, name)
    config = f"{CONFIG_FILE} of {name!r}"
    fields, dropped = without_host_keys(fields)
    if dropped:
        warnings.warn(
            f"{config} has {listed(dropped)}, by which transformers would load or run what the checkpoint names: "
            "dropped.",
            stacklevel=3,
        )

    def tensor_names() -> Collection[str]:
        others = [*SAFEAILAB.other_weights, *MEDUSA.other_weights]
        source.locate(["model*.safetensors", INDEX_FILE, *others], revision=folder.name)
        try:
            return read_headers(weight_files(folder, name, others), name)
        except FileNotFoundError:
            return ()  # no weights: what the config lacks is the better thing to say

    format = recognise(fields, name, tensor_names, families)
    if fields.get("quantization_config") is not None:
        raise ValueError(
            f"{name!r} is quantised ({fields['quantization_config']!r}), and quantised drafters are not supported: "
            "load the checkpoint that it was made from."
        )
    if format.refused:
        beside = source.locate(list(format.refused), revision=folder.name)
        for file, why in format.refused.items():
            if (beside / file).is_file():
                raise ValueError(
                    f"{name!r} has a file {file}: {why}. Without it few drafts would be accepted: use another drafter."
                )
    fields.pop("quantization_config", None)
    _check_counts(fields, name)
    if format.keys is not None:
        known = {key: value for key, value in fields.items() if key not in CODE}
        if idle := check_keys(format.keys, known, defaults(format), config, format.name):
            warnings.warn(
                f"{config} has {listed(idle)}, which the reader of {format.name} does not know; nothing here changes "
                "by that.",
                stacklevel=3,
            )
    return format, fields


def _check_kinds(fields: dict[str, Any], name: str) -> None:
    """Raises ValueError if a field that decides what is read, at the top or nested, is of another kind."""
    for key, value in fields.items():
        kind = _KINDS.get(key, object)
        named = not isinstance(value, list) or all(isinstance(entry, str) for entry in value)
        if key in _KINDS and value is not None and not (isinstance(value, kind) and named):
            raise ValueError(f"{CONFIG_FILE} of {name!r} has {key}={value!r}; it must be {_IN_WORDS[kind]}.")
        if isinstance(value, dict):
            _check_kinds(value, name)


def _check_counts(fields: dict[str, Any], name: str) -> None:
    """Raises ValueError if a config asks for more modules than any drafter has; building them would take forever."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _check_counts(value, name)
        elif key in _COUNTS and isinstance(value, int) and value > MAX_MODULES:
            raise ValueError(
                f"{CONFIG_FILE} of {name!r} has {key}={value}, more than the {MAX_MODULES} that are built. The "
                "checkpoint is damaged or hostile: nothing was loaded."
            )
