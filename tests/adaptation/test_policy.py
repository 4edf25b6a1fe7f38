"""The bandit and the fail-safe against sequences worked out by hand."""

from __future__ import annotations

import random

import pytest

from hf_specdec.adaptation.policy import UPDATES, Action, AlwaysUpdate, CostAwareBandit, FailSafe, QueryResult


def query(signal: float = 10.0, tokens: int = 100, seconds: float = 1.0, accepted: int = 60) -> QueryResult:
    return QueryResult(signal, tokens, num_rounds=40, num_accepted=accepted, seconds=seconds)


def warmed(**settings: object) -> CostAwareBandit:
    """A bandit after its warm-up at 100 tokens per second."""
    bandit = CostAwareBandit(**settings)  # type: ignore[arg-type]
    for _ in range(bandit.warmup_queries):
        assert bandit.decide(query()) == "skip"
    return bandit


def update(bandit: CostAwareBandit, action: Action, signal: float = 10.0) -> None:
    """An update that serves at once."""
    bandit.updated(action, query(signal=signal))
    bandit.brought(0.0)


def test_the_warm_up_of_ten_queries_skips_and_measures_the_throughput() -> None:
    bandit = CostAwareBandit()
    for number in range(10):
        assert bandit.baseline is None
        assert bandit.decide(query(tokens=100 + number, seconds=2.0)) == "skip"
    assert bandit.baseline == pytest.approx(1045 / 20)
    assert bandit.decide(query()) != "skip"


def test_a_cold_start_without_exploration_tries_each_action_then_the_better() -> None:
    bandit = warmed(epsilon=(0.0, 0.0), interval=1, cooldown_queries=0, cold_start_events=3, num_sigmas=0)
    assert bandit.decide(query()) == "head"
    update(bandit, "head", signal=10.0)
    # The first reward is the value: (80 - 100) / 10
    assert bandit.decide(query(tokens=80)) == "full"
    assert bandit.values["head"] == pytest.approx(-2.0)
    update(bandit, "full", signal=20.0)
    # (150 - 100) / 20 = 2.5
    assert bandit.decide(query(tokens=150)) == "full"
    assert bandit.values["full"] == pytest.approx(2.5)
    update(bandit, "full", signal=5.0)
    # Eq. 10: 0.9 * 2.5 + 0.1 * (90 - 100) / 5 = 2.05, still the only positive one
    assert bandit.decide(query(tokens=90)) == "full"
    assert bandit.values["full"] == pytest.approx(2.05)
    update(bandit, "full", signal=1.0)  # too weak a trigger to count
    assert bandit.decide(query(tokens=60)) == "full"
    for _ in range(4):
        update(bandit, "full", signal=5.0)
        decision = bandit.decide(query(tokens=50))
    # 2.05 * 0.9 ** 4 - 10 * (1 - 0.9 ** 4) = -2.094: both predictions are negative now
    assert decision == "skip"
    assert bandit.values == pytest.approx({"head": -2.0, "full": 2.05 * 0.6561 - 10 * 0.3439})


def test_the_larger_predicted_gain_is_taken_and_no_signal_predicts_none() -> None:
    bandit = warmed(cold_start_events=0, num_sigmas=0)
    bandit.values |= {"head": 0.2, "full": 0.1}
    assert bandit.decide(query(signal=3.0)) == "head"
    assert bandit.decide(query(signal=0.0)) == "skip"
    bandit.values["full"] = 0.3
    assert bandit.decide(query(signal=3.0)) == "full"


def test_an_interval_spans_the_queries_after_the_update() -> None:
    bandit = warmed(interval=3, epsilon=(0.0, 0.0))
    update(bandit, "head", signal=10.0)
    for tokens in (120, 150):
        bandit.decide(query(tokens=tokens))
        assert bandit.values["head"] == 0.0
    bandit.decide(query(tokens=180, seconds=2.0))
    # (120 + 150 + 180) / (1 + 1 + 2) = 112.5 tokens per second
    assert bandit.values["head"] == pytest.approx(12.5 / 10)


