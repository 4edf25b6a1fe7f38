"""Training that goes on from an earlier drafter (`--start-from`), and what must be alike for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.drafters.card import TRAINING_FILE, read_record
from hf_specdec.drafters.causal_lm import CausalLMDrafter


def go_on_from(drafter: Any, folder: Path, target: PreTrainedModel) -> dict[str, Any]:
    """Gives a new drafter the weights of an earlier one, whose training goes on; returns what is recorded of that one.

    The earlier one's vocabulary comes with its weights, and so do the drafting options that suit it.

    Raises:
        OSError: there is no such folder.
        ValueError: it is of another method, its tensors are others than the new one's, of other shapes, or made for
            other inputs.
    """
    earlier: Any = hf_specdec.load_drafter(folder)  # which knows all layouts, and files beside the weights
    if type(earlier) is not type(drafter):
        raise ValueError(
            f"The folder {str(folder)!r} holds a {type(earlier).__name__}, but a {type(drafter).__name__} is to be "
            "trained: give its --method, or start from a drafter of the one to be trained."
        )
    own, given = (_shape(each, target) for each in (drafter, earlier))
    unlike = [name for name in sorted(own.keys() | given.keys()) if own.get(name) != given.get(name)]
    if unlike:
        name = unlike[0]
        raise ValueError(
            f"The drafter in {str(folder)!r} has another shape than the one to be trained: {name} is "
            f"{given.get(name, 'missing')} there and {own.get(name, 'missing')} here ({len(unlike)} such differences). "
            "Give the options that it was trained with, see its training.json."
        )
    _weights(drafter).load_state_dict(_weights(earlier).state_dict())
    if drafter is not _weights(drafter):
        drafter.set_vocabulary(earlier.target_ids)
    drafter.options = earlier.options
    record = read_record(folder, TRAINING_FILE) or {}
    names = ("command", "settings", "data", "losses", "started_from")  # all that led to these weights
    return {"drafter": str(folder)} | {name: record[name] for name in names if name in record}


def _weights(drafter: Any) -> PreTrainedModel:
    """What holds a drafter's weights: a language model, or the drafter itself."""
    return drafter.model if isinstance(drafter, CausalLMDrafter) else drafter


def _shape(drafter: Any, target: PreTrainedModel) -> dict[str, Any]:
    """Shapes of the tensors, by name, and what of the config tells what goes into them."""
    model = _weights(drafter)
    shape: dict[str, Any] = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in ("block_size", "mask_token_id"):
        shape[name] = getattr(model.config, name, None)  # not every method has them
    return shape | {"target_layer_ids": list(drafter.feature_layers(target))}
