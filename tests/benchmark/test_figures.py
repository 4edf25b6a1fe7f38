from __future__ import annotations

import statistics

import pytest

from hf_specdec.benchmark.figures import (
    Figures,
    Spread,
    cells,
    figures_of,
    ranked,
    rates_by_repeat,
    speedups_by_prompt,
)
from hf_specdec.benchmark.variants import COMPILED, PACKED, PLAIN
from tests.benchmark.samples import call, environment


def test_a_speedup_is_taken_against_the_same_prompt_in_the_same_repeat() -> None:
    # The machine is busy in repeat 1: both take twice the time, and the speedup stays what it is.
    plain = [call(PLAIN, repeat=repeat, seconds=1.0 + repeat) for repeat in (0, 1)]
    own = [call("own", repeat=repeat, seconds=0.5 * (1.0 + repeat)) for repeat in (0, 1)]
    assert speedups_by_prompt(own, plain) == {0: 2.0}


def test_a_method_that_writes_fewer_tokens_in_the_same_time_is_no_faster() -> None:
    assert speedups_by_prompt([call("own", new_tokens=[5])], [call(PLAIN)]) == {0: 0.5}


def test_tokens_per_second_count_the_whole_call_of_every_row() -> None:
    assert rates_by_repeat([call("own", new_tokens=[10, 4], seconds=2.0), call("own", repeat=1)]) == [7.0, 10.0]


def test_figures_of_known_rounds() -> None:
    baselines = {PLAIN: [call(PLAIN)], PACKED: [call(PACKED, seconds=0.75)], COMPILED: [call(COMPILED, seconds=0.8)]}
    own = call(
        "own",
        seconds=0.5,
        per_round=[[0, 2, 1, 1]],
        num_draft_tokens=16,
        num_target_forwards=4,
        num_foreseen=2,
        num_path_drafts=10,
        num_path_kept=4,
        stages_s={"prefill": 0.09, "draft": 0.1, "tree": 0.02, "verify": 0.2, "accept": 0.04, "commit": 0.04},
    )
    figures = figures_of([own], baselines, environment(weight_bytes=10_000_000, copy_bytes_per_s=1e9))
    assert figures.speedup == Spread(2.0, 2.0, 2.0)
    assert figures.speedup_packed is not None
    assert figures.speedup_packed.median == pytest.approx(1.5)
    assert figures.speedup_compiled is not None
    assert figures.speedup_compiled.median == pytest.approx(1.6)
    assert figures.mean_acceptance_length == 2.0
    assert figures.continuous_acceptance_length == 4.0, "eight tokens; two of four rounds continued the one before"
    assert figures.rollback_rate == pytest.approx(0.6)
    assert figures.draft_acceptance_rate == 0.25
    assert figures.drafting_share == pytest.approx(0.24), "drafter forwards and the tree, over the whole call"
    assert figures.round_s == pytest.approx(
        {"draft": 0.025, "tree": 0.005, "verify": 0.05, "accept": 0.01, "commit": 0.01}
    )
    assert figures.round_to_floor == pytest.approx(0.1 / 0.01)
    assert figures.tpot_s == Spread.of([0.4 / 9])


def test_ways_that_their_repeats_cannot_tell_apart_share_a_rank() -> None:
    def of(variant: str, *rates: float) -> Figures:
        calls = [call(variant, repeat=repeat, seconds=10 / rate) for repeat, rate in enumerate(rates)]
        return figures_of(calls, {PLAIN: [], PACKED: [], COMPILED: []}, environment())

    figures = ranked([of("slow", 90, 100), of("quick", 200, 210), of("near", 195, 201), of("mean", 150, 160)])
    assert {own.variant: own.rank for own in figures} == {"quick": 1, "near": 1, "mean": 3, "slow": 4}
    assert [own.variant for own in figures] == ["slow", "quick", "near", "mean"]


def test_the_baseline_has_no_speedup_and_no_rounds() -> None:
    figures = figures_of([call(PLAIN)], {PLAIN: [call(PLAIN)], PACKED: [], COMPILED: []}, environment())
    assert figures.speedup is None
    assert figures.speedup_compiled is None
    assert figures.mean_acceptance_length is None
    assert figures.round_to_floor is None


def test_temperatures_and_batch_sizes_are_told_apart_and_swept_ways_stand_aside() -> None:
    calls = [
        call(PLAIN),
        call(PLAIN, temperature=1.0, identical=None),
        call("own", seconds=0.5),
        call("own @ 8", seconds=0.25, swept_from="own", budget=8),
        call("own @ 4", seconds=0.5, swept_from="own", budget=4),
    ]
    greedy, sampled = cells(calls, environment())
    assert [own.variant for own in greedy.figures] == [PLAIN, "own"]
    assert [budget for budget, _ in greedy.sweeps["own"]] == [4, 8]
    assert [own.variant for own in sampled.figures] == [PLAIN]
    assert greedy.title == "Greedy, batch size 1"
    assert sampled.title == "Temperature 1, batch size 1"


def test_quartiles_of_many_values_and_extremes_of_few() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert Spread.of(values) == Spread(statistics.median(values), 2.0, 4.0)
    assert Spread.of([1.0, 5.0]) == Spread(3.0, 1.0, 5.0)
