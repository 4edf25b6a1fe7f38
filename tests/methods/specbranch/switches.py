"""Draft models that a test can count, delay and break from outside, while they run in a thread."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from transformers import PreTrainedModel


class Switches:
    """What happens before forwards; a module's hook that can be pickled."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.random = random.Random(0)

    def __call__(self, model: Any, _: Any) -> None:
        time.sleep(self.random.random() * self.delay_s)
        model.forwards += 1
        if int(model.forwards) == int(model.fails_at) + 1:
            broken_on_purpose()


def broken_on_purpose() -> None:
    raise ArithmeticError("the draft model stumbled")


def add_switches(model: PreTrainedModel, delay_s: float = 0.0) -> None:
    """Lets `model.forwards` count, and `model.fails_at` name a forward by its number."""
    model.register_buffer("forwards", torch.tensor(0), persistent=False)
    model.register_buffer("fails_at", torch.tensor(-1), persistent=False)
    model.register_forward_pre_hook(Switches(delay_s))
