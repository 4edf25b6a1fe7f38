"""A checkpoint before its weights are read: which format it is of, and a config that is safe to build from.

Needs neither torch nor transformers, so that `inspect_drafter` and `load_drafter` begin alike.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_specdec.host_keys import CODE, listed, without_host_keys
from hf_specdec.hub.files import CONFIG_FILE, INDEX_FILE, Source, read_headers, read_json, weight_files
from hf_specdec.hub.formats.base import Format
from hf_specdec.hub.formats.keys import check_keys
from hf_specdec.hub.formats.medusa import MEDUSA
from hf_specdec.hub.formats.safeailab import SAFEAILAB
from hf_specdec.hub.recognition import drafter_layout, recognise
from hf_specdec.hub.wording import printable

# Of what is built one by one, most that are built.
MAX_LAYERS, MAX_EXPERTS = 256, 1024
_MOST = {
    re.compile(r"^(?!max_)(\w+_)?(layers?|medusa_num_heads)$"): MAX_LAYERS,
    re.compile(r"(^|_)experts$"): MAX_EXPERTS,
    re.compile(r"^num_labels$"): 2**20,  # the host makes a name for each
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
    families: Iterable[tuple[Callable[[dict[str, Any]], bool], Format]] = (),
    defaults: Callable[[Format], Mapping[str, Any]] = lambda format: {},
    told: Callable[[Format], None] = lambda format: None,
) -> tuple[Format, dict[str, Any]]:
    """The format of a checkpoint, and its `config.json`; warns of keys that are dropped or mean nothing here.

    Args:
        folder: where `config.json` is.
        source: what the user asked for; where the config leaves doubt, the weights are fetched from it for their names.
        families: as for `recognise`.
        defaults: gives what missing fields mean to the host's config class of a format's drafters.
        told: is called with the format once it is known, before what can be wrong with its fields is looked for.

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
    told(format)
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
    _check_numbers(fields, name)
    if format.keys is not None:
        known = {key: value for key, value in fields.items() if key not in CODE}
        if idle := check_keys(format.keys, known, defaults(format), config, format.name):
            warnings.warn(
                f"{config} has {listed(idle)}, which the reader of {format.name} does not know; nothing here changes "
                "by that.",
                stacklevel=3,
            )
    return format, fields


def check_is_target(target: str, drafter: str) -> None:
    """Raises ValueError if what is to be loaded as a target is a drafter, which its config tells.

    Args:
        target: folder or Hub id.
        drafter: what was named as its drafter; for the message.

    Raises:
        OSError: the target is not there.
        ValueError: it is a drafter, or its config cannot be read.
    """
    folder = Path(target) if target and Path(target).is_dir() else Source(target).locate([CONFIG_FILE])
    if not (folder / CONFIG_FILE).is_file():
        return  # what else transformers loads, such as an adapter, is its business
    fields = read_json(folder / CONFIG_FILE, target)
    _check_kinds(fields, target)
    layout = drafter_layout(fields, target)
    if layout is not None:
        raise ValueError(
            f"{target!r} was given as the target, but it is a drafter ({layout}). Given as the drafter: {drafter!r}. "
            "Are the two swapped? The target is the language model whose output is reproduced."
        )


def _check_kinds(fields: dict[str, Any], name: str) -> None:
    """Raises ValueError if a field that decides what is read, at the top or nested, is of another kind."""
    for key, value in _entries(fields):
        kind = _KINDS.get(key, object)
        named = not isinstance(value, list) or all(isinstance(entry, str) for entry in value)
        if key in _KINDS and value is not None and not (isinstance(value, kind) and named):
            raise ValueError(f"{_has(key, value, name)}; it must be {_IN_WORDS[kind]}.")
        if _SWITCH.search(key) and value not in (None, False, True):  # every text is true, "false" too
            raise ValueError(f"{_has(key, value, name)}; it must be true or false.")


def _check_numbers(fields: dict[str, Any], name: str) -> None:
    """Raises ValueError if a config asks for more modules than any drafter has, or for numbers that give NaN."""
    for key, value in _entries(fields):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        count, most = 0, MAX_LAYERS
        if isinstance(value, list) and _LAYER_LIST.search(key):
            count = len(value)
        elif number:
            count, most = next(((value, most) for kind, most in _MOST.items() if kind.search(key)), (0, 0))
        if count > most:
            raise ValueError(
                f"{_has(key, value, name)}, more than the {most} that are built. The checkpoint is damaged or hostile: "
                "nothing was loaded."
            )
        if value is None or not (_POSITIVE.search(key) or _AT_LEAST_0.search(key)):
            continue
        if not (number and 0 <= value <= sys.float_info.max) or (value == 0 and _POSITIVE.search(key)):
            rule = "above 0" if _POSITIVE.search(key) else "of at least 0"
            raise ValueError(f"{_has(key, value, name)}; it must be a finite number {rule}.")


def _has(key: str, value: Any, name: str) -> str:
    return f"{CONFIG_FILE} of {name!r} has {printable(key, 100)}={printable(repr(value), 200)}"


def _entries(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a config and of the objects in it."""
    for key, value in fields.items():
        yield key, value
        if isinstance(value, dict):
            yield from _entries(value)
