"""Muon in the number type that is asked for, and the trial that asks."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from hf_specdec.training import number_type
from hf_specdec.training.optimizer import Muon, orthogonalized


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_an_update_is_nearly_orthogonal_and_in_float32_as_exact_as_that(shape: tuple[int, int]) -> None:
    update = orthogonalized(matrix(*shape), torch.float32)
    left, values, right = torch.linalg.svd(update.double(), full_matrices=False)
    assert 0.6 < values.min() < values.max() < 1.3
    theirs, _, others = torch.linalg.svd(matrix(*shape).double(), full_matrices=False)
    assert torch.linalg.matrix_norm(left @ right - theirs @ others) < 1e-3, "the same directions"
    torch.testing.assert_close(update.double(), orthogonalized(matrix(*shape), torch.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_torch_but_for_the_rounding_of_its_iteration(dtype: torch.dtype) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    ours, theirs = (torch.nn.Parameter(matrix(24, 40)) for _ in range(2))
    optimizers = [
        Muon([ours], 0.1, dtype=dtype),
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    ]
    for scale in (1.0, -0.5, 0.2):
        ours.grad = theirs.grad = scale * matrix(40, 24).T
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - matrix(24, 40)).norm()
    assert (ours - theirs).norm() < 0.02 * moved


def test_a_checkpoint_goes_on_with_the_momentum_and_in_the_number_type_of_the_run() -> None:
    parameter = torch.nn.Parameter(matrix(8, 8))
    before = Muon([parameter], 0.1, dtype=torch.bfloat16)
    parameter.grad = matrix(8, 8).T.contiguous()
    before.step()
    other = copy.deepcopy(parameter)
    after = Muon([other], 0.3, dtype=torch.float32)
    after.load_state_dict(before.state_dict())
    assert torch.equal(after.state[other]["momentum"], before.state[parameter]["momentum"])
    assert after.param_groups[0]["lr"] == 0.1
    assert after.dtype == torch.float32


@pytest.mark.parametrize(("gain", "chosen"), [(0.008, False), (0.75, False), (4.5, True)])
def test_a_cpu_trains_in_bfloat16_where_a_trial_finds_it_faster(gain: float, chosen: bool) -> None:
    assert number_type.computes_bfloat16("cpu", lambda: gain) == (
        chosen,
        f"this CPU multiplies matrices {gain} times as fast in bfloat16 as in float32",
    )


@pytest.mark.parametrize("gain", [0.6, 1.2, 4.0])
def test_a_trial_beside_other_processes_finds_what_an_idle_machine_finds(gain: float) -> None:
    """Four calls of five are interrupted, for up to ten times their own time, and in stretches."""
    for seed in range(20):
        draw, now = random.Random(seed), [0.0]

        def product(own: float, draw: random.Random = draw, now: list[float] = now) -> None:
            busy = draw.random() < 0.8 or now[0] % 0.1 < 0.05
            now[0] += own * (1 + busy * 10 * draw.random()) * (1 + 0.02 * draw.random())

        found = number_type.relative_time(
            lambda: product(1e-3), lambda: product(1e-3 / gain), 3.0, lambda now=now: now[0]
        )
        assert found == pytest.approx(gain, rel=0.05)


def test_the_trial_takes_both_number_types_and_leaves_the_threads_as_they_were() -> None:
    threads = torch.get_num_threads()
    assert number_type.bfloat16_gain(seconds=0.001) > 0
    assert torch.get_num_threads() == threads
