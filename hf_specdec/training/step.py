"""TrainingStep: what a method implements for `DrafterTrainer`, and the acceptance metrics that all methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.drafting.vocabulary import check_same_size
from hf_specdec.training.features import TargetReader
from hf_specdec.training.losses import SOFT_LOSSES, LossName, check_loss


@dataclass(frozen=True)
class StepOutput:
    """Result of one batch.

    Attributes:
        loss: scalar with gradient.
        correct: [batch, blocks, depth] bool, whether the drafter's most probable token at depth 1, 2, ... is right.
        labelled: [batch, blocks, depth] bool, whether the position has a label.
        logits: [positions, draft_vocab] at the positions of the loss, or None unless `AdaptiveStep.keep_logits`.
    """

    loss: Tensor
    correct: Tensor
    labelled: Tensor
    logits: Tensor | None = None


class TrainingStep(ABC):
    """One training step of one drafting method. Holds the target, which it never trains.

    Args:
        drafter: the drafter to train.
        target: the frozen target it drafts for.
        loss: see `position_losses`.
        last_hidden: read the input of the target's head even where the loss does not need it.
        same_size: whether drafter and target must have vocabularies of one size.

    Raises:
        ValueError: the drafter does not fit the target, or there is no such loss.

    Attributes:
        reader: computes the target's states of a batch, or takes cached ones from it.
        num_updates: optimizer steps so far, including those of a resumed run; for losses that follow a schedule.
        num_steps: optimizer steps of the whole run, as far as they are known; 0 outside of a run.
        generator: of random choices; None for torch's global one, whose state is part of the checkpoints.
    """

    drafter: Any
    reader: TargetReader
    num_updates: int = 0
    num_steps: int = 0
    generator: torch.Generator | None = None

    def __init__(
        self,
        drafter: Any,
        target: PreTrainedModel,
        loss: LossName,
        *,
        last_hidden: bool = False,
        same_size: bool = True,
    ) -> None:
        drafter.check_target(target)
        if same_size and drafter.config.vocab_size is not None:
            check_same_size(drafter, target, "training")
        check_loss(loss)
        self.drafter, self.loss = drafter, loss
        last_hidden = last_hidden or loss in SOFT_LOSSES
        self.reader = TargetReader(target, drafter.feature_layers(target), last_hidden=last_hidden)

    @abstractmethod
    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], *, training: bool) -> StepOutput:
        """Runs the drafter once on a batch.

        Args:
            model: the drafter, or its wrapper in a distributed run; call this and not the drafter itself.
            batch: the columns of `data.py`, on the drafter's device.
            training: whether random choices are allowed; if False the result depends on the batch alone.
        """

    def metrics(self, correct: Tensor, labelled: Tensor) -> dict[str, float]:
        """The metrics of logs and evaluation, from the concatenated `correct` and `labelled` of many batches."""
        return acceptance_metrics(correct, labelled)


class AdaptiveStep(TrainingStep):
    """A step that can also train a drafter while it serves, see `hf_specdec/adaptation/`.

    Attributes:
        heads: prefixes of the names of the heads' parameters.
        keep_logits: whether to return `StepOutput.logits`.
    """

    heads: tuple[str, ...]
    keep_logits: bool = False

    @abstractmethod
    def head_logits(self, model: nn.Module, states: Tensor) -> Tensor:
        """The trunk's output [positions, hidden] -> logits [positions, draft_vocab]."""

    @abstractmethod
    def head_labels(self, target_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The labels of the heads, from the input [positions, target_hidden] of the target's head.

        Returns:
            the target's most probable token [positions] int64, over the whole vocabulary, and its logits
            [positions, draft_vocab] float32.
        """

    @abstractmethod
    def head_loss(self, model: nn.Module, states: Tensor, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Loss of the heads alone at positions that were drafted while serving; the trunk gets no gradient.

        Args:
            model: the drafter.
            states: [positions, hidden], from `draft_states` of the method's candidate generator.
            labels: of the same positions, from `head_labels`.

        Returns:
            the loss, scalar, and the logits [positions, draft_vocab].
        """

    @abstractmethod
    def draft_ids(self, token_ids: Tensor) -> Tensor:
        """Target ids -> ids in the draft vocabulary, any shape; -1 for tokens outside the draft vocabulary."""


def acceptance_metrics(correct: Tensor, labelled: Tensor) -> dict[str, float]:
    """Per-position accuracy and the mean accepted length of the greedy chain.

    Args:
        correct: [..., depth] bool, as in `StepOutput`.
        labelled: [..., depth] bool. Blocks that the end of the text cuts off count for the accuracies only.

    Returns:
        `accuracy_1`, `accuracy_2`, ... per depth, and `accepted_length`: 1 (the bonus token) plus the mean number of
        leading hits per block. This is tau of a greedy chain whose roots are distributed like the anchors.

    Examples:
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
