"""MuonWithAdamW: of the optimizers that we tried, it trains small drafters in the fewest steps.

torch.optim.Muon is not used because its iteration is always in bfloat16: on a CPU without bfloat16 instructions that
takes more than 95% of a step.
Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), kellerjordan.github.io; the
size of a step as in Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95  # weight of the earlier gradients in Nesterov's momentum
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of X, (X X^T) X and (X X^T)^2 X


class Muon(torch.optim.Optimizer):
    """Momentum with an approximately orthogonalized update.

    Args:
        parameters: matrices.
        learning_rate: updates are scaled to the root mean square of AdamW's.
        dtype: of the iteration.
        weight_decay: decoupled, as in AdamW.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        learning_rate: float,
        *,
        dtype: torch.dtype = torch.bfloat16,
        weight_decay: float = 0.05,
    ) -> None:
        super().__init__(parameters, {"lr": learning_rate, "momentum": MOMENTUM, "weight_decay": weight_decay})
        self.dtype = dtype  # not saved in checkpoints: a run may be resumed on another device

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("Muon takes no closure: run forward and backward before calling step().")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                mean = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalized(parameter.grad.lerp(mean, group["momentum"]), self.dtype)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(max(parameter.shape)))


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximately U V^T of the singular value decomposition U S V^T: singular values between 0.7 and 1.2, not 1.

    Five Newton-Schulz iterations, whose coefficients increase small singular values quickly.

    Args:
        matrix: [rows, columns].
        dtype: of the computation.

    Returns:
        [rows, columns] `dtype`.

    Examples:
        >>> orthogonalized(torch.diag(torch.tensor([1.0, 0.5])), torch.float32).round()
        tensor([[1., 0.],
                [0., 1.]])
    """
    wide = matrix.to(dtype)
    if matrix.shape[0] > matrix.shape[1]:
        wide = wide.T  # gives the smaller product with its transpose
    wide = wide / wide.norm().clamp(min=1e-7)
    of_matrix, of_third, of_fifth = NEWTON_SCHULZ
    for _ in range(5):
        product = wide @ wide.T
        wide = torch.addmm(
            wide, torch.addmm(product, product, product, beta=of_third, alpha=of_fifth), wide, beta=of_matrix
        )
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for embeddings, norms and biases, under one learning-rate schedule.

    Args:
        model: all its parameters with `requires_grad` are trained.
        learning_rate: of both parts; Muon's steps are scaled to the size of AdamW's.
        dtype: of Muon's iteration; should be fast on the device, see `number_type.py`.
    """

    def __init__(self, model: torch.nn.Module, learning_rate: float, *, dtype: torch.dtype = torch.bfloat16) -> None:
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                (matrices if parameter.ndim == 2 and "embed_tokens" not in name else others).append(parameter)
        self.parts: list[torch.optim.Optimizer] = [Muon(matrices, learning_rate, dtype=dtype)]
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0))
        super().__init__(self._groups_of_parts(), {})
        # The learning-rate scheduler writes into these groups: they must be the same dictionaries as the parts'.
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
