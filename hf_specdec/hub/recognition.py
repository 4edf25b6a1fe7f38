"""Which drafter family a `config.json` belongs to. The name of a repo says nothing, and `model_type` misleads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf_specdec.drafters  # noqa: F401 (registers the families)
from hf_specdec.drafters.registry import FAMILIES, Family

Config = dict[str, Any]


def recognise(config: Config, name: str) -> Family:
    """Finds the family that loads a checkpoint.

    Args:
        config: its `config.json`.
        name: where it came from, for the message.

    Raises:
        ValueError: a format that is known but not loaded, or no drafter at all; says what the config holds.
    """
    known = ", ".join(sorted(FAMILIES))
    for recognises, kind in _ELSEWHERE_FIRST:
        if recognises(config):
            raise ValueError(_not_loaded(name, kind, known))
    for family in FAMILIES.values():
        if family.recognises(config):
            return family
    for recognises, kind in _ELSEWHERE_LAST:
        if recognises(config):
            raise ValueError(_not_loaded(name, kind, known))
    raise ValueError(
        f"{name!r} is not a drafter that load_drafter knows: its config.json has architectures "
        f"{config.get('architectures')!r} and model_type {config.get('model_type')!r}. Formats loaded: {known}. A plain "
        "language model can draft in transformers' own way: pass it to generate as assistant_model itself."
    )


def _not_loaded(name: str, kind: str, known: str) -> str:
    return (
        f"{name!r} holds a drafter in the {kind} format, which load_drafter does not read yet. Formats loaded: {known}. "
        "Look for a drafter of that kind for your target, or train one."
    )


def _architecture(*parts: str) -> Callable[[Config], bool]:
    return lambda config: any(part in name for name in config.get("architectures") or () for part in parts)


def _has(*keys: str) -> Callable[[Config], bool]:
    return lambda config: any(key in config for key in keys)


# Published formats, in the order in which they can be told apart; ours are looked for between the two lists.
_ELSEWHERE_FIRST: list[tuple[Callable[[Config], bool], str]] = [
    (_has("speculators_model_type", "speculators_config"), "speculators"),
    (lambda config: str(config.get("model_type")).endswith("_assistant"), "transformers assistant"),
    (_architecture("SpecBlock"), "SpecBlock"),
    (_has("diffspec_draft_token_num"), "SpecBlock"),
    (_architecture("DFlash2"), "DFlash 2"),
    (lambda config: bool({"selector_rank", "conv_kernel_size"} & set(config.get("dflash_config") or ())), "DFlash 2"),
    (_architecture("DSpark", "Domino"), "DSpark"),
    (_architecture("DFlashLaguna"), "Laguna DFlash"),
]
_ELSEWHERE_LAST: list[tuple[Callable[[Config], bool], str]] = [
    (_architecture("Eagle3", "PEagle"), "EAGLE-3"),
    (lambda config: "draft_vocab_size" in config and config.get("num_hidden_layers") == 1, "EAGLE-3"),
    (_has("medusa_num_heads"), "Medusa"),
]
