"""A run by time: as many steps as fit, and a learning rate that falls to 0 at the last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import TrainerControl, TrainerState, get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup
from transformers.trainer_callback import DefaultFlowCallback
from transformers.training_args import TrainingArguments

from hf_specdec.training.schedule import Schedule


def run(
    seconds: Callable[[float], float], evaluation_s: float, evaluation_steps: int = 16
) -> tuple[float, list[float], int]:
    """Six minutes with steps whose duration depends on the time: time taken, factors of all steps, evaluations."""
    now = [0.0]
    schedule = Schedule("linear", 0.04, evaluation_steps=evaluation_steps, minutes=6, clock=lambda: now[0])
    arguments = TrainingArguments(output_dir="unused", eval_strategy="steps", report_to="none", use_cpu=True)
    state, control, flow, factors, evaluations = TrainerState(), TrainerControl(), DefaultFlowCallback(), [], 0
    schedule.on_train_begin(arguments, state, control)
    while not control.should_training_stop:
        factors.append(schedule.learning_rate_factor(state.global_step))
        schedule.on_step_begin(arguments, state, control)
        duration = seconds(now[0])
        now[0] += 0.8 * duration
        schedule.on_pre_optimizer_step(arguments, state, control)
        now[0] += 0.2 * duration
        state.global_step += 1
        control.should_evaluate = False
        flow.on_step_end(arguments, state, control)
        schedule.on_step_end(arguments, state, control)
        if control.should_evaluate:
            evaluations += 1
            now[0] += evaluation_s
            schedule.on_evaluate(arguments, state, control)
    assert schedule.num_steps == state.global_step, "what is recorded is what was done"
    return now[0], factors, evaluations


@pytest.mark.parametrize(
    ("seconds", "evaluation_s"),
    [
        pytest.param(lambda now: 0.1, 0.8, id="short steps"),
        pytest.param(lambda now: 3.0, 24.0, id="long steps"),
        pytest.param(lambda now: 1.0 if now else 10.0, 8.0, id="a slow first step"),
        pytest.param(lambda now: 0.5 if now < 100 else 1.5, 6.0, id="other work begins"),
        pytest.param(lambda now: 0.5 if now > 100 else 1.5, 6.0, id="other work ends"),
        pytest.param(lambda now: 0.2, 6.0, id="evaluation takes longer than assumed"),
    ],
)
def test_time_is_kept_within_a_tenth_and_the_learning_rate_falls_to_nothing(
    seconds: Callable[[float], float], evaluation_s: float
) -> None:
    taken, factors, evaluations = run(seconds, evaluation_s)
    assert 0.9 * 360 < taken < 1.1 * 360
    assert factors[0] == 0
    assert factors[-1] < 0.1
    assert max(factors) > 0.9
    assert 1 <= evaluations <= 10


def test_a_time_too_short_for_its_evaluation_still_takes_a_step() -> None:
    _, factors, evaluations = run(lambda now: 100.0, 600.0)
    assert 1 <= len(factors) <= 2
    assert evaluations == 1


def test_evaluations_take_less_than_a_tenth_of_the_steps() -> None:
    for each, most in ((0.1, 10), (1.0, 3), (3.0, 1)):
        assert run(lambda now, each=each: each, 8 * each)[2] <= most


def test_a_long_evaluation_of_few_rows_takes_less_than_a_tenth_of_the_time() -> None:
    """As with validation rounds."""
    taken, _, evaluations = run(lambda now: 0.1, 20.0, evaluation_steps=1)
    assert 0.9 * 360 < taken < 1.1 * 360
    assert 1 <= evaluations <= 3  # the first one is not measured yet, the last one always comes


def test_processes_evaluate_after_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measures other times; what the first one has found holds for all."""
    monkeypatch.setattr(
        "hf_specdec.training.schedule.broadcast_object_list", lambda own: [400, 30] if len(own) == 2 else [400]
    )
    now = [0.0]
    schedule = Schedule("linear", 0.04, evaluation_steps=1, minutes=6, clock=lambda: now[0])
    arguments, state, control = TrainingArguments(output_dir="unused", use_cpu=True), TrainerState(), TrainerControl()
    schedule.on_train_begin(arguments, state, control)
    schedule.on_step_begin(arguments, state, control)
    schedule.on_pre_optimizer_step(arguments, state, control)
    now[0], state.global_step = 1.0, 1
    schedule.on_step_end(arguments, state, control)
    assert (state.max_steps, state.eval_steps) == (400, 300)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_with_a_number_of_steps_the_learning_rates_are_those_of_transformers(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    make = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}[name]
    (theirs,) = make(optimizer, 4, 50).lr_lambdas
    ours = Schedule(name, 0.08, evaluation_steps=1, num_steps=50)  # type: ignore[arg-type]
    assert [ours.learning_rate_factor(step) for step in range(51)] == pytest.approx(
        [theirs(step) for step in range(51)]
    )
