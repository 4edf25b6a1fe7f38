"""From a plain language model's files to a drafter. Files were found and found whole by `hub/loading.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_specdec.drafters.causal_lm.drafter import CausalLMDrafter
from hf_specdec.drafters.pretrained import loading_differences
from hf_specdec.host_keys import without_host_keys


def is_causal_lm(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is of a model that AutoModelForCausalLM would build.

    Drafters of several kinds say the same of themselves, so whoever asks has asked about those before.
    """
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    names = (known,) if isinstance(known, str) else known or ()
    return any(name in names for name in config.get("architectures") or ())


def whole_model(source: Path, name: str, **settings: Any) -> PreTrainedModel:
    """A language model whose every weight is that of its files.

    Args:
        source: its folder.
        name: of the model, for messages.
        settings: for `from_pretrained`; without a `config` among them, that of the folder is read.

    Raises:
        OSError: as `from_pretrained`, or there is no config.
        ValueError: the config cannot be read, transformers knows no such model, or the weights are not those that the
            config describes; names them.
    """
    if "config" not in settings:
        settings["config"] = _config_of(source, name)
    model, info = AutoModelForCausalLM.from_pretrained(
        source,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # without, transformers raises and names no shape; none is ignored here
        **settings,
    )
    if differences := loading_differences(info):
        raise ValueError(
            f"The weights of {name!r} are not those of the {type(model).__name__} that its config.json describes: "
            f"{differences}. Nothing was loaded: check that weights and config.json are of one checkpoint."
        )
    return model


def _config_of(folder: Path, name: str) -> PreTrainedConfig:
    """The config of a folder, without what would load or run something of its choice."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{name!r} has no config.json, so it is not a language model.")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError(f"it holds a {type(fields).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config.json of {name!r} is no JSON object ({error}); copy or download it again.") from error
    return _parsed(without_host_keys(fields)[0])


def _parsed(config: dict[str, Any]) -> PreTrainedConfig:
    """The config object of a `config.json`.

    Raises:
        ValueError: transformers knows no such model.
    """
    if not is_causal_lm(config):
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
        name: what the user asked for.
        folder: where its files are.
        dtype: of the weights; None for the stored one.
        weights: whether they are loaded; else the drafter has no storage and knows its options and its vocabulary.

    Raises:
        ValueError: transformers knows no such model, or the weights are not those that the config describes.
    """
    parsed = _parsed(config)
    parsed.name_or_path = name
    if not weights:
        with torch.device("meta"):
            blueprint = CausalLMDrafter(AutoModelForCausalLM.from_config(parsed, trust_remote_code=False))
        blueprint.tokenizer_folder = folder
        return blueprint
    model = whole_model(folder, name, config=parsed, dtype=dtype or "auto", local_files_only=True)
    model.name_or_path = model.config.name_or_path = name
    drafter = CausalLMDrafter(model.eval())
    drafter.tokenizer_folder = folder
    return drafter
