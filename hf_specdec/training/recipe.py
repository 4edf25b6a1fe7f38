"""Recipe: what a method adds to the training command, `command.py`: its options, its new drafter and its step.

A method registers its recipe at the foot of its module under `training/`; the command knows none by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_specdec.drafters.publishing import PublishedDrafter
from hf_specdec.drafters.registry import unknown_name
from hf_specdec.training.option_types import positive_int
from hf_specdec.training.step import AdaptiveStep, TrainingStep


class Rows(Protocol):
    """Rows with the columns in `data.py`, whether in a list, a `datasets.Dataset` or cached with their states."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Recipe:
    """How to train drafters of one method.

    Attributes:
        name: of the method.
        add_arguments: adds the method's options to the command, names of the shared ones excluded.
        prepare: from the parsed options, the target, its tokenizer and the tokenized documents to train on, makes an
            untrained drafter and its step. It runs before any row is written, and raises ValueError for all that does
            not fit.
        recorded: names of the options that the drafter's record keeps beside the shared ones.
        eval_batch_size: rows per evaluation batch; None takes the training batch size.
        adapting: makes the step with which a drafter learns while it serves, from the drafter and its target; None
            where the method has none.
        read_rows: from the parsed options, the drafter, the target and the training rows, sets what only these tell,
            such as the tokens of a draft vocabulary; not asked where training goes on from an earlier drafter.
        finish: from the trained drafter, the target and held-out rows, sets what is measured rather than trained; the
            drafter is saved afterwards.
        as_drafter: from the trained model, the drafter that is saved; None where the model is one.
    """

    name: str
    add_arguments: Callable[[argparse._ArgumentGroup], None]
    prepare: Callable[
        [argparse.Namespace, PreTrainedModel, PreTrainedTokenizerBase, Sequence[Sequence[int]]],
        tuple[PreTrainedModel, TrainingStep],
    ]
    recorded: tuple[str, ...] = ()
    eval_batch_size: int | None = None
    adapting: Callable[[Any, PreTrainedModel], AdaptiveStep] | None = None
    read_rows: Callable[[argparse.Namespace, Any, PreTrainedModel, Rows], None] | None = None
    finish: Callable[[Any, PreTrainedModel, Rows], None] | None = None
    as_drafter: Callable[[Any], PublishedDrafter] | None = None


RECIPES: dict[str, Recipe] = {}


def register_recipe(recipe: Recipe) -> None:
    """Makes a method known to the training command.

    Raises:
        ValueError: another recipe has this name.
    """
    if RECIPES.setdefault(recipe.name, recipe) is not recipe:
        raise ValueError(f"A training recipe {recipe.name!r} is registered already; choose another name.")


def recipe_of(name: str) -> Recipe:
    """The recipe of a method; an unknown name is answered with the nearest one and the list."""
    if name not in RECIPES:
        raise unknown_name("method to train", name, RECIPES)
    return RECIPES[name]


def decoder_shape(target: PreTrainedModel, intermediate_size: int | None) -> dict[str, Any]:
    """Fields of a drafter's config that make its decoder layers like the target's, as far as drafters can be like it.

    Targets that do without attention, or without rotary positions, get drafters with the usual ones.

    Args:
        target: the model to draft for.
        intermediate_size: of the MLPs; None for the target's.
    """
    config = target.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None) or max(1, config.hidden_size // 64)
    if intermediate_size is None:
        intermediate_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return {
        "vocab_size": target.get_input_embeddings().num_embeddings,
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
    """The target's rotary settings, of its layers with full attention, where drafters can have them.

    Where a target turns a part of each head alone, drafters turn whole heads by the same base, as published ones do.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    known = parameters.get("rope_type", "default") in ROPE_INIT_FUNCTIONS.keys() | {"default"}
    if known and parameters.get("partial_rotary_factor", 1) == 1 and "rope_theta" in parameters:
        return dict(parameters)
    return {"rope_type": "default", "rope_theta": parameters.get("rope_theta", 10000.0)}


def add_shape_arguments(group: argparse._ArgumentGroup) -> None:
    """The options of drafters that are a stack of decoder layers over tapped states of the target."""
    group.add_argument("--layers", type=positive_int, default=2)
    group.add_argument("--taps", type=int, nargs="+", help="target layers to read; default: evenly spaced ones")
    group.add_argument("--intermediate-size", type=positive_int, help="default: the target's")
