"""DrafterTrainer: a `transformers.Trainer` that trains a drafter while its target stays frozen.

Progress bar, checkpoints, resuming, mixed precision, distributed runs and `push_to_hub` are the Trainer's. Differences:
the loss comes from a method's `TrainingStep`, the target is neither wrapped nor saved, and logs and evaluation report
how much of a draft would be accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, IntervalStrategy, TrainOutput

from hf_specdec.decoding.speed.cudnn import without_cudnn_attention
from hf_specdec.training.data import collate
from hf_specdec.training.step import TrainingStep
from hf_specdec.training.validation import ValidationRounds


class UntrainedParts(TrainerCallback):
    """Notes which parameters have had a gradient. One without any keeps its first, mostly random, values.

    Args:
        model: the drafter; parameters that do not require gradients are frozen on purpose.
    """

    def __init__(self, model: nn.Module) -> None:
        self.waiting = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.began_at: int | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.began_at = state.global_step

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        for name, parameter in list(self.waiting.items()):
            # A factor of 0 in the loss gives gradients of 0, and a part that the loss does not read gives None.
            if parameter.grad is not None and bool(parameter.grad.any()):
                del self.waiting[name]

    def check(self, steps: int) -> None:
        """Raises ValueError, naming the parts, if one had no gradient in a run of `steps` from its first step on."""
        if self.began_at != 0 or not steps or not self.waiting:  # the first part of a resumed run was not seen
            return
        names = list(self.waiting)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(
            f"No step of the {steps} of this run gave a gradient to {', '.join(names[:5])}{more}: these parts are as "
            "they were before the training, mostly random. Train for more steps, or with options whose loss includes "
            "them; or freeze them with requires_grad_(False)."
        )


class FiniteGradients(TrainerCallback):
    """Stops before the first update that would make all weights NaN; checkpoints then hold weights that are sound."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [each for each in model.parameters() if each.requires_grad]

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        gradients = [each.grad for each in self.parameters if each.grad is not None]
        # With float16 the optimizer itself leaves such steps out, and lowers the scale of the loss.
        if not args.fp16 and not bool(torch.nn.utils.get_total_norm(gradients).isfinite()):
            raise ValueError(
                f"The gradient of step {state.global_step + 1} is not finite, so training stops before this step. "
                "A lower learning rate, another seed or float32 may pass it."
            )


class DrafterTrainer(Trainer):
    """Trains a drafter with the step of its method.

    A trained part that had no gradient in the whole run is an error at its end; a gradient that is not finite is one at
    once.

    Args:
        drafter: a drafter that is a `PreTrainedModel`; checkpoints hold its weights.
        step: made for this drafter and its target; the target is moved to the training device.
        rounds: measured after each evaluation, as `eval_mean_acceptance_length`; None for none.
        args: of the Trainer. Sets `remove_unused_columns=False`, because the step and not the drafter's forward reads
            the columns, and `ddp_find_unused_parameters=False` if it is None, because every step uses all parameters.
        **kwargs: passed to `transformers.Trainer` (datasets, callbacks, optimizers, ...). `data_collator` and
            `compute_metrics` default to this library's.
    """

    def __init__(
        self,
        drafter: PreTrainedModel,
        step: TrainingStep,
        args: TrainingArguments | None = None,
        *,
        rounds: ValidationRounds | None = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else TrainingArguments()
        args.remove_unused_columns = False
        if args.ddp_find_unused_parameters is None:
            # The search allows only one forward per step, but exit heads and chained blocks need several.
            args.ddp_find_unused_parameters = False
        kwargs.setdefault("data_collator", collate)
        kwargs.setdefault("compute_metrics", self._metrics_of_prediction)
        super().__init__(model=drafter, args=args, **kwargs)
        self.step, self.rounds = step, rounds
        self._untrained = UntrainedParts(drafter)
        self.add_callback(self._untrained)
        self.add_callback(FiniteGradients(drafter))
        target = step.reader.model
        if getattr(target, "hf_device_map", None) is None:
            target.to(args.device)
        self._pending: list[tuple[Tensor, Tensor]] = []

    @without_cudnn_attention()  # the backward pass takes the kernel of the forward pass
    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        result = super().train(*args, **kwargs)
        self._untrained.check(self.state.global_step)
        return result

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        self.step.num_updates, self.step.num_steps = self.state.global_step, self.state.max_steps
        with self.accelerator.autocast():  # the model's own covers its forward alone, and not its fusion and head
            output = self.step(model, inputs, training=model.training)
        if model.training and self.args.logging_strategy != IntervalStrategy.NO:  # `log` empties the list
            self._pending.append((output.correct, output.labelled))
        return (output.loss, output) if return_outputs else output.loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        with torch.no_grad(), self.compute_loss_context_manager():
            output = self.step(model, self._prepare_inputs(inputs), training=False)
        if prediction_loss_only:
            return output.loss, None, None
        # Batches with fewer blocks are padded with -100, which would be True as a bool.
        return output.loss, output.correct.to(torch.int8), output.labelled.to(torch.int8)

    @without_cudnn_attention()
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        output = super().evaluation_loop(*args, **kwargs)
        if self.rounds is not None:
            counts = self.rounds.counts(self.model, (self.args.process_index, self.args.world_size))
            accepted, rounds = self.accelerator.reduce(counts.to(self.args.device)).tolist()
            output.metrics["eval_mean_acceptance_length"] = 1 + accepted / max(1, rounds)
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._pending:
            correct = torch.cat([entry.flatten(0, -2) for entry, _ in self._pending])
            labelled = torch.cat([entry.flatten(0, -2) for _, entry in self._pending])
            self._pending.clear()
            logs |= {name: round(value, 4) for name, value in self.step.metrics(correct, labelled).items()}
        super().log(logs, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Batches rows of similar length, to reduce padding."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        lengths = getattr(dataset, "lengths", None)
        if not lengths or len(set(lengths)) == 1:
            return super()._get_train_sampler(train_dataset)
        # All processes must draw the same order, because each takes a part of it.
        order = torch.Generator().manual_seed(self.args.seed)
        return LengthGroupedSampler(self.args.train_batch_size, dataset, lengths=lengths, generator=order)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # The Trainer reads only the main weight file of a checkpoint, so all weights must be in it.
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if state_dict is None and folder.name.startswith(PREFIX_CHECKPOINT_DIR):
            state_dict = self.model.state_dict()
        super()._save(output_dir, state_dict)

    def _metrics_of_prediction(self, prediction: EvalPrediction) -> dict[str, float]:
        correct = torch.from_numpy(np.asarray(prediction.predictions)) > 0
        labelled = torch.from_numpy(np.asarray(prediction.label_ids)) > 0
        return self.step.metrics(correct, labelled)