def test_overlapping_intervals_are_measured_each_for_itself() -> None:
    bandit = warmed(interval=2, cooldown_queries=0, epsilon=(0.0, 0.0))
    update(bandit, "head", signal=10.0)
    bandit.decide(query(tokens=110))
    update(bandit, "full", signal=10.0)
    bandit.decide(query(tokens=130))
    bandit.decide(query(tokens=150))
    assert bandit.values == pytest.approx({"head": 20 / 10, "full": 40 / 10})


def test_an_update_that_serving_waits_for_pays_for_it() -> None:
    bandit = warmed(interval=2, cooldown_queries=0, epsilon=(0.0, 0.0))
    bandit.updated("full", query(signal=10.0))
    for _ in range(3):  # slower than the interval
        bandit.decide(query(tokens=90))
        assert bandit.values["full"] == 0.0
    bandit.brought(2.0)
    # 3 * 90 tokens in 3 + 2 seconds: 54 tokens per second
    assert bandit.values["full"] == pytest.approx((54 - 100) / 10)


def test_a_value_that_chance_made_negative_does_not_end_the_learning() -> None:
    bandit = warmed(interval=1, cooldown_queries=0, cold_start_events=0, alpha=0.5)
    bandit.values["full"] = -3.0
    for tokens in (140, 20):  # rewards of 4 and -8
        update(bandit, "head")
        assert bandit.decide(query(tokens=tokens)) == "head"
    # 0.5 * 4 + 0.5 * -8; two rewards spread by 12 / sqrt(2), and their weights are 0.5 each
    assert bandit.values["head"] == pytest.approx(-2.0)
    assert bandit.standard_error("head") == pytest.approx(12 / 2**0.5 * 0.5**0.5)
    bandit.num_sigmas = 0.0  # the paper's rule: values of 0 are no gain either
    assert bandit.decide(query()) == "skip"


def test_values_that_are_surely_negative_end_the_learning() -> None:
    bandit = warmed(interval=1, cooldown_queries=0, cold_start_events=0)
    decisions = []
    for tokens in (50, 51, 49):
        for action in UPDATES:
            update(bandit, action)
            decisions.append(bandit.decide(query(tokens=tokens)))
    # One reward is as good as nothing known; a second one shows how little they spread.
    assert decisions == ["full", "head", "skip", "skip", "skip", "skip"]


def test_chance_in_the_warm_up_counts_as_chance() -> None:
    bandit = CostAwareBandit(interval=1, cooldown_queries=0, cold_start_events=0, warmup_queries=4)
    for tokens in (80, 120, 80, 120):
        bandit.decide(query(tokens=tokens))
    assert bandit.baseline == pytest.approx(100)
    bandit.values["full"] = -9.0
    for _ in range(2):  # rewards of -1 each, which do not spread
        update(bandit, "head")
        decision = bandit.decide(query(tokens=90))
    # Four queries 20 off: 20 * sqrt(4 / 3) / sqrt(4) tokens per second, in rewards a tenth of it.
    assert bandit.standard_error("head") == pytest.approx(20 * (4 / 3) ** 0.5 / 2 / 10)
    assert bandit.values["head"] == pytest.approx(-1.0)
    assert decision == "head"


def test_without_a_signal_nothing_is_learned() -> None:
    bandit = warmed(cold_start_events=0)
    assert bandit.decide(query(signal=0.0)) == "skip"


def test_a_weak_trigger_is_not_rewarded() -> None:
    bandit = warmed(interval=1)
    update(bandit, "head", signal=4.9)
    bandit.decide(query(tokens=500))
    assert bandit.values["head"] == 0.0
    update(bandit, "head", signal=5.0)
    bandit.decide(query(tokens=500))
    assert bandit.values["head"] > 0


def test_a_trigger_without_rejections_is_not_rewarded_whatever_the_least_signal() -> None:
    bandit = warmed(interval=1, min_signal=0)
    update(bandit, "head", signal=0.0)
    bandit.decide(query(tokens=500))
    assert bandit.values["head"] == 0.0
    update(bandit, "head", signal=0.1)
    bandit.decide(query(tokens=500))
    assert bandit.values["head"] == pytest.approx(4000)


