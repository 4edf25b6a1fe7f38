"""Training rows: text that the target wrote itself, plain text, and mixtures of both.

A row is a sequence of tokens with three columns: `input_ids`, which may be padded at the end; `first_anchor`, the
first position at which a block may start, which excludes the prompt; and `length`, the tokens before the padding.
Drafters learn most from the target's own continuations, because these are what they have to predict.
The target's states of these rows are in `features.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_specdec.version import install_command

if TYPE_CHECKING:
    import datasets


def datasets_package() -> Any:
    """The package `datasets`, or an ImportError that names the extra to install."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"Training rows need the package datasets, which is not installed: {install_command('train')}. "
            "Drafting and generation work without it."
        ) from error
    return datasets


def pack_text(documents: Iterable[Sequence[int]], length: int, *, separator_id: int | None = None) -> datasets.Dataset:
    """Concatenates tokenized documents and splits them into rows of `length` tokens; drops an incomplete last row.

    Args:
        documents: token ids of each document.
        length: tokens per row.
        separator_id: inserted before each document; None for nothing.

    Raises:
        ValueError: the documents have fewer tokens than one row.
    """
    stream: list[int] = []
    for document in documents:
        stream += ([] if separator_id is None else [separator_id]) + list(document)
    count = len(stream) // length
    if count == 0:
        raise ValueError(f"The documents have {len(stream)} tokens, less than one row of {length}.")
    rows = [stream[index * length : (index + 1) * length] for index in range(count)]
    return datasets_package().Dataset.from_dict(
        {"input_ids": rows, "first_anchor": [1] * count, "length": [length] * count}
    )


def mix(own: datasets.Dataset, plain: datasets.Dataset, plain_share: float) -> datasets.Dataset:
    """All rows of `own` and as many of `plain` as give them `plain_share` of the mixture, shuffled.

    Raises:
        ValueError: the share is not in [0, 1), or `plain` has too few rows.
    """
    wanted = plain_rows(len(own), len(plain), plain_share)
    if wanted == 0:
        return own.shuffle(seed=0)
    chosen = plain.shuffle(seed=0).select(range(wanted))
    return datasets_package().concatenate_datasets([own, chosen]).shuffle(seed=0)


def plain_rows(num_own: int, num_plain: int, plain_share: float) -> int:
    """How many of `num_plain` rows of plain text give `plain_share` of a mixture with `num_own` written rows.

    Raises:
        ValueError: the share is not in [0, 1), or needs more than `num_plain` rows.
    """
    if not 0 <= plain_share < 1:
        raise ValueError(f"plain_share={plain_share} must be at least 0 and less than 1.")
    wanted = round(num_own * plain_share / (1 - plain_share))
    if wanted > num_plain:
        raise ValueError(
            f"plain_share={plain_share} of a mixture with {num_own} written rows needs {wanted} rows of plain text, "
            f"but there are {num_plain}: give more text, a smaller share or fewer rows to write."
        )
    return wanted


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stacks rows, with or without cached states, into a batch; shorter ones get zeros at the end."""
    columns = {key: [torch.as_tensor(row[key]) for row in rows] for key in rows[0]}
    return {
        key: torch.stack(column) if column[0].ndim == 0 else nn.utils.rnn.pad_sequence(column, batch_first=True)
        for key, column in columns.items()
    }


def check_documents(documents: Sequence[Sequence[int]], shortest: int) -> None:
    """Raises ValueError if no document is longer than `shortest` tokens, the shortest prompt.

    Some prompts must be shorter than their documents.
    """
    if not any(len(document) > shortest for document in documents):
        raise ValueError(
            f"None of {len(documents)} documents has more than {shortest} tokens, the length of the shortest prompt: "
            "give longer documents, or lower prompt_lengths."
        )


def documents_hash(documents: Sequence[Sequence[int]]) -> str:
    """A hash of tokenized documents."""
    return hashlib.sha256(json.dumps([list(map(int, d)) for d in documents]).encode()).hexdigest()
