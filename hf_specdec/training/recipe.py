"""Recipe: what a method adds to the training command in `command.py`: its options, its new drafter and its step.

A method registers its recipe at the foot of its own file; the command names no method. Importing this needs torch and
transformers only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.hf_argparser import HfArg
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.drafting.registry import runs_again, unknown_name
from hf_specdec.training.options import Count, TrainOptions
from hf_specdec.training.source import Rows, RowSource
from hf_specdec.training.step import AdaptiveStep, TrainingStep

Options = TypeVar("Options", bound=TrainOptions)


@dataclass(frozen=True)
class Recipe(Generic[Options]):
    """How to train drafters of one method.

    Attributes:
        name: of the method.
        options: the dataclass of the method's options, those of `TrainOptions` included.
        prepare: makes an untrained drafter and its step from the options, the target and the source of the
            rows. It is called before any row is written, and raises ValueError if something does not fit.
        eval_batch_size: rows per evaluation batch; None for the training batch size.
        adapting: makes the step that trains a drafter while it serves, from the drafter and its target; None if the
            method has no such step.
        further: makes the step that trains an existing drafter on recorded rows, from the drafter and its target; None
            if the method has no such step. See `hf_specdec/adaptation/aurora.py`.
        read_rows: sets what depends on the training rows, such as the tokens of a draft vocabulary, from the
            options, the drafter, the target and the rows. Not called with --start-from.
        finish: sets what is measured and not trained, from the trained drafter, the target and the held-out rows. It
            is called before the drafter is saved.
        as_drafter: makes the drafter to save from the trained model; None if the model is the drafter.
    """

    name: str
    options: type[Options]
    prepare: Callable[[Options, PreTrainedModel, RowSource], tuple[PreTrainedModel, TrainingStep]]
    eval_batch_size: int | None = None
    adapting: Callable[[Any, PreTrainedModel], AdaptiveStep] | None = None
    further: Callable[[Any, PreTrainedModel], TrainingStep] | None = None
    read_rows: Callable[[Options, Any, PreTrainedModel, Rows], None] | None = None
    finish: Callable[[Any, PreTrainedModel, Rows], None] | None = None
    as_drafter: Callable[[Any], Any] | None = None


RECIPES: dict[str, Recipe[Any]] = {}


def register_recipe(recipe: Recipe[Any]) -> None:
    """Adds a method to the training command.

    Raises:
        ValueError: another recipe has this name.
    """
    known = RECIPES.setdefault(recipe.name, recipe)
    if runs_again(known.prepare, recipe.prepare):
        RECIPES[recipe.name] = recipe
    else:
        raise ValueError(f"A training recipe {recipe.name!r} is registered already; choose another name.")


def recipe_of(name: str) -> Recipe[Any]:
    """The recipe of a method.

    Raises:
        ValueError: the name is unknown; gives the nearest name and the list.
    """
    if name not in RECIPES:
        raise unknown_name("method to train", name, RECIPES)
    return RECIPES[name]


def decoder_shape(target: PreTrainedModel, intermediate_size: int | None) -> dict[str, Any]:
    """Config fields that give a drafter's decoder layers the target's shape, as far as drafters support it.

    Drafters for targets without attention or without rotary positions have common defaults there.

    Args:
        target: the model to draft for.
        intermediate_size: of the MLPs; None for the target's.
    """
    config = target.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None) or max(1, config.hidden_size // 64)
    if intermediate_size is None:
        intermediate_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return {
        "vocab_size": num_tokens(target),
        "target_name_or_path": target.name_or_path or None,
        "hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 32768,
        "rope_parameters": _rope_parameters(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
    }


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """The rotary settings of the target's full-attention layers, if drafters support them.

    For a target with a partial rotary factor, drafters rotate whole heads with the same base, as published ones do.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    known = parameters.get("rope_type", "default") in ROPE_INIT_FUNCTIONS.keys() | {"default"}
    if known and parameters.get("partial_rotary_factor", 1) == 1 and "rope_theta" in parameters:
        return dict(parameters)
    return {"rope_type": "default", "rope_theta": parameters.get("rope_theta", 10000.0)}


@dataclass(kw_only=True)
class ShapeOptions(TrainOptions):
    """Options of drafters that are decoder layers over tapped states of the target."""

    taps: list[int] | None = HfArg(default=None, help="target layers to read; default: the choice of the method")
    intermediate_size: Count | None = HfArg(default=None, help="of the MLPs; default: the target's")
