"""Source: where training rows come from, plain text that the target continues or conversations that it answers.

Either way a drafter learns what its target writes. A source reads and checks all that can be known before the target
writes, then gives the rows (columns in `data.py`) and says what a drafter's record keeps of them. The two are in
`text.py` and `conversations.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.drafters.causal_lm.loading import whole_target
from hf_specdec.drafters.pairing import text_mode
from hf_specdec.training.recipe import Rows

HELD_OUT = 50  # every 50th document or conversation is not trained on


@dataclass(frozen=True)
class Written:
    """What the target wrote.

    Attributes:
        rows: to train on.
        held_out: rows to evaluate on.
        record: facts about the rows, for the drafter's record.
        mode: what the record says of the kind of text, see `trained_mode`.
        share_ended: of the written texts those that reached their end, from 0 to 1.
        datasets: Hub ids of the conversations' datasets, for the drafter's card.
    """

    rows: Rows
    held_out: Rows
    record: dict[str, Any]
    mode: dict[str, bool]
    share_ended: float
    datasets: Sequence[str] = ()

    def summary(self, minutes: float) -> str:
        """What was written in these minutes, in a line or two."""
        said = (
            f"{self.record['rows_written_by_target']} rows with {self.record['tokens_written_by_target'] / 1e3:.0f}k "
            f"tokens written by the target in {minutes:.1f} min; {self.share_ended:.0%} of them reached the end of text"
        )
        if self.share_ended == 0:
            said += "\nA target that never ends a text loops, and a drafter trained on loops is good at nothing else."
        return said


class Source(ABC):
    """Text or conversations for one target.

    Attributes:
        option: the command's option that names it, without dashes.
        description: what was given there.
        documents: token ids of the text that is known before the target writes.
    """

    option: str
    description: str
    documents: list[list[int]]

    @property
    @abstractmethod
    def identity(self) -> list[str]:
        """Hashes that tell these rows from others."""

    @abstractmethod
    def check(self, target: PreTrainedModel) -> None:
        """Raises ValueError for what cannot work with this target, before it writes."""

    @abstractmethod
    def write(self, target: PreTrainedModel, processes: PartialState) -> Written:
        """Lets the target write what is not there yet."""


def trained_mode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> dict[str, bool]:
    """What the record says of the kind of text, for the warning that a prompt of another kind gets.

    Args:
        tokenizer: the target's.
        documents: the training text, as it is tokenized.

    Returns:
        `chat_template`: whether most documents are in the target's chat template. With it, where most of them tell,
        `thinking`: whether the target answers them with thinking. Nothing where the template cannot be asked.
    """
    modes = [text_mode(tokenizer, document) for document in documents]
    asked = [mode for mode in modes if mode is not None]
    if not asked:
        return {}
    record = {"chat_template": 2 * sum(is_chat for is_chat, _ in asked) > len(asked)}
    thinking = [thinks for _, thinks in asked if thinks is not None]
    if record["chat_template"] and 2 * len(thinking) > len(asked):
        record["thinking"] = 2 * sum(thinking) > len(thinking)
    return record


def check_width(width: int, options: str, model: PreTrainedModel) -> None:
    """Raises ValueError if texts of `width` tokens, which `options` set, are longer than the model's positions."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and width > most:
        raise ValueError(
            f"Texts have up to {width} tokens, {options}, but {model.name_or_path!r} has max_position_embeddings "
            f"{most}. Give less."
        )


def load_target(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The frozen target, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return whole_target(path, dtype=dtype).to(device).eval()
