"""Loads a causal language model as a drafter. `hub/loading.py` finds its files and checks that they are complete."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_specdec.drafters.causal_lm.drafter import CausalLMDrafter
from hf_specdec.drafters.pretrained import check_numbers, loading_differences


def is_causal_lm(config: dict[str, Any]) -> bool:
    """Whether a `config.json` is of a model that AutoModelForCausalLM would build.

    The configs of several other kinds of drafters pass this check too: recognise those first.
    """
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    names = (known,) if isinstance(known, str) else known or ()
    return any(name in names for name in config.get("architectures") or ())


def whole_model(source: Path, name: str, **settings: Any) -> PreTrainedModel:
    """A language model with all weights from its files.

    Args:
        source: its folder.
        name: of the model, for messages.
        settings: for `from_pretrained`.

    Raises:
        OSError: as `from_pretrained`.
        ValueError: the weights differ from those that the config describes, or contain NaN; names them.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        source,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # transformers then reports the shapes instead of raising; all are raised below
        **settings,
    )
    if differences := loading_differences(info):
        raise ValueError(
            f"The weights of {name!r} are not those of the {type(model).__name__} that its config.json describes: "
            f"{differences}. Nothing was loaded: check that weights and config.json are of one checkpoint."
        )
    check_numbers(model, name)
    return model


def whole_target(name: str, **settings: Any) -> PreTrainedModel:
    """A target with all its weights; transformers initialises missing ones randomly, with only a warning.

    Args:
        name: a folder or a Hub id.
        settings: for `from_pretrained`.

    Raises:
        OSError: as `from_pretrained`.
        ValueError: as `from_pretrained`; or files are damaged; or weights are missing or of another shape, names them.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    except (SafetensorError, pickle.UnpicklingError, EOFError, RecursionError) as error:
        raise ValueError(
            f"The files of target {name!r} are damaged ({type(error).__name__}: {error}): copy or download them again."
        ) from error
    lacking = {kind: info[kind] for kind in ("missing_keys", "mismatched_keys")}
    if differences := loading_differences(lacking | {"unexpected_keys": ()}):
        raise ValueError(
            f"The files of {name!r} do not hold all weights of the {type(model).__name__} that its config.json "
            f"describes. {differences[0].upper()}{differences[1:]}. Check that it is a complete language model and not "
            "a drafter; copy or download it again."
        )
    return model


def _parsed(config: dict[str, Any]) -> PreTrainedConfig:
    """The config object of a `config.json`.

    Raises:
        ValueError: transformers has no such model.
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
        name: what the user has passed.
        folder: of its files.
        dtype: of the weights; None for the stored one.
        weights: whether to load them; if not, the drafter is on the meta device, with its options and vocabulary.

    Raises:
        ValueError: transformers has no such model, or the weights differ from those that the config describes.
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
