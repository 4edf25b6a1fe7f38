from __future__ import annotations

import math
import time
from typing import Any

import pytest

import hf_specdec.decoding.stopwatch as stopwatch
from hf_specdec.decoding.stats import STAGES, SpeculationStats
from hf_specdec.decoding.stopwatch import FOLD_AT, Stopwatch
from tests.method_table import METHODS
from tests.targets import make_target, one_prompt


def test_laps_add_up_to_the_time_between_start_and_the_last_lap() -> None:
    watch = Stopwatch("cpu")
    began = watch._last
    for stage in ("draft", "verify", "draft"):
        time.sleep(0.001)
        watch.lap(stage)
    assert sum(watch.seconds.values()) == pytest.approx(watch._last - began)
    assert list(watch.seconds) == ["draft", "verify"]


class FakeEvent:
    """A CUDA event on a device that stands still until it is told to go on; the times are in milliseconds."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.moment = device.recorded = device.recorded + 10.0

    def query(self) -> bool:
        return self.moment <= self.device.reached

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.reached = max(self.device.reached, self.moment)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query() and other.query(), "CUDA raises where an event has not passed"  # noqa: PT018
        return other.moment - self.moment


class FakeDevice:
    recorded = 0.0
    reached = 0.0
    waits = 0


def test_laps_on_cuda_do_not_wait_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(Stopwatch, "_record", lambda self: FakeEvent(device))
    watch: Any = stopwatch.Stopwatch("cuda")
    for _ in range(FOLD_AT):
        watch.lap("draft")
        watch.lap("verify")
        device.reached = device.recorded - 25  # the device lags behind the host
    assert device.waits == 0
    assert len(watch._unread) < FOLD_AT, "laps that have passed are not kept"
    assert watch.seconds == pytest.approx({"draft": FOLD_AT * 0.01, "verify": FOLD_AT * 0.01})
    assert device.waits == 1


@pytest.mark.parametrize("method", METHODS)
def test_the_stages_of_a_call_add_up_to_its_time(method: str) -> None:
    target = make_target()
    drafter = METHODS[method](target)
    target.generate(**one_prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    stats = drafter.stats
    assert stats is not None
    assert list(stats.stage_time_s) == list(STAGES)
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in stats.stage_time_s.values())
    assert sum(stats.stage_time_s.values()) <= stats.total_time_s
    assert stats.draft_time_s == stats.stage_time_s["draft"] + stats.stage_time_s["tree"]


def test_statistics_without_a_call_have_no_times() -> None:

    assert set(SpeculationStats().stage_time_s.values()) == {0.0}


def test_events_are_recorded_on_the_stream_of_the_watchs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device may be the current one when a call begins."""
    recorded: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self, stream: Any = "of the current device") -> None:
            recorded.append(stream)

    monkeypatch.setattr(stopwatch.torch.cuda, "Event", Event)
    monkeypatch.setattr(stopwatch.torch.cuda, "current_stream", lambda device: f"of {device}")
    stopwatch.Stopwatch("cuda:1").lap("draft")
    assert recorded == ["of cuda:1", "of cuda:1"]
