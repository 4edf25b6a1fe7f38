"""Which format a checkpoint is of, and so which drafter family loads it.

The config decides, and where it looks like a plain language model, the names of the tensors. The name of a repo says
nothing, and `model_type` misleads. Source: shared facts on formats, A1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import hf_specdec.drafters  # noqa: F401 (registers the families)
from hf_specdec.drafters.registry import FAMILIES
from hf_specdec.hub.formats.base import Format, as_it_is
from hf_specdec.hub.formats.deepspec import DEEPSPEC_DFLASH, DEEPSPEC_EAGLE3, is_deepspec_dflash, is_deepspec_eagle3
from hf_specdec.hub.formats.medusa import MEDUSA
from hf_specdec.hub.formats.safeailab import SAFEAILAB
from hf_specdec.hub.formats.specforge import SPECFORGE
from hf_specdec.hub.formats.speculators import SPECULATORS, speculators_type

Config = dict[str, Any]


def recognise(config: Config, name: str, tensor_names: Callable[[], Collection[str]] = tuple) -> Format:
    """Finds the format of a checkpoint.

    Args:
        config: its `config.json`.
        name: where it came from, for the message.
        tensor_names: gives the names of its tensors; called only where the config could be a small drafter's and does
            not say so.

    Raises:
        ValueError: a format that is known but not loaded, or no drafter at all; says what the config holds.
    """
    families, last_families = (
        [
            (family.recognises, Format(family.name, family.name, as_it_is))
            for family in FAMILIES.values()
            if family.last_resort == last
        ]
        for last in (False, True)
    )
    for recognises, format in [*_ELSEWHERE_FIRST, *families, *_ELSEWHERE_LAST]:
        if recognises(config):
            return _loaded(format, name)
    if config.get("num_hidden_layers") == 1 or "model_type" not in config:
        names = set(tensor_names())
        for recognises_names, format in _BY_TENSORS:
            if recognises_names(names):
                return _loaded(format, name)
    for recognises, format in last_families:
        if recognises(config):
            return format
    known = _known()
    raise ValueError(
        f"{name!r} is not a drafter that load_drafter knows: its config.json has architectures "
        f"{config.get('architectures')!r} and model_type {config.get('model_type')!r}. Formats loaded: {known}."
    )


def _known() -> str:
    foreign = [*SPECULATORS.values(), SAFEAILAB, SPECFORGE, DEEPSPEC_EAGLE3, DEEPSPEC_DFLASH, MEDUSA]
    families = sorted(FAMILIES, key=lambda family: (FAMILIES[family].last_resort, family))
    return ", ".join([*families, *(format.name for format in foreign)])


def _loaded(format: Format | str, name: str) -> Format:
    if isinstance(format, Format):
        return format
    raise ValueError(
        f"{name!r} holds a drafter in the {format} format, which load_drafter does not read yet. Formats loaded: "
        f"{_known()}. Look for a drafter of that kind for your target, or train one."
    )


def _architecture(*parts: str) -> Callable[[Config], bool]:
    return lambda config: any(part in name for name in config.get("architectures") or () for part in parts)


def _has(*keys: str) -> Callable[[Config], bool]:
    return lambda config: any(key in config for key in keys)


def _ends_in(part: str) -> Callable[[Config], bool]:
    return lambda config: any(name.endswith(part) for name in config.get("architectures") or ())


def _speculators(kind: str) -> Callable[[Config], bool]:
    return lambda config: speculators_type(config) == kind


# Published formats, in the order in which they can be told apart; ours are looked for between the two lists. A format
# that is known and not loaded is a name.
_ELSEWHERE_FIRST: list[tuple[Callable[[Config], bool], Format | str]] = [
    *((_speculators(kind), format) for kind, format in SPECULATORS.items()),
    *((_speculators(kind), f"speculators {kind}") for kind in ("dflash2", "peagle", "dspark", "mtp", "eagle")),
    (lambda config: speculators_type(config) is not None, "speculators"),
    (lambda config: str(config.get("model_type")).endswith("_assistant"), "transformers assistant"),
    (_architecture("DFlash2"), "DFlash 2"),
    (lambda config: bool({"selector_rank", "conv_kernel_size"} & set(config.get("dflash_config") or ())), "DFlash 2"),
    (is_deepspec_dflash, DEEPSPEC_DFLASH),
    (_architecture("DSpark", "Domino"), "DSpark"),
    (is_deepspec_eagle3, DEEPSPEC_EAGLE3),
    (_architecture("Gemma4Eagle3"), "DeepSpec EAGLE-3 for Gemma 4"),
    (_architecture("DFlashLaguna"), "Laguna DFlash"),
]
_ELSEWHERE_LAST: list[tuple[Callable[[Config], bool], Format | str]] = [
    (_architecture("PEagle"), "P-EAGLE"),
    (_architecture("Eagle3DeepseekV2"), "EAGLE-3 with multi-head latent attention"),
    (_ends_in("Eagle3"), SPECFORGE),
    (lambda config: "draft_vocab_size" in config and config.get("num_hidden_layers") == 1, SAFEAILAB),
    (_has("medusa_num_heads"), MEDUSA),
]
# For configs that say no more than that a small Llama is meant, or say nothing.
_BY_TENSORS: list[tuple[Callable[[set[str]], bool], Format | str]] = [
    (lambda names: any(name.startswith("midlayer.") for name in names), SAFEAILAB),
    (lambda names: any(re.match(r"medusa_head\.|\d+\.0\.linear\.weight$", name) for name in names), MEDUSA),
    (
        lambda names: (
            {"fc.weight", "layers.0.mlp.up_proj.weight"} <= names and not {"lm_head.weight", "norm.weight"} & names
        ),
        "EAGLE-1 and EAGLE-2",
    ),
]
