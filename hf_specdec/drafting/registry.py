"""The registered drafting methods: `register(...)` is the one place where a method says what other parts ask about it.

Each method registers itself at the end of its own file. Export, serving, formats, verification and the benchmark look a
drafter up by its class (`method_of`), and know no method by name.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hf_specdec.decoding.generator import TreeCandidateGenerator

Origin = Literal["checkpoint", "name", "target", "drafters"]
DEFAULT_TOKENS = 5  # of vLLM, for drafters that draft token by token


@dataclass(frozen=True)
class Serving:
    """How vLLM runs the drafters of a method; every callable gets the drafter.

    Attributes:
        method: vLLM's name of the method; None if vLLM has none for it.
        not_exported: why vLLM does not serve an export of such a drafter, as a clause; empty for methods with a layout
            that has a `write`.
        tokens: the most tokens that the drafter drafts in one forward; None for drafters that draft token by token.
        default_tokens: tokens per round of a drafter that drafts token by token and was not measured.
        needs_export: whether vLLM cannot read the checkpoint with this `config.json`.
        settings: further entries of `--speculative-config`.
        note: what vLLM does otherwise than this library, for methods that it has itself.
        instead: the name of the drafter that vLLM can run in place of this one, and a sentence that says so.
        since: the first version of vLLM that runs it correctly, and what earlier ones do, as a clause.
        fields: the fields of the config for `Format.write`; None for those of `config.to_dict()`.
        head_ids: [draft_vocab] int64, the rows of the target's head that an export has to contain; None if none.
        whole_model: for drafters that are models of transformers: the model to export, with a row for each of this
            number of tokens of the target.
    """

    method: str | None = None
    not_exported: str = ""
    tokens: Callable[[Any], int] | None = None
    default_tokens: int = DEFAULT_TOKENS
    needs_export: Callable[[Any, dict[str, Any]], bool] = lambda drafter, config: "speculators_config" not in config
    settings: Callable[[Any], dict[str, Any]] = lambda drafter: {}
    note: str = ""
    instead: Callable[[Any], tuple[str, str]] | None = None
    since: tuple[tuple[int, ...], str] | None = None
    fields: Callable[[Any], dict[str, Any]] = lambda drafter: drafter.config.to_dict()
    head_ids: Callable[[Any], Any] = lambda drafter: None
    whole_model: Callable[[Any, int], Any] | None = None


@dataclass(frozen=True)
class Method:
    """What other parts ask about a method.

    Attributes:
        name: as `load_drafter` and checkpoints know it.
        drafter: the class of its drafters. Those with tensors of their own are a `PretrainedDrafter`.
        origin: what its drafters are made from: a checkpoint of their own, a name alone, the target's checkpoint, or
            other drafters.
        load: for checkpoints that transformers loads: makes the drafter from config, name, folder, dtype and whether to
            load the weights; without weights it is on the meta device. None for a `PretrainedDrafter`, whose tensors
            are checked one by one.
        of_target: for origin "target": makes the drafter from the target, the `Source` that was asked for and drafting
            options; returns None where something else is meant.
        in_target: for origin "target": what `inspect_drafter` says of a checkpoint with these tensor names and this
            `config.json`; None if no drafter lies in it.
        layouts: the published layouts of its checkpoints (`Format` of `hub/formats/base.py`).
        not_read: layouts of its checkpoints that are recognised and refused (`Unsupported`, there).
        own_keys: the keys of the layout of this library (`Section`), where they do not follow from the config class.
        own_files: see `Format.own_files`.
        missing: see `Format.missing`.
        serving: how vLLM runs its drafters; None if it does not.
        replays: makes a generator that drafts recorded trees as this method drafts, for `verify_lossless`, from
            drafter, target and `draft(context) -> DraftTree`; None for methods that run no layers of the target.
    """

    name: str
    drafter: type[Any]
    origin: Origin = "checkpoint"
    load: Callable[..., Any] | None = None
    of_target: Callable[..., Any] = lambda target, source, **options: None
    in_target: Callable[[Collection[str], dict[str, Any]], str | None] = lambda names, fields: None
    layouts: tuple[Any, ...] = ()
    not_read: tuple[Any, ...] = ()
    own_keys: Any = None
    own_files: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda fields: {}
    missing: Callable[..., list[str]] = lambda fields, folder: []
    serving: Serving | None = None
    replays: Callable[[Any, Any, Any], TreeCandidateGenerator] | None = None


# Methods with checkpoints of their own, by name.
FAMILIES: dict[str, Method] = {}
# Methods that draft from per-position marginals of any network, by name: `make(marginals, options)`.
MARGINAL_METHODS: dict[str, Callable[[Any, Any], TreeCandidateGenerator]] = {}
# Drafters without a checkpoint, by name; each entry makes one from drafting options.
WEIGHTLESS: dict[str, Callable[..., Any]] = {}
_BY_CLASS: dict[type[Any], Method] = {}
# `load_drafter`, which imports all methods, for `from_pretrained` of their classes; it is added where it is defined.
LOADERS: list[Callable[..., Any]] = []


def register(name: str, drafter: type[Any], **about: Any) -> None:
    """Registers a method; called at the end of its file.

    Args:
        name: see `Method`.
        drafter: see `Method`.
        about: the other attributes of `Method`.

    Raises:
        ValueError: the name is registered already.
    """
    method = Method(name, drafter, **about)
    for known in [each.drafter for each in _BY_CLASS.values() if each.name == name]:
        if runs_again(known, drafter):
            FAMILIES.pop(name, None)
            WEIGHTLESS.pop(name, None)
            del _BY_CLASS[known]
    if method.origin == "checkpoint":
        _claim(FAMILIES, name, method)
    elif method.origin == "name":
        _claim(WEIGHTLESS, name, drafter)
    _BY_CLASS[drafter] = method


def named_alone() -> list[str]:
    """Drafters without weights that `load_drafter` makes from their name, without further arguments."""
    return sorted(name for name, drafter in WEIGHTLESS.items() if not getattr(drafter, "made_of", None))


def register_marginal_method(name: str, make: Callable[[Any, Any], TreeCandidateGenerator]) -> None:
    """Registers a drafting method that uses per-position marginals, as `make(marginals, options)`.

    Args:
        name: the method's, for the option `method`.
        make: makes the `TreeCandidateGenerator` of a call from `BlockMarginals` and `TreeOptions`.
    """
    _claim(MARGINAL_METHODS, name, make)


def method_of(drafter: object) -> Method | None:
    """The method of a drafter, also if its class is derived from that of a registered one; None if it is of none."""
    return next((_BY_CLASS[kind] for kind in type(drafter).__mro__ if kind in _BY_CLASS), None)


def published_layouts() -> list[Any]:
    """The layouts that methods registered, read or not, in the order in which they are recognised."""
    found = [layout for method in _BY_CLASS.values() for layout in (*method.layouts, *method.not_read)]
    return sorted(found, key=lambda layout: layout.rank)


def methods_within_targets() -> list[Method]:
    """The methods whose drafters lie in the target's checkpoint."""
    return [method for method in _BY_CLASS.values() if method.origin == "target"]


