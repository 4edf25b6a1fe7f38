"""Loads a target and checks that its files hold all of it."""

from __future__ import annotations

import pickle
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec.drafting.pretrained import loading_differences


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
