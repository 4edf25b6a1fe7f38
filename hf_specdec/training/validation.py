"""Validation by rounds: how many tokens a drafter in training would bring, measured in real calls.

Losses and accuracies are taken on the target's own text, at every position. In use, rounds begin where the drafter was
last refused, and its drafts continue its own tokens. `--validate` therefore lets the target answer a few conversations
with the drafter after each evaluation; they should be of another origin than the training text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.chat_template import render
from hf_specdec.drafting.drafter import always_drafting
from hf_specdec.training.conversation_answers import check_template, read_conversations
from hf_specdec.training.source import opening

NEW_TOKENS = 48


class ValidationRounds:
    """Greedy answers of the target to conversations, with a drafter as it is at a moment of its training.

    Args:
        prompts: token ids of each, as the target reads it.
        target: answers; the drafter is converted to its dtype, as it will be published.
        as_drafter: makes the drafter from a copy of the trained model; None if the model is the drafter.
    """

    def __init__(
        self, prompts: Sequence[list[int]], target: PreTrainedModel, as_drafter: Callable[[Any], Any] | None
    ) -> None:
        self.prompts, self.target, self.as_drafter = prompts, target, as_drafter

    def counts(self, model: PreTrainedModel, worker: tuple[int, int] = (0, 1)) -> Tensor:
        """Accepted tokens and rounds, [2] int64, of the prompts of one of several processes.

        Args:
            model: the trained model; it stays as it is.
            worker: number of this process, and how many there are.
        """
        drafter: Any = copy.deepcopy(model).to(self.target.dtype).eval()
        if self.as_drafter is not None:
            drafter = self.as_drafter(drafter)
        index, processes = worker
        total = torch.zeros(2, dtype=torch.int64)
        with always_drafting():
            for ids in self.prompts[index::processes]:
                inputs = torch.tensor([ids], device=self.target.device)
                self.target.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    assistant_model=drafter,
                    do_sample=False,
                    max_new_tokens=NEW_TOKENS,
                )
                total += torch.tensor([drafter.stats.num_accepted_draft_tokens, drafter.stats.num_spec_steps])
        return total


def validation_prompts(source: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of the first turn of each conversation, up to where the target answers.

    Args:
        source: as for `--data`.
        tokenizer: the target's.

    Raises:
        OSError: the source cannot be read.
        ValueError: an entry is not a conversation, which is named, or the tokenizer has no chat template.
    """
    check_template(tokenizer, f"Leave --validate {source!r} out.")
    texts = [render(opening(conversation.messages), tokenizer) for conversation in read_conversations(source)]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
