"""Layouts of this library, for families whose published layouts do not have a field for everything.

Such a config has the `model_type` "hf_specdec_" and the family's name, and the fields of its config class.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from hf_specdec.hub.formats.base import Config, Format, as_it_is
from hf_specdec.hub.formats.keys import OURS, TRANSFORMERS, Section, decoder

PREFIX = "hf_specdec_"


def own_layout(family: str, config_class: Any, keys: Section | None = None, **parts: Any) -> Format:
    """The layout of this library for a family.

    Args:
        family: its name.
        config_class: its config class; the layout's keys are its fields.
        keys: the keys where they do not follow from the config class, such as nested ones.
        parts: other attributes of the `Format`.
    """
    arguments = {field.name for field in dataclasses.fields(config_class)} - TRANSFORMERS
    if keys is None and "num_attention_heads" in arguments:
        keys = decoder(*arguments, *OURS)
    return Format(family, family, as_it_is, keys or Section(OURS.union(arguments), TRANSFORMERS), **parts)


def find_own_layout(config: Config, name: str, registered: Iterable[Format]) -> Format | None:
    """The layout of this library that a `config.json` has; None for any other layout.

    Args:
        config: the `config.json`.
        name: the name of the drafter, for messages.
        registered: the layouts of registered families; if there are none, every family is taken to exist.

    Raises:
        ValueError: its family is unknown.
    """
    model_type = str(config.get("model_type"))
    if not model_type.startswith(PREFIX):
        return None
    family = model_type.removeprefix(PREFIX)
    known = {layout.family: layout for layout in registered if layout.recognises is None}
    if not known:
        return Format(family, family, as_it_is)
    if family not in known:
        nearest = difflib.get_close_matches(family, known, n=1)
        raise ValueError(
            f"{name!r} has model_type {model_type!r}, but there is no family {family!r}."
            f"{f' Did you mean {nearest[0]!r}?' if nearest else ''} Known: {', '.join(sorted(known))}. If it is a "
            "method of your own, import the module that registers it first; if another version of hf_specdec saved it, "
            "update hf_specdec."
        )
    return known[family]
