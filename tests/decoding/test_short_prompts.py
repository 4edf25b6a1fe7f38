"""The shortest prompts: one token, also behind padding, and none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.method_table import METHODS
from tests.targets import fresh_target

PROMPTS: dict[str, dict[str, Any]] = {
    "one token": {"input_ids": torch.tensor([[5]])},
    "none": {"bos_token_id": 1},
    "two rows of one": {"input_ids": torch.tensor([[5], [9]]), "attention_mask": torch.ones(2, 1, dtype=torch.int64)},
    "one behind padding": {
        "input_ids": torch.tensor([[0, 0, 5], [7, 8, 9]]),
        "attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]]),
    },
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_drafts_after_the_shortest_prompts(method: str, prompt: str) -> None:
    target = fresh_target("llama", "sdpa")
    drafter = METHODS[method](target)
    if isinstance(drafter, nn.Module):
        drafter.to(torch.float64)
    settings: dict[str, Any] = {**PROMPTS[prompt], "max_new_tokens": 12, "do_sample": False}
    alone = target.generate(**settings)
    for _ in range(2):
        assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist()
