"""TrainingStep: what a method must give `DrafterTrainer`, and the acceptance metrics that all methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_specdec.training.features import TargetReader


@dataclass(frozen=True)
class StepOutput:
    """Result of one batch.

    Attributes:
        loss: scalar with gradient.
        correct: [batch, blocks, depth] bool, whether the drafter's likeliest token at depth 1, 2, ... was right.
        labelled: the same shape, where there was a token to be right about.
        logits: [positions, draft_vocab] of the positions that count, or None unless `TrainingStep.keep_logits`.
    """

    loss: Tensor
    correct: Tensor
    labelled: Tensor
    logits: Tensor | None = None


class TrainingStep(ABC):
    """One training step of one drafting method. Holds the target, which it never trains.

    Attributes:
        reader: reads the target's states of a batch, or takes them from it where they were cached.
        num_updates: optimizer steps taken so far, those of a resumed run included; for losses that follow a schedule.
        generator: of random choices; None for torch's own, whose state checkpoints keep.
    """

    reader: TargetReader
    num_updates: int = 0
    generator: torch.Generator | None = None

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


class AdaptiveStep(TrainingStep):
    """A step with which a drafter can also learn while it serves, see `hf_specdec/adaptation/`.

    Attributes:
        heads: how the names of the heads' parameters begin.
        keep_logits: whether `StepOutput.logits` are wanted.
    """

    heads: tuple[str, ...]
    keep_logits: bool = False

    @abstractmethod
    def head_logits(self, model: nn.Module, states: Tensor) -> Tensor:
        """[positions, hidden] what the drafter's trunk made of each position -> [positions, draft_vocab] logits."""

    @abstractmethod
    def head_law(self, target_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the target says where [positions, target_hidden] entered its head: all that the heads learn from.

        Returns:
            its choice [positions] int64, over the whole vocabulary, and its law [positions, draft_vocab] float32.
        """

    @abstractmethod
    def head_loss(self, model: nn.Module, states: Tensor, law: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Loss of the heads alone at positions that were drafted while serving; no gradient flows into the trunk.

        Args:
            model: the drafter.
            states: [positions, hidden], as `draft_states` of the method's candidate generator gave them.
            law: of the target at the same positions, from `head_law`.

        Returns:
            the loss, scalar, and the logits [positions, draft_vocab].
        """

    @abstractmethod
    def draft_ids(self, token_ids: Tensor) -> Tensor:
        """Target ids -> ids in the draft vocabulary, any shape; -1 for tokens that the drafter cannot say."""


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
