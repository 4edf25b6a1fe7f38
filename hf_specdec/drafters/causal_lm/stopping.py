"""When drafting ends early: by confidence, and by entropy as in AdaEDL."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StoppingRule:
    """Decides from the tokens drafted so far whether a path is extended.

    Attributes:
        min_confidence: stops after a node whose path has a lower probability under the draft model; None for never.
        min_acceptance: stops after tokens for which `acceptance_bound` is lower; None for never. AdaEDL's threshold.
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
        """Log of `min_confidence`, nats; minus infinity for None."""
        return math.log(self.min_confidence) if self.min_confidence else -math.inf

    def continues(self, log_path: Tensor, log_probs: Tensor) -> Tensor:
        """[batch] bool: whether to extend paths, from log-probabilities of paths [batch] and tokens [batch, vocab]."""
        return (log_path >= self.least_log_path) & self.certain(log_probs)

    def certain(self, log_probs: Tensor) -> Tensor:
        """[..., vocab] -> [...] bool: whether tokens from these distributions are likely enough to be accepted."""
        if self.min_acceptance is None:
            return torch.ones(log_probs.shape[:-1], dtype=torch.bool, device=log_probs.device)
        return acceptance_bound(log_probs, self.entropy_weight) >= self.min_acceptance


def acceptance_bound(log_probs: Tensor, entropy_weight: float) -> Tensor:
    """A lower bound of a token's acceptance probability, from its draft distribution's entropy H: 1 - sqrt(weight H).

    AdaEDL (arXiv 2410.18351). The bound holds for targets that are close enough to the drafter, which the weight
    expresses.

    Args:
        log_probs: [..., vocab] float32, nats.
        entropy_weight: a larger weight assumes less agreement.

    Returns:
        [...] float32, at most 1; may be negative.

    Example:
        >>> acceptance_bound(torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]).log(), 0.2)
        tensor([0.4734, 1.0000])
    """
    terms = (log_probs.exp() * log_probs).nan_to_num(nan=0.0)  # 0 log 0 is 0
    return 1 - (-entropy_weight * terms.sum(-1)).clamp(min=0).sqrt()
