"""MuonWithAdamW: the optimizer that trains small drafters in the fewest steps here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for embeddings, norms and biases, under one learning-rate schedule.

    Args:
        model: all its parameters that want gradients are trained.
        learning_rate: of both parts; Muon's steps are scaled to match the size of AdamW's.
    """

    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                (matrices if parameter.ndim == 2 and "embed_tokens" not in name else others).append(parameter)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        ]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0))
        super().__init__(self._groups_of_parts(), {})
        # The schedule writes into these groups, so they must be the very dictionaries the parts read.
        self.param_groups = self._groups_of_parts()

    def _groups_of_parts(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("MuonWithAdamW takes no closure: run forward and backward before calling step().")
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = self._groups_of_parts()
