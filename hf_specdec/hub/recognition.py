"""Finds the format of a checkpoint, which defines the drafter family that loads it.

The format follows from the config, and for configs that look like a plain language model's from the tensor names. The
name of the repo is not used, and `model_type` is often that of a language model. Needs neither torch nor transformers.
Source: shared facts on formats, A1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from hf_specdec.hub.formats.base import Format
from hf_specdec.hub.formats.deepspec import DEEPSPEC_DFLASH, DEEPSPEC_EAGLE3, is_deepspec_dflash, is_deepspec_eagle3
from hf_specdec.hub.formats.dflash2 import DFLASH2, is_dflash2
from hf_specdec.hub.formats.dspark import DSPARK, is_dspark
from hf_specdec.hub.formats.gemma4_assistant import GEMMA4_ASSISTANT, is_gemma4_assistant
from hf_specdec.hub.formats.language_model import LANGUAGE_MODEL
from hf_specdec.hub.formats.medusa import MEDUSA
from hf_specdec.hub.formats.muse import MUSE, is_muse
from hf_specdec.hub.formats.own import PREFIX, own_format
from hf_specdec.hub.formats.safeailab import SAFEAILAB
from hf_specdec.hub.formats.specblock import SPECBLOCK, is_specblock
from hf_specdec.hub.formats.specforge import SPECFORGE, SPECFORGE_PEAGLE
from hf_specdec.hub.formats.speculators import SPECULATORS, speculators_type
from hf_specdec.hub.formats.zlab import ZLAB, is_zlab

Config = dict[str, Any]


@dataclass(frozen=True)
class Unread:
    """A known format that is not supported; `missing` is what its drafters need that this library does not have."""

    name: str
    missing: str


Rule = tuple[Callable[[Config], bool], Format | Unread]


def recognise(
    config: Config,
    name: str,
    tensor_names: Callable[[], Collection[str]] = tuple,
    families: Iterable[tuple[Callable[[Config], bool], Format]] = (),
) -> Format:
    """Finds the format of a checkpoint.

    Args:
        config: its `config.json`.
        name: the name of the checkpoint, for messages.
        tensor_names: returns the names of its tensors; called only if the config may be that of a drafter and does not
            define the format.
        families: further layouts, which take precedence over a plain language model.

    Raises:
        ValueError: the format is not supported, or the checkpoint is not a drafter; names what the config has.
    """
    if (found := _published(config, name, tensor_names)) is not None:
        return _loaded(found, name)
    for recognises, format in [*families, (is_language_model, LANGUAGE_MODEL)]:
        if recognises(config):
            return format
    raise NotADrafterError(config, name)


def drafter_layout(config: Config, name: str) -> str | None:
    """The layout of a drafter, supported or not, according to its config alone; None for any other checkpoint.

    Args:
        config: as for `recognise`.
        name: as for `recognise`.

    Raises:
        ValueError: the config has this library's layout of an unknown family.
    """
    found = _published(config, name, tuple)
    return None if found is None else found.name


def _published(config: Config, name: str, tensor_names: Callable[[], Collection[str]]) -> Format | Unread | None:
    if (own := own_format(config, name)) is not None:
        return own
    for recognises, format in _BY_CONFIG:
        if recognises(config):
            return format
    if config.get("num_hidden_layers") == 1 or "model_type" not in config:
        names = set(tensor_names())
        for recognises_names, format in _BY_TENSORS:
            if recognises_names(names):
                return format
    return None


class NotADrafterError(ValueError):
    """A checkpoint in no known layout; `found` describes its config."""

    def __init__(self, config: Config, name: str) -> None:
        architectures, model_type = config.get("architectures"), config.get("model_type")
        self.found = f"its config.json has architectures {architectures!r} and model_type {model_type!r}"
        super().__init__(
            f"{name!r} is not a drafter that load_drafter knows: {self.found}. Formats loaded: {_known()}."
        )


def is_language_model(config: Config) -> bool:
    """Whether the class in a `config.json` has the name of a language model of transformers, or contains one."""
    names = config.get("architectures") or ()
    named = any(re.search(r"(ForCausalLM|LMHeadModel)$", name) for name in names)
    contains = "text_config" in config and any(name.endswith("ForConditionalGeneration") for name in names)
    return (named or contains) and "model_type" in config


def _known() -> str:
    formats = [format for _, format in [*_BY_CONFIG, *_BY_TENSORS] if isinstance(format, Format)]
    names = dict.fromkeys(format.name for format in [*formats, LANGUAGE_MODEL])
    return f"{', '.join(names)}, and what hf_specdec saves itself (model_type {PREFIX}...)"


def _loaded(format: Format | Unread, name: str) -> Format:
    if isinstance(format, Format):
        return format
    raise ValueError(
        f"{name!r} holds a drafter in the {format.name} format, which load_drafter does not read yet: it needs "
        f"{format.missing}. Formats loaded: {_known()}. Look for a drafter of one of those kinds for your target, or "
        "train one."
    )


def _architecture(*parts: str) -> Callable[[Config], bool]:
    return lambda config: any(part in name for name in config.get("architectures") or () for part in parts)


def _has(*keys: str) -> Callable[[Config], bool]:
    return lambda config: any(key in config for key in keys)


def _ends_in(part: str) -> Callable[[Config], bool]:
    return lambda config: any(name.endswith(part) for name in config.get("architectures") or ())


def _speculators(kind: str) -> Callable[[Config], bool]:
    return lambda config: speculators_type(config) == kind


def _model_type(part: str) -> Callable[[Config], bool]:
    return lambda config: str(config.get("model_type")).endswith(part)


_GEMMA_4 = "draft layers of Gemma 4 shape: four norms, scaled embeddings"
_MTP = Unread("multi-token prediction", "the target's own layers of which it is a part: load the target with them")

# Published formats, in the order in which they can be told apart.
_BY_CONFIG: list[Rule] = [
    *((_speculators(kind), format) for kind, format in SPECULATORS.items()),
    (_speculators("mtp"), Unread("speculators mtp", _MTP.missing)),
    (_speculators("eagle"), Unread("speculators eagle", "a reader for EAGLE-1, whose drafters have no head")),
    (lambda config: speculators_type(config) is not None, Unread("speculators", "a kind that is named and known")),
    (is_muse, MUSE),
    (is_gemma4_assistant, GEMMA4_ASSISTANT),
    (is_specblock, SPECBLOCK),
    (is_dflash2, DFLASH2),
    (is_deepspec_dflash, DEEPSPEC_DFLASH),
    (_architecture("Domino"), Unread("Domino", "a recurrent net over the drafted prefix that corrects the logits")),
    (is_dspark, DSPARK),
    (_architecture("Gemma4DSpark"), Unread("DSpark for Gemma 4", _GEMMA_4)),
    (
        _architecture("Qwen35DSpark"),
        Unread("DSpark for Qwen3.5", "draft layers with gated queries and norms of gain 1 + w"),
    ),
    (_architecture("DSpark"), Unread("DSpark of another architecture", "draft layers that are not Qwen3's")),
    (is_deepspec_eagle3, DEEPSPEC_EAGLE3),
    (
        _architecture("Gemma4Eagle3"),
        Unread("DeepSpec EAGLE-3 for Gemma 4", _GEMMA_4),
    ),
    (
        _architecture("DFlashLaguna"),
        Unread("Laguna DFlash", "a norm for each tapped state and gated, fused attention"),
    ),
    (_architecture("PEagle"), SPECFORGE_PEAGLE),
    (is_zlab, ZLAB),
    (
        _architecture("Eagle3DeepseekV2"),
        Unread("EAGLE-3 with multi-head latent attention", "a draft layer with latent attention"),
    ),
    (_ends_in("Eagle3"), SPECFORGE),
    (lambda config: "draft_vocab_size" in config and config.get("num_hidden_layers") == 1, SAFEAILAB),
    (_has("medusa_num_heads"), MEDUSA),
    (_model_type("medusa"), Unread("Medusa (vLLM)", "a reader for vLLM's names of Medusa heads")),
    (_architecture("MTP", "MtpModel"), _MTP),
]
# For configs that say no more than that a small Llama is meant, or say nothing.
_BY_TENSORS: list[tuple[Callable[[set[str]], bool], Format | Unread]] = [
    (lambda names: any(name.startswith("midlayer.") for name in names), SAFEAILAB),
    (lambda names: any(re.match(r"medusa_head\.|\d+\.0\.linear\.weight$", name) for name in names), MEDUSA),
    (
        lambda names: (
            {"fc.weight", "layers.0.mlp.up_proj.weight"} <= names and not {"lm_head.weight", "norm.weight"} & names
        ),
        Unread(
            "EAGLE-1 and EAGLE-2",
            "a reader for layers without an input norm that draft on the target's last state and with its head",
        ),
    ),
]
