"""The draft vocabulary: the tokens that a drafter can draft, the most frequent ones in the target's text.

A head over the whole vocabulary is most of the cost of a small drafter. Source: FR-Spec, as used by SpecBlock (Section
4.1) and EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.decoding.targets.taps import decoder_of
from hf_specdec.training.source import Rows

DRAFT_VOCAB_SIZE = 32000  # of published drafters that have a draft vocabulary
VOCABULARY_HELP = "number of most frequent tokens that the drafter can draft; default: all"  # of --draft-vocab-size


def checked_vocabulary_size(size: int | None, target: PreTrainedModel, most: int | None = None) -> int | None:
    """The size of the draft vocabulary; None for the whole vocabulary.

    Args:
        size: the value of --draft-vocab-size, if given.
        target: the model to draft for.
        most: upper bound of the default size; None for no bound.

    Raises:
        ValueError: `size` is more than the target's vocabulary.
    """
    rows = num_tokens(target)
    if size is not None and size > rows:
        raise ValueError(
            f"--draft-vocab-size {size} is more than the {rows} tokens of target {target.name_or_path!r}: give less, "
            "or leave it out for all."
        )
    size = min(rows, most or rows) if size is None else size
    return None if size == rows else size


def draft_ids(token_ids: Tensor, target_ids: Tensor) -> Tensor:
    """The draft ids of target ids, any shape; -1 for tokens outside the draft vocabulary, and for -1.

    Args:
        token_ids: int64.
        target_ids: [draft_vocab] int64, ascending.
    """
    found = torch.searchsorted(target_ids, token_ids.contiguous()).clamp(max=len(target_ids) - 1)
    return found.where(target_ids[found] == token_ids, -1)


@torch.no_grad()
def copy_head(goal: Tensor, target: PreTrainedModel, target_ids: Tensor | None) -> None:
    """Copies rows of the target's head to a head over a draft vocabulary; None for all of them."""
    rows: Tensor = target.get_output_embeddings().weight
    goal.copy_(rows if target_ids is None else rows[target_ids.to(rows.device)])


@torch.no_grad()
def copy_final_norm(goal: Tensor, target: PreTrainedModel) -> None:
    """Copies the weight of the target's final norm to `goal`, if the target has one of this name and shape."""
    weight = getattr(getattr(decoder_of(target)[0], "norm", None), "weight", None)
    if isinstance(weight, Tensor) and weight.shape == goal.shape:
        goal.copy_(weight)


def choose_vocabulary(rows: Rows, size: int, target: PreTrainedModel) -> Tensor:
    """[size] int64: `frequent_tokens` of the rows; prints the share of the text that they cover."""
    vocab_size = num_tokens(target)
    vocabulary, coverage = frequent_tokens(rows, size, vocab_size)
    print(f"draft vocabulary: {size} of {vocab_size} tokens, {coverage:.2%} of what the target wrote", flush=True)
    return vocabulary


def frequent_tokens(rows: Iterable[Mapping[str, Any]], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The most frequent tokens of what the target wrote.

    Args:
        rows: with the columns of `data.py`; prompts and padding are not counted.
        size: number of tokens to choose.
        vocab_size: of the target. If too few ids occur, the lowest ids that do not occur are added.

    Returns:
        ids [size] int64, ascending, and the share of the text's tokens that they cover, from 0 to 1.

    Raises:
        ValueError: `size` is not between 1 and `vocab_size`.

    Examples:
        >>> frequent_tokens([{"input_ids": [7, 5, 5, 2, 8, 0], "first_anchor": 1, "length": 5}], 2, 10)
        (tensor([2, 5]), 0.75)
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"A draft vocabulary of {size} tokens cannot be chosen from {vocab_size}; choose 1 to {vocab_size}."
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        written = torch.as_tensor(row["input_ids"])[int(row["first_anchor"]) : int(row["length"])]
        counts += torch.bincount(written, minlength=vocab_size)
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum().clamp(min=1))