def test_two_queries_after_an_update_trigger_none() -> None:
    bandit = warmed()
    assert bandit.may_update()
    update(bandit, "full")
    allowed = []
    for _ in range(4):
        bandit.decide(query())
        allowed.append(bandit.may_update())
    assert allowed == [False, False, True, True]


def test_exploration_falls_linearly_over_eight_events() -> None:
    bandit = warmed()
    found = []
    for _ in range(9):
        found.append(bandit.exploration)
        update(bandit, "head")
    assert found[:8] == pytest.approx([0.30 - event * 0.20 / 7 for event in range(8)])
    assert found[8] == 0.0


def test_a_cold_start_explores_as_often_as_it_says() -> None:
    # 2000 draws at chance 0.3, half of which fall on the other action: 300 expected, deviation 16; bound 5 deviations.
    bandit = warmed(seed=3)
    bandit.values["full"] = 1.0
    bandit._measured |= {"head", "full"}
    others = sum(bandit.decide(query()) == "head" for _ in range(2000))
    assert abs(others - 300) < 80


def test_a_reset_begins_a_new_cold_start() -> None:
    bandit = warmed(interval=1, cold_start_events=1, epsilon=(0.0, 0.0), num_sigmas=0)
    update(bandit, "head")
    assert bandit.decide(query(tokens=10)) == "skip"
    bandit.reset()
    assert bandit.values == {"head": 0.0, "full": 0.0}
    assert bandit.decide(query(tokens=10)) == "head"


def test_always_update_takes_every_query_and_fires_every_eighth() -> None:
    policy = AlwaysUpdate()
    assert policy.buffer_queries == 8
    assert [policy.decide(query(signal=0.0)) for _ in range(3)] == ["full"] * 3
    policy.updated("full", query())
    assert policy.may_update()


def watch(lengths: list[float], **settings: int) -> list[str | None]:
    """Verdicts for windows of two queries with these mean acceptance lengths."""
    safe = FailSafe(window_queries=2, **settings)
    verdicts = []
    for length in lengths:
        accepted = round((length - 1) * 40)
        assert safe.observe(query(accepted=accepted)) is None
        verdicts.append(safe.observe(query(accepted=accepted)))
    return verdicts


@pytest.mark.parametrize(
    ("lengths", "verdicts"),
    [
        ([3.0, 2.9, 2.8], ["good", None, "bad"]),
        ([3.0, 2.9, 3.0, 2.8, 2.7], ["good", None, "good", None, "bad"]),
        ([3.0, 3.0, 3.0], ["good"] * 3),
        # After a verdict the watch begins anew: three further windows have to fall.
        ([3.0, 2.9, 2.8, 2.7, 2.6, 2.5], ["good", None, "bad", "good", None, "bad"]),
    ],
)
def test_three_falling_windows_are_bad(lengths: list[float], verdicts: list[str | None]) -> None:
    assert watch(lengths) == verdicts


def windows(*accepted: tuple[int, int], **settings: float) -> list[str | None]:
    """Verdicts for windows of two queries of 40 rounds each, given by the tokens that each accepted."""
    safe = FailSafe(window_queries=2, **settings)  # type: ignore[arg-type]
    return [[safe.observe(query(accepted=count)) for count in pair][-1] for pair in accepted]


def test_a_fall_that_chance_would_bring_is_no_alarm() -> None:
    # Queries at 40 and 80 tokens in 40 rounds: mean 1.5, deviations of 20 tokens each, so the variance of the mean is
    # (400 + 400) / 80**2 * 2 / 1 = 0.25. Between two such windows one standard error is 0.707.
    falling = (60 + 20, 60 - 20), (58 + 20, 58 - 20)
    assert windows(*falling, (56 + 20, 56 - 20)) == ["good", None, None]
    # 60 -> 30 tokens a query is a fall of 0.75: more than one standard error, less than two.
    assert windows(*falling, (30 + 20, 30 - 20), num_sigmas=1.0) == ["good", None, "bad"]
    assert windows(*falling, (30 + 20, 30 - 20), num_sigmas=2.0) == ["good", None, None]
    assert windows(*falling, (56 + 20, 56 - 20), num_sigmas=0) == ["good", None, "bad"]


