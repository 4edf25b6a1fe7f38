"""When drafting on is not worth another forward of the draft model: by confidence, and by entropy as in AdaEDL."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StoppingRule:
    """Decides, from what is drafted already, whether a path is drafted further.

    Attributes:
        min_confidence: stops behind a node whose path has a lower probability under the draft model; None for never.
        min_acceptance: stops behind tokens for which `acceptance_bound` is lower; None for never. AdaEDL's threshold.
        entropy_weight: in that bound.
    """

    min_confidence: float | None = None
    min_acceptance: float | None = None
    entropy_weight: float = 0.2

    @property
    def in_use(self) -> bool:
        """Whether any path may stop early."""
        return self.min_confidence is not None or self.min_acceptance is not None

    @property
    def least_log_path(self) -> float:
        """Log of `min_confidence`, nats; minus infinity where there is none."""
        return math.log(self.min_confidence) if self.min_confidence else -math.inf

    def goes_on(self, log_path: Tensor, log_probs: Tensor) -> Tensor:
        """[batch] bool: whether to draft on, from log-probabilities of paths [batch] and laws [batch, vocab]."""
        return (log_path >= self.least_log_path) & self.certain(log_probs)

    def certain(self, log_probs: Tensor) -> Tensor:
        """[..., vocab] -> [...] bool: whether tokens of these laws are likely enough to be accepted."""
        if self.min_acceptance is None:
            return torch.ones(log_probs.shape[:-1], dtype=torch.bool, device=log_probs.device)
        return acceptance_bound(log_probs, self.entropy_weight) >= self.min_acceptance


def acceptance_bound(log_probs: Tensor, entropy_weight: float) -> Tensor:
    """A lower bound of the chance that a token drafted from a law is accepted, from its entropy H: 1 - sqrt(weight H).

    AdaEDL (arXiv 2410.18351); the bound holds for targets that are close enough to the drafter, for which the
    weight stands.

    Args:
        log_probs: [..., vocab] float32, nats.
        entropy_weight: larger ones trust the draft model less.

    Returns:
        [...] float32, at most 1; may be negative.

    Example:
        >>> acceptance_bound(torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]).log(), 0.2)
        tensor([0.4734, 1.0000])
    """
    terms = (log_probs.exp() * log_probs).nan_to_num(nan=0.0)  # 0 log 0 is 0
    return 1 - (-entropy_weight * terms.sum(-1)).clamp(min=0).sqrt()
