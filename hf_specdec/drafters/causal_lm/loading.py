"""Loads a causal language model as a drafter. `hub/loading.py` finds its files and checks that they are complete."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_specdec.decoding.host import keep_names
from hf_specdec.drafters.causal_lm.drafter import CausalLMDrafter
from hf_specdec.drafters.pretrained import check_numbers, loading_differences

# Names of a language model's weights within an image-text model, and by themselves.
PART_KEYS = {
    r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head\.)": "model.",
    r"^(language_model|text_model)\.lm_head\.": "lm_head.",
}


def is_causal_lm(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is of a model that AutoModelForCausalLM would build.

    The configs of several other kinds of drafters pass this check too: recognise those first.
    """
    return _is_of(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, config)


def is_image_text_model(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is of a model that AutoModelForImageTextToText would build."""
    return _is_of(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, config)


def _is_of(names: Mapping[str, Any], config: dict[str, Any]) -> bool:
    known = names.get(str(config.get("model_type")))
    classes = (known,) if isinstance(known, str) else known or ()
    return any(name in classes for name in config.get("architectures") or ())


def class_and_config(parsed: PreTrainedConfig) -> tuple[Any, PreTrainedConfig]:
    """The auto class and config that draft for a config: of an image-text model, those of its language model.

    Where transformers has no class for the language model alone, they are those of the whole model, whose other parts
    are then loaded too, but never run.
    """
    text = parsed.get_text_config(decoder=True)
    if type(text) is not type(parsed) and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        text.tie_word_embeddings = parsed.tie_word_embeddings  # the whole model's class decides it
        return AutoModelForCausalLM, text
    return (
        AutoModelForCausalLM if type(parsed) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    ), parsed


def whole_model(source: Path, name: str, loader: Any, *, is_part: bool = False, **settings: Any) -> PreTrainedModel:
    """A language model with all weights from its files.

    Args:
        source: its folder.
        name: of the model, for messages.
        loader: the auto class of the model.
        is_part: whether the files hold other parts too, such as a vision tower, which are left out.
        settings: for `from_pretrained`.

    Raises:
        OSError: as `from_pretrained`.
        ValueError: the weights differ from those that the config describes, or contain NaN; names them.
    """
    if is_part:
        settings["key_mapping"] = PART_KEYS
    model, info = loader.from_pretrained(
        source,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # transformers then reports the shapes instead of raising; all are raised below
        **settings,
    )
    if is_part:
        info["unexpected_keys"] = set()
        keep_names(model)
    if differences := loading_differences(info):
        raise ValueError(
            f"The weights of {name!r} are not those of the {type(model).__name__} that its config.json describes: "
            f"{differences}. Nothing was loaded: check that weights and config.json are of one checkpoint."
        )
    check_numbers(model, name)
    return model


def _parsed(config: dict[str, Any]) -> PreTrainedConfig:
    """The config object of a `config.json`.

    Raises:
        ValueError: transformers has no such model.
    """
    if not (is_causal_lm(config) or is_image_text_model(config)):
        raise ValueError(
            f"transformers {transformers.__version__} has no language model of architectures "
            f"{config.get('architectures')!r} and model_type {config.get('model_type')!r}."
        )
    parsed: PreTrainedConfig = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    return parsed


def load(config: dict[str, Any], name: str, folder: Path, dtype: torch.dtype | None, weights: bool) -> CausalLMDrafter:
    """Makes the drafter.

    Args:
        config: the checkpoint's `config.json`.
        name: what the user has passed.
        folder: of its files.
        dtype: of the weights; None for the stored one.
        weights: whether to load them; if not, the drafter is on the meta device, with its options and vocabulary.

    Raises:
        ValueError: transformers has no such model, or the weights differ from those that the config describes.
    """
    parsed = _parsed(config)
    loader, own = class_and_config(parsed)
    own.name_or_path = name
    if not weights:
        with torch.device("meta"):
            blueprint = CausalLMDrafter(loader.from_config(own, trust_remote_code=False))
        blueprint.tokenizer_folder = folder
        return blueprint
    is_part = own is not parsed
    model = whole_model(folder, name, loader, is_part=is_part, config=own, dtype=dtype or "auto", local_files_only=True)
    model.name_or_path = model.config.name_or_path = name
    drafter = CausalLMDrafter(model.eval())
    drafter.tokenizer_folder = folder
    return drafter
