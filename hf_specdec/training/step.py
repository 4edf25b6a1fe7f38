"""TrainingStep: what a method must give `DrafterTrainer`, and the acceptance metrics that all methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from hf_specdec.training.features import TargetReader


@dataclass(frozen=True)
class StepOutput:
    """Result of one batch.

    Attributes:
        loss: scalar with gradient.
        correct: [batch, blocks, depth] bool, whether the drafter's likeliest token at depth 1, 2, ... was right.
        labelled: the same shape, where there was a token to be right about.
    """

    loss: Tensor
    correct: Tensor
    labelled: Tensor


class TrainingStep(ABC):
    """One training step of one drafting method. Holds the target, which it never trains.

    Attributes:
        reader: reads the target's states of a batch, or takes them from it where they were cached.
        num_updates: optimizer steps taken so far, those of a resumed run included; for losses that follow a schedule.
    """

    reader: TargetReader
    num_updates: int = 0

    @abstractmethod
    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        """Runs the drafter once on a batch.

        Args:
            model: the drafter, or what a distributed run wrapped around it; call it, not the drafter itself.
            batch: of the columns in `data.py`, on the drafter's device.
            training: random choices are allowed; without it the result depends on the batch alone.
        """

    def metrics(self, correct: Tensor, labelled: Tensor) -> dict[str, float]:
        """What logs and evaluation report of many batches, whose `correct` and `labelled` were joined."""
        return acceptance_metrics(correct, labelled)


def acceptance_metrics(correct: Tensor, labelled: Tensor) -> dict[str, float]:
    """Per-position accuracy and the mean accepted length of the greedy chain.

    Args:
        correct: [..., depth] bool, as in `StepOutput`.
        labelled: [..., depth] bool. Blocks that the end of the text cuts short count for accuracies only.

    Returns:
        `accuracy_1`, `accuracy_2`, ... per depth, and `accepted_length`: 1 (the bonus token) plus the mean number of
        leading hits of a block, which is tau of a greedy chain whose roots are spread as the anchors are.

    Example:
        >>> import torch
        >>> correct = torch.tensor([[True, False, True]])
        >>> acceptance_metrics(correct, torch.ones_like(correct))["accepted_length"]
        2.0
    """
    depth = correct.shape[-1]
    correct, labelled = correct.reshape(-1, depth) & labelled.reshape(-1, depth), labelled.reshape(-1, depth)
    hits, counts = correct.sum(0).tolist(), labelled.sum(0).tolist()
    found = {f"accuracy_{k + 1}": hits[k] / counts[k] for k in range(depth) if counts[k]}
    whole = labelled.all(-1)
    if whole.any():
        leading = correct[whole].int().cumprod(-1).sum(-1)
        found["accepted_length"] = 1 + leading.float().mean().item()
    return found
