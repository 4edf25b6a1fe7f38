"""The registered drafter families and drafting methods. Each folder under `drafters/` registers its own."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from hf_specdec.decoding.generator import TreeCandidateGenerator
    from hf_specdec.drafters.base import BlockMarginals, Drafter
    from hf_specdec.drafters.options import TreeOptions


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint.

    Attributes:
        name: its folder under `drafters/`.
        drafter: the class that loads it.
        recognises: whether a `config.json`, as a dict, is of this kind; None if `hub/recognition.py` recognises it, or
            `model_type` is "hf_specdec_" and the name.
        load: for kinds that transformers loads: makes the drafter from config, name, folder, dtype and whether to load
            the weights; without weights it is on the meta device. None for a `PretrainedDrafter`, whose tensors are
            checked one by one.
    """

    name: str
    drafter: type[Any]  # a Drafter; those with tensors of their own are a `PretrainedDrafter`
    recognises: Callable[[dict[str, Any]], bool] | None = None
    load: Callable[[dict[str, Any], str, Path, torch.dtype | None, bool], Drafter] | None = None


FAMILIES: dict[str, Family] = {}
# Methods that draft from per-position marginals of any network.
MARGINAL_METHODS: dict[str, Callable[[BlockMarginals, TreeOptions], TreeCandidateGenerator]] = {}


# Drafters without a checkpoint; each entry makes one from drafting options.
WEIGHTLESS: dict[str, Callable[..., Drafter]] = {}


def register_family(
    name: str,
    *,
    drafter: type[Drafter],
    recognises: Callable[[dict[str, Any]], bool] | None = None,
    load: Callable[[dict[str, Any], str, Path, torch.dtype | None, bool], Drafter] | None = None,
) -> None:
    """Registers a kind of checkpoint for `load_drafter`; called at the end of its `__init__.py`."""
    _claim(FAMILIES, name, Family(name, drafter, recognises, load))


def register_marginal_method(name: str, make: Callable[[BlockMarginals, TreeOptions], TreeCandidateGenerator]) -> None:
    """Registers a drafting method that uses per-position marginals, as `make(marginals, options)`."""
    _claim(MARGINAL_METHODS, name, make)


def register_weightless(name: str, make: Callable[..., Drafter]) -> None:
    """Registers a drafter without weights by name; `make(**drafting_options)` makes one."""
    _claim(WEIGHTLESS, name, make)


def is_weightless(name: str) -> bool:
    """Whether a name means a drafter without a checkpoint; a folder of this name takes precedence."""
    return name in WEIGHTLESS and not os.path.isdir(name)


def _claim(table: dict[str, Any], name: str, entry: object) -> None:
    if table.setdefault(name, entry) is not entry:
        raise ValueError(f"The name {name!r} is registered already, by {table[name]!r}; {entry!r} needs another.")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for an unknown name: suggests the nearest one, then lists all."""
    choices = sorted(known)
    nearest = difflib.get_close_matches(str(name), choices, n=1)
    suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"Unknown {kind} {name!r}.{suggestion} Known: {', '.join(map(repr, choices)) or 'none'}.")


def name_of(model: Any) -> str:
    """Folder or Hub id of a model or drafter, for messages; its class if unknown."""
    return model.name_or_path or type(model).__name__
