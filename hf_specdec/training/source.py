"""Source: the origin of training rows, plain text that the target continues or conversations that it answers.

In both cases a drafter learns what its target writes. A source reads its input and checks it before the target writes,
then returns the rows (columns in `data.py`) and the facts about them for the drafter's record. The two sources are in
`text.py` and `conversations.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.drafting.pairing import text_mode
from hf_specdec.drafting.targets import whole_target

if TYPE_CHECKING:
    from accelerate import PartialState

HELD_OUT = 50  # every 50th document or conversation is not trained on


class Rows(Protocol):
    """Rows with the columns of `data.py`: a list, a `datasets.Dataset`, or rows cached with the target's states."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Written:
    """What the target wrote.

    Attributes:
        rows: to train on.
        held_out: rows to evaluate on.
        record: facts about the rows, for the drafter's record.
        mode: the kind of text, for the drafter's record, see `trained_mode`.
        share_ended: share of the written texts that end with an end-of-text token, from 0 to 1.
        datasets: Hub ids of the conversations' datasets, for the drafter's card.
    """

    rows: Rows
    held_out: Rows
    record: dict[str, Any]
    mode: dict[str, bool]
    share_ended: float
    datasets: Sequence[str] = ()

    def summary(self, minutes: float) -> str:
        """One or two lines to print: what was written in these minutes."""
        text = (
            f"{self.record['rows_written_by_target']} rows with {self.record['tokens_written_by_target'] / 1e3:.0f}k "
            f"tokens written by the target in {minutes:.1f} min; {self.share_ended:.0%} of them reached the end of text"
        )
        if self.share_ended == 0:
            text += "\nNo text has an end: the target probably repeats itself, and such text trains a poor drafter."
        return text


class RowSource(ABC):
    """Text or conversations for one target.

    Attributes:
        option: the command's option that gives it, without dashes.
        description: the value of that option.
        tokenizer: the target's.
        documents: token ids of the text that is known before the target writes.
    """

    option: str
    description: str
    tokenizer: PreTrainedTokenizerBase
    documents: list[list[int]]

    @property
    @abstractmethod
    def identity(self) -> list[str]:
        """Hashes of the input and its settings."""

    @abstractmethod
    def check(self, target: PreTrainedModel) -> None:
        """Raises ValueError if the source does not fit this target; called before the target writes."""

    @abstractmethod
    def write(self, target: PreTrainedModel, processes: PartialState) -> Written:
        """Lets the target write the rows that are not on disk yet."""


def opening(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The messages of a conversation up to its first user message."""
    first = next(index for index, message in enumerate(messages) if message["role"] == "user")
    return [dict(message) for message in messages[: first + 1]]


def trained_mode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> dict[str, bool]:
    """The kind of text, for the drafter's record: a prompt of another kind gets a warning.

    Args:
        tokenizer: the target's.
        documents: the training text, as it is tokenized.

    Returns:
        `chat_template`: whether most documents are in the target's chat template. If so, and if the mode of most of
        them is known, `thinking`: whether the target thinks in them. Empty if the template gives no mode.
    """
    modes = [mode for document in documents if (mode := text_mode(tokenizer, document)) is not None]
    if not modes:
        return {}
    record = {"chat_template": 2 * sum(is_chat for is_chat, _ in modes) > len(modes)}
    thinking = [thinks for _, thinks in modes if thinks is not None]
    if record["chat_template"] and 2 * len(thinking) > len(modes):
        record["thinking"] = 2 * sum(thinking) > len(thinking)
    return record


def check_width(width: int, options: str, model: PreTrainedModel) -> None:
    """Raises ValueError if texts of `width` tokens, set by `options`, exceed the model's max_position_embeddings."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and width > most:
        raise ValueError(
            f"Texts have up to {width} tokens ({options}), but {model.name_or_path!r} has max_position_embeddings "
            f"{most}: give less."
        )


def load_target(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The frozen target, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return whole_target(path, dtype=dtype).to(device).eval()
