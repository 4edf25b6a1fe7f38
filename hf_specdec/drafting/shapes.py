"""Checks of a drafter's sizes against a target; errors name both values and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.targets.modules import table_shape
from hf_specdec.drafting.registry import name_of
from hf_specdec.drafting.vocabulary import check_draft_to_target, may_be_padding


def check_shapes(
    drafter: Any,
    model: PreTrainedModel,
    *,
    hidden_size: int | None = None,
    embedding_size: int | None = None,
    vocab_size: int | None = None,
    num_layers: int | None = None,
    layers: Sequence[int] = (),
    first_layer: int = 0,
    d2t: Tensor | None = None,
    may_exceed: bool = False,
) -> None:
    """Compares the sizes that a drafter was trained for with a target's; None is not compared.

    Args:
        drafter: for messages, and for `config.target_name_or_path`, None if unknown.
        model: the target.
        hidden_size: of the target's hidden states.
        embedding_size: of token embeddings that the drafter shares.
        vocab_size: number of token embeddings; the target may have more, by padding and added tokens.
        num_layers: of the target.
        layers: target layers whose outputs the drafter reads.
        first_layer: the lowest one that can be read.
        d2t: the map of a draft vocabulary, see `vocabulary.py`; its tokens must be among those of both.
        may_exceed: whether `vocab_size` may also be larger: for drafters that never draft tokens beyond the target's,
            see `TargetVocabularyLogitsProcessor`.

    Raises:
        ValueError: one of them differs, or a layer or a token does not exist.
    """
    target, (rows, width) = model.config.get_text_config(decoder=True), table_shape(model)
    target_name, depth = name_of(model), target.num_hidden_layers
    outside = [layer for layer in layers if not first_layer <= layer < depth]
    problem = None
    if hidden_size not in (None, target.hidden_size):
        problem = (
            f"reads target hidden states of size {hidden_size}, but target {target_name!r} has hidden_size "
            f"{target.hidden_size}"
        )
    elif embedding_size not in (None, width):
        problem = (
            f"shares token embeddings of size {embedding_size}, but those of target {target_name!r} have size {width}"
        )
    elif num_layers not in (None, depth):
        problem = f"was trained for a target of {num_layers} layers, but target {target_name!r} has {depth}"
    elif outside:
        problem = (
            f"reads target layers {list(layers)}, but {outside} are not among the layers 0 to {depth - 1} of target "
            f"{target_name!r}"
        )
    elif vocab_size is not None and not may_be_padding(vocab_size, rows):
        problem = (
            f"was trained for a vocabulary of {vocab_size}, but target {target_name!r} has "
            f"{rows} embeddings, which is more than padding or added tokens explain"
        )
    elif vocab_size is not None and vocab_size > rows and not may_exceed:
        problem = (
            f"has a vocabulary of {vocab_size}, but target {target_name!r} has {rows} embeddings: it would draft "
            "tokens that the target does not have"
        )
    if problem is not None:
        raise ValueError(f"Drafter {name_of(drafter)!r} {problem}. {way_out(drafter)}")
    if d2t is not None:
        check_draft_to_target(d2t, min(vocab_size or rows, rows), name_of(drafter))


def way_out(drafter: Any) -> str:
    """The way out for a drafter and a target that do not fit."""
    trained_for = drafter.config.target_name_or_path
    choice = f"use {trained_for!r} as target, or another drafter" if trained_for else "choose one trained for this one"
    return f"A drafter fits only the target it was trained for: {choice}."