def test_windows_that_stay_low_are_bad_even_if_none_falls_on() -> None:
    # Queries at 2 tokens above and below the mean of 40 rounds: the variance of a window is (4 + 4) / 80**2 * 2 =
    # 0.0025, that of a mean of three 0.0025 / 3, and of two such means apart 0.00167: standard error 0.0408.
    def stream(*means: int) -> list[str | None]:
        return windows(*((mean + 2, mean - 2) for mean in means), num_sigmas=2.5)

    # From 60 to 55 1/3 tokens in 40 rounds is 0.117, or 2.9 standard errors; to 57 1/3, 0.067, or 1.6.
    assert stream(60, 60, 60, 55, 56, 55) == ["good", "good", "good", None, None, "bad"]
    assert stream(60, 60, 60, 57, 58, 57) == ["good", "good", "good", None, None, None]
    # A drift over more windows than are known is the text's own.
    assert "bad" not in stream(60, 60, 60, 59, 58, 59, 58, 57, 58, 57, 56, 57, 56, 55, 56)


def test_a_window_is_good_only_if_none_of_the_last_ones_was_better() -> None:
    # Up again by chance within a decline: these weights are not the ones to go back to. The deviations are those of
    # above: 45 -> 48 -> 51 tokens in 40 rounds are less than 60, but not by more than 9 standard errors.
    means = (60, 45, 48, 51)
    declining = ((mean + 8, mean - 8) for mean in means)
    assert windows(*declining, num_sigmas=9) == ["good", None, None, "good"]


def test_after_an_abrupt_fall_no_window_is_good_until_the_fall_is_undone_or_forgotten() -> None:
    # Only the first window was sound, and those that follow are level among themselves.
    assert watch([3.0, 2.0, 2.0, 2.0, 2.0, 2.0]) == ["good", None, None, None, None, "bad"]
    # Where the verdict is never "bad", the first window is out of mind after eight more.
    rising = [2.0, 2.5, 2.6, 2.7, 2.8, 2.85, 2.9, 2.95, 2.975]
    assert watch([3.0, *rising])[1:] == [None] * 8 + ["good"]
    # A stream that got harder: the verdict clears what was remembered, and the new lengths count.
    assert watch([3.0] * 3 + [2.0] * 5) == ["good"] * 3 + [None, None, "bad", "good", "good"]


def test_a_fall_amid_chance_is_undone_before_a_window_is_good() -> None:
    # 20 queries of 30 rounds, a deviation of 1 token a round: 0.041 for a window. A fall of 1 is 17 standard errors.
    for seed in range(100):
        chance, safe, verdicts = random.Random(seed), FailSafe(), []
        for mean in [2.0] + [1.0] * 5:
            for _ in range(20):
                accepted = round(30 * mean + chance.gauss(0, 30**0.5))
                verdict = safe.observe(QueryResult(10.0, 100, num_rounds=30, num_accepted=accepted, seconds=1.0))
            verdicts.append(verdict)
        assert verdicts[0] == "good"
        assert "good" not in verdicts[1 : verdicts.index("bad")]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (CostAwareBandit, {"buffer_queries": 0}, "buffer_queries=0 must be at least 1"),
        (CostAwareBandit, {"alpha": 1.5}, "alpha=1.5 must be between 0 and 1"),
        (CostAwareBandit, {"epsilon": (0.3, -0.1)}, r"epsilon=\(0.3, -0.1\) must be between 0 and 1"),
        (AlwaysUpdate, {"buffer_queries": 0}, "buffer_queries=0 must be at least 1"),
        (FailSafe, {"num_windows": 1}, "num_windows=1 must be at least 2"),
        (FailSafe, {"num_sigmas": -1.0}, "num_sigmas=-1.0 must be at least 0"),
    ],
)
def test_a_setting_out_of_range_raises(kind: type, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
