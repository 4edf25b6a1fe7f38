"""Length and learning rate of a run: a number of steps, or as many steps as fit into a time.

transformers.Trainer supports only the first. For a given time, the number of steps is estimated repeatedly from the
measured time per step, so that it follows the speed of the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import ProgressCallback, TrainerCallback, TrainerState

from hf_specdec.progress import Progress
from hf_specdec.training.options import ScheduleName

UNBOUNDED = 10**9  # max_steps of the Trainer if the time ends the run
FIRST_GUESS = 1000  # steps, before the first one was measured


class Schedule(TrainerCallback):
    """Sets the number of steps and the learning rate of every step.

    The time is counted from the first step to the end of the last evaluation, including checkpoints.

    Args:
        name: shape of the decay after the warm-up, to 0 at the last step.
        warmup: share of the steps in which the learning rate rises from 0.
        evaluation_steps: number of training steps with as many rows as one evaluation; a longer measured time counts.
        num_steps: of the run; None for as many as fit into `minutes`.
        minutes: of the run, if `num_steps` is None.
        saves_what_it_evaluates: whether every evaluated state is saved, and no other, so that the best one can be kept.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        name: ScheduleName,
        warmup: float,
        *,
        evaluation_steps: int,
        num_steps: int | None = None,
        minutes: float = math.inf,
        saves_what_it_evaluates: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.warmup, self.evaluation_steps = name, warmup, evaluation_steps
        self.timed = num_steps is None
        self.num_steps = FIRST_GUESS if num_steps is None else num_steps
        self.limit_s, self.clock = 60 * minutes, clock
        self.saves_what_it_evaluates = saves_what_it_evaluates
        self._next_estimate = 1
        self._evaluation_s: float | None = None
        self._evaluating_s = 0.0
        self._printed = False

    @property
    def intervals(self) -> dict[str, int]:
        """Steps between logs, checkpoints and evaluations; evaluations take less than a tenth of the time."""
        evaluation = max(-(-self.num_steps // 10), 10 * self.evaluation_steps)
        return {
            "logging_steps": max(1, min(50, self.num_steps // 10)),
            "save_steps": evaluation if self.saves_what_it_evaluates else max(1, self.num_steps // 10),
            "eval_steps": evaluation,
        }

    def learning_rate_factor(self, step: int) -> float:
        """Factor of the maximal learning rate, for `torch.optim.lr_scheduler.LambdaLR`.

        Examples:
            >>> schedule = Schedule("linear", 0.2, evaluation_steps=1, num_steps=10)
            >>> [round(schedule.learning_rate_factor(step), 3) for step in (0, 1, 2, 6, 10)]
            [0.0, 0.5, 1.0, 0.5, 0.0]
        """
        rising = int(self.num_steps * self.warmup)
        if step < rising:
            return step / rising
        progress = min(1.0, (step - rising) / max(1, self.num_steps - rising))
        return 1 - progress if self.name == "linear" else (1 + math.cos(math.pi * progress)) / 2

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._started = self.clock()
        self._set_steps(state, self.num_steps)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._step_began = self.clock()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._gradients_s = self.clock() - self._step_began

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._step_ended = self.clock()
        # Not after the last step: the Trainer has already decided to stop.
        if self.timed and self._next_estimate <= state.global_step < self.num_steps:
            # All processes must take the same steps, and evaluate after the same ones: they synchronise in each.
            steps, self.evaluation_steps = broadcast_object_list([self._estimate(state), self.evaluation_steps])
            self._set_steps(state, steps)
            self._next_estimate = state.global_step + max(1, min(state.global_step, steps // 20))

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._evaluation_s = self.clock() - self._step_ended
        self._evaluating_s += self._evaluation_s

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if self.timed:
            logs.pop("train_samples_per_second", None)  # the Trainer computes it from max_steps

    def _estimate(self, state: TrainerState) -> int:
        """Steps of the whole run."""
        done, elapsed = state.global_step, self._step_ended - self._started
        if done == 1:
            self._first_s = elapsed  # the first step is slower: used only until there are others
            each = elapsed
        else:
            each = (elapsed - self._evaluating_s - self._first_s) / (done - 1)
        if self._evaluation_s is not None:  # validation rounds make it longer than its rows
            self.evaluation_steps = max(self.evaluation_steps, math.ceil(self._evaluation_s / each))
        # Before the first evaluation: assume half the time of the gradients of as many rows.
        evaluation = self._gradients_s * self.evaluation_steps / 2 if self._evaluation_s is None else self._evaluation_s
        remaining = self.limit_s - elapsed - evaluation  # the last evaluation
        steps = done + max(1, round(remaining / (each + evaluation / self.intervals["eval_steps"])))
        if done >= 4 and not self._printed and state.is_world_process_zero:
            self._printed = True
            print(f"{each:.3g} s per step: about {steps} steps in {self.limit_s / 60:g} minutes", flush=True)
        return steps

    def _set_steps(self, state: TrainerState, steps: int) -> None:
        self.num_steps = state.max_steps = steps
        for name, interval in self.intervals.items():
            setattr(state, name, interval)


class StepsProgress(ProgressCallback):
    """The Trainer's progress, drawn as that of other commands, with the total steps of `Schedule`."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.training_bar = Progress("training", state.max_steps, unit="steps", shown=state.is_world_process_zero)
        self.current_step = 0

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.training_bar.total = state.max_steps
        super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Shows no bar of its own."""
