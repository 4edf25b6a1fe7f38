"""Reads a checkpoint's config: finds its format, and checks the config before anything is built from it.

Used by `inspect_drafter` and `load_drafter`.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_specdec.hub.files import CONFIG_FILE, INDEX_FILE, Source, read_json, weight_files
from hf_specdec.hub.formats.base import Format
from hf_specdec.hub.formats.keys import check_keys
from hf_specdec.hub.recognition import drafter_layout, known_layouts, recognise
from hf_specdec.hub.tensors import read_headers
from hf_specdec.hub.wording import printable
from hf_specdec.unsafe_keys import CODE, listed, without_unsafe_keys

# Upper bounds for modules that are built one by one.
MAX_LAYERS, MAX_EXPERTS = 256, 1024
_MOST = {
    re.compile(r"^(?!max_)(\w+_)?(layers?|medusa_num_heads)$"): MAX_LAYERS,
    re.compile(r"(^|_)experts$"): MAX_EXPERTS,
    re.compile(r"^num_labels$"): 2**20,  # transformers makes a name for each
}
_LAYER_LIST = re.compile(r"layer|^h_rad_sizes$")
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("architectures", "layer_types"), list),
    **dict.fromkeys(("model_type", "speculators_model_type"), str),
    **dict.fromkeys(("draft_model", "name_or_path", "target_name_or_path", "target_revision"), str),
    **dict.fromkeys(("base_model_name_or_path", "target_model_name_or_path", "target_tokenizer_sha256"), str),
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
_SWITCH = re.compile(
    r"^((is_)?causal(_head)?|use_swa|sample_from_anchor|fc_norm|norm_(output|before_\w+)|own_(embeddings|head))$"
)
_IN_WORDS: dict[Any, str] = {list: "a list of names", str: "a name", dict: "an object"}
_POSITIVE = re.compile(r"rope_theta$|^(factor|rotary_emb_base|rope_local_base_freq)$")
_AT_LEAST_0 = re.compile(r"(^|_)(eps|epsilon)$")


def read_config(
    folder: Path,
    source: Source,
    registered: Iterable[Format] = (),
    defaults: Callable[[Format], Mapping[str, Any]] = lambda format: {},
    recognised: Callable[[Format], None] = lambda format: None,
) -> tuple[Format, dict[str, Any]]:
    """The format and the content of a checkpoint's `config.json`; warns of keys that are dropped or have no effect.

    Args:
        folder: folder of the `config.json`.
        source: the checkpoint; its weights are downloaded if their names are needed to find the format.
        registered: as for `recognise`.
        defaults: returns the defaults of transformers' config class for a format.
        recognised: called with the format before the fields are checked.

    Raises:
        OSError: a file is missing.
        ValueError: the checkpoint is not a drafter, is quantised, or has a field, a key, a file or a size that is not
            supported.
    """
    name = source.name
    fields = read_json(folder / CONFIG_FILE, name)
    _check_kinds(fields, name)
    config = f"{CONFIG_FILE} of {name!r}"
    fields, dropped = without_unsafe_keys(fields)
    if dropped:
        warnings.warn(
            f"{config} has {listed(dropped)}, by which transformers would load or run what the checkpoint names: "
            "dropped.",
            stacklevel=3,
        )

    def tensor_names() -> Collection[str]:
        others = [
            file
            for layout in known_layouts()
            if isinstance(layout, Format) and layout.recognises_names is not None
            for file in layout.other_weights
        ]
        source.locate(["model*.safetensors", INDEX_FILE, *others], revision=source.commit_of(folder))
        try:
            return read_headers(weight_files(folder, name, others), name).keys()
        except FileNotFoundError:
            return ()  # no weights: an error about the config helps more

    format = recognise(fields, name, tensor_names, registered)
    recognised(format)
    if fields.get("quantization_config") is not None:
        raise ValueError(
            f"{name!r} is quantised ({fields['quantization_config']!r}), and quantised drafters are not supported: "
            "load the checkpoint that was quantised."
        )
    if format.refused:
        beside = source.locate(list(format.refused), revision=source.commit_of(folder))
        for file, why in format.refused.items():
            if (beside / file).is_file():
                raise ValueError(
                    f"{name!r} has a file {file}: {why}. Without it few drafts would be accepted: use another drafter."
                )
    fields.pop("quantization_config", None)
    _check_numbers(fields, name)
    if format.keys is not None:
        known = {key: value for key, value in fields.items() if key not in CODE}
        if idle := check_keys(format.keys, known, defaults(format), config, format.name):
            warnings.warn(
                f"{config} has {listed(idle)}, which the reader of {format.name} does not know; they have no effect.",
                stacklevel=3,
            )
    return format, fields


def check_is_target(target: str, drafter: str) -> None:
    """Raises ValueError if the checkpoint that was given as the target is a drafter, according to its config.

    Args:
        target: folder or Hub id.
        drafter: the name that was given as the drafter, for the message.

    Raises:
        OSError: the target does not exist.
        ValueError: it is a drafter, or its config cannot be read.
    """
    folder = Path(target) if target and Path(target).is_dir() else Source(target).locate([CONFIG_FILE])
    if not (folder / CONFIG_FILE).is_file():
        return  # transformers may load it, such as an adapter
    fields = read_json(folder / CONFIG_FILE, target)
    _check_kinds(fields, target)
    layout = drafter_layout(fields, target)
    if layout is not None:
        raise ValueError(
            f"{target!r} was given as the target, but it is a drafter ({layout}). Given as the drafter: {drafter!r}. "
            "Are the two swapped? The target is the language model whose output is reproduced."
        )
    _check_numbers(fields, target)


def _check_kinds(fields: dict[str, Any], name: str) -> None:
    """Raises ValueError if a field that selects what is read, at the top level or nested, has the wrong type."""
    for key, value in _entries(fields):
        kind = _KINDS.get(key, object)
        named = not isinstance(value, list) or all(isinstance(entry, str) for entry in value)
        if key in _KINDS and value is not None and not (isinstance(value, kind) and named):
            raise ValueError(f"{_has(key, value, name)}; it must be {_IN_WORDS[kind]}.")
        if _SWITCH.search(key) and value not in (None, False, True):  # every string would be true, "false" too
            raise ValueError(f"{_has(key, value, name)}; it must be true or false.")


def _check_numbers(fields: dict[str, Any], name: str) -> None:
    """Raises ValueError if a config has more modules than any drafter, or numbers that lead to NaN."""
    for key, value in _entries(fields):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        count, most = 0, MAX_LAYERS
        if isinstance(value, list) and _LAYER_LIST.search(key):
            count = len(value)
        elif number:
            count, most = next(((value, most) for kind, most in _MOST.items() if kind.search(key)), (0, 0))
        if count > most:
            raise ValueError(
                f"{_has(key, value, name)}, and the maximum is {most}. The checkpoint is damaged or hostile: nothing "
                "was loaded."
            )
        if value is None or not (_POSITIVE.search(key) or _AT_LEAST_0.search(key)):
            continue
        if not (number and 0 <= value <= sys.float_info.max) or (value == 0 and _POSITIVE.search(key)):
            rule = "above 0" if _POSITIVE.search(key) else "of at least 0"
            raise ValueError(f"{_has(key, value, name)}; it must be a finite number {rule}.")


def _has(key: str, value: Any, name: str) -> str:
    return f"{CONFIG_FILE} of {name!r} has {printable(key, 100)}={printable(repr(value), 200)}"


def _entries(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a config and of its nested objects."""
    for key, value in fields.items():
        yield key, value
        if isinstance(value, dict):
            yield from _entries(value)
