"""Starts training from an earlier drafter (`--start-from`), and checks that it fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.hub.card import TRAINING_FILE, read_record
from hf_specdec.hub.pretrained import PretrainedDrafter


def initialize_from(drafter: Any, folder: Path, target: PreTrainedModel) -> dict[str, Any]:
    """Copies weights, vocabulary, options and source layout of an earlier drafter to a new one; returns its record.

    Raises:
        OSError: there is no such folder.
        ValueError: the earlier drafter has another method, other tensors or shapes, or other inputs.
    """
    earlier: Any = hf_specdec.load_drafter(folder)  # reads all layouts, and the files next to the weights
    if type(earlier) is not type(drafter):
        raise ValueError(
            f"--start-from {str(folder)!r} holds a {type(earlier).__name__}, but --method trains a "
            f"{type(drafter).__name__}: give the method of that drafter, or start from a {type(drafter).__name__}."
        )
    own, given = (_shape(each, target) for each in (drafter, earlier))
    unlike = [name for name in sorted(own.keys() | given.keys()) if own.get(name) != given.get(name)]
    if unlike:
        name = unlike[0]
        raise ValueError(
            f"The drafter in --start-from {str(folder)!r} differs from the one that the options describe: {name} is "
            f"{given.get(name, 'missing')} there and {own.get(name, 'missing')} here ({len(unlike)} differences). Give "
            "the options that it was trained with, see its training.json."
        )
    _weights(drafter).load_state_dict(_weights(earlier).state_dict())
    if drafter is not _weights(drafter):
        drafter.set_vocabulary(earlier.target_ids)
    drafter.options = earlier.options
    if isinstance(earlier, PretrainedDrafter):
        drafter.source_layout = earlier.source_layout
    return {"drafter": str(folder)} | _sums(read_record(folder, TRAINING_FILE) or {})


def _sums(record: dict[str, Any]) -> dict[str, float]:
    """Minutes and rows of all trainings so far, by the names of a record; those that it does not tell are missing."""
    parts = {**record.get("time", {}), **record.get("data", {})}
    before = record.get("started_from", {})
    names = ("minutes_training", "rows_trained_on")
    return {name: parts[name] + before.get(name, 0) for name in names if name in parts}


def _weights(drafter: Any) -> PreTrainedModel:
    """The module with the drafter's weights: its language model, or the drafter itself."""
    return drafter if isinstance(drafter, PretrainedDrafter) else drafter.model


def _shape(drafter: Any, target: PreTrainedModel) -> dict[str, Any]:
    """Shapes of the tensors by name, and the config values that define the drafter's inputs."""
    model = _weights(drafter)
    shape: dict[str, Any] = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in ("block_size", "mask_token_id"):
        shape[name] = getattr(model.config, name, None)  # not every method has them
    return shape | {"target_layer_ids": list(drafter.feature_layers(target))}
