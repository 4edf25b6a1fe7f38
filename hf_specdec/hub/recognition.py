"""Finds the format of a checkpoint, which defines the drafter family that loads it.

The format follows from the config, and for configs that look like a plain language model's from the tensor names. The
name of the repo is not used, and `model_type` is often that of a language model. Layouts come from the methods that are
registered, see `hf_specdec/methods/`. Source: shared facts on formats, A1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from hf_specdec.drafting.registry import published_layouts
from hf_specdec.hub.formats.base import PLAIN, Config, Format, Unsupported
from hf_specdec.hub.formats.library import PREFIX, find_own_layout
from hf_specdec.hub.formats.speculators import OTHER_KIND


def recognise(
    config: Config,
    name: str,
    tensor_names: Callable[[], Collection[str]] = tuple,
    registered: Iterable[Format] = (),
) -> Format:
    """Finds the format of a checkpoint.

    Args:
        config: its `config.json`.
        name: the name of the checkpoint, for messages.
        tensor_names: returns the names of its tensors; called only if the config may be that of a drafter and does not
            define the format.
        registered: the layouts of this library, see `find_own_layout`.

    Raises:
        ValueError: the format is not supported, or the checkpoint is not a drafter; names what the config has.
    """
    if (found := _of_a_drafter(config, name, tensor_names, registered)) is not None:
        return _supported(found, name)
    for layout in known_layouts():
        if layout.rank == PLAIN and layout.recognises is not None and layout.recognises(config):
            return _supported(layout, name)
    raise NotADrafterError(config, name)


def drafter_layout(config: Config, name: str) -> str | None:
    """The layout of a drafter, supported or not, according to its config alone; None for any other checkpoint."""
    found = _of_a_drafter(config, name, tuple, [])
    return None if found is None else found.name


def _of_a_drafter(
    config: Config, name: str, tensor_names: Callable[[], Collection[str]], registered: Iterable[Format]
) -> Format | Unsupported | None:
    if (own := find_own_layout(config, name, registered)) is not None:
        return own
    layouts = [layout for layout in known_layouts() if layout.rank < PLAIN]
    for layout in layouts:
        if layout.recognises is not None and layout.recognises(config):
            return layout
    if config.get("num_hidden_layers") == 1 or "model_type" not in config:
        names = set(tensor_names())
        for layout in layouts:
            if layout.recognises_names is not None and layout.recognises_names(names):
                return layout
    return None


def known_layouts() -> list[Format | Unsupported]:
    """The published layouts that are recognised, supported or not, in the order in which they can be told apart."""
    return sorted([*published_layouts(), OTHER_KIND], key=lambda layout: layout.rank)


class NotADrafterError(ValueError):
    """A checkpoint in no known layout; `found` describes its config."""

    def __init__(self, config: Config, name: str) -> None:
        architectures, model_type = config.get("architectures"), config.get("model_type")
        self.found = f"its config.json has architectures {architectures!r} and model_type {model_type!r}"
        super().__init__(
            f"{name!r} is not a drafter that load_drafter knows: {self.found}. Formats loaded: {_known()}."
        )


def _known() -> str:
    names = dict.fromkeys(layout.name for layout in known_layouts() if isinstance(layout, Format))
    return f"{', '.join(names)}, and what hf_specdec saves itself (model_type {PREFIX}...)"


def _supported(layout: Format | Unsupported, name: str) -> Format:
    if isinstance(layout, Format):
        return layout
    raise ValueError(
        f"{name!r} holds a drafter in the {layout.name} format, which load_drafter does not read yet: it needs "
        f"{layout.missing}. Formats loaded: {_known()}. Look for a drafter of one of those kinds for your target, or "
        "train one."
    )