def serving_of(drafter: object) -> Serving:
    """How vLLM runs a drafter; not at all if its method does not say."""
    method = method_of(drafter)
    if method is None or method.serving is None:
        return Serving(not_exported=f"vLLM does not support the kind {type(drafter).__name__!r}")
    return method.serving


def named_method(name: str) -> Method | None:
    """The method of drafters that are named instead of loaded; None for a checkpoint, such as a folder of this name."""
    if os.path.isdir(name):
        return None
    named = [method for method in _BY_CLASS.values() if method.name == name and method.origin in ("name", "target")]
    return next((method for method in named if method.origin == "target" or name in WEIGHTLESS), None)


def is_weightless(name: str) -> bool:
    """Whether a name means a drafter without a checkpoint; a folder of this name takes precedence."""
    return name in WEIGHTLESS and not os.path.isdir(name)


def check_has_checkpoint(name: str) -> None:
    """Raises ValueError if a name means a drafter without a checkpoint; says how to get it."""
    method = named_method(name)
    if method is None:
        check_spelling(name)
        return
    how = f"load_drafter({name!r}) makes one"
    if method.origin == "target":
        how = (
            f"load_drafter({name!r}, target) makes one from a layer in the target's checkpoint. Inspect the target to "
            "see whether it has such a layer"
        )
    raise ValueError(f"{name!r} is a drafter without a checkpoint, so there are no files to read: {how}.")


def check_spelling(name: str) -> None:
    """Raises ValueError for a name that is nearly that of a drafter without a checkpoint, before the Hub is asked."""
    if os.path.isdir(name):
        return
    names = sorted(method.name for method in _BY_CLASS.values() if method.origin in ("name", "target"))
    if name not in names and (nearest := difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)):
        raise ValueError(
            f"There is no folder {name!r} here. Did you mean {nearest[0]!r}? Drafters without a checkpoint: "
            f"{', '.join(names)}; a Hub id has the form 'owner/name'."
        )


def runs_again(known: Any, new: Any) -> bool:
    """Whether a class or function was made by the same lines as another one, which ran again, as in a notebook."""
    return (known.__module__, known.__qualname__) == (new.__module__, new.__qualname__)


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


def is_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name and is not a local folder."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()
