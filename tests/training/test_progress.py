"""What the line of progress says, in a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from hf_specdec.training import progress
from hf_specdec.training.progress import TokenProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its one element."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_file_gets_a_line_every_half_minute_and_one_at_the_end(clock: list[float]) -> None:
    stream = io.StringIO()
    with TokenProgress("target writes", 9000, stream=stream) as shown:
        for _ in range(8):
            clock[0] += 10
            shown.add(1000)
        shown.skip(1000)
    assert stream.getvalue().splitlines() == [
        "target writes: 3,000 of 9,000 tokens, 100.0 tokens/s, 1:00 left",
        "target writes: 6,000 of 9,000 tokens, 100.0 tokens/s, 0:30 left",
        "target writes: 8,000 of 8,000 tokens, 100.0 tokens/s, 0:00 left",
    ]


def test_a_terminal_gets_one_line_that_is_written_over(clock: list[float]) -> None:
    stream = Terminal()
    with TokenProgress("target states", 4, stream=stream) as shown:
        clock[0] += 2
        shown.add(1)
    line = "\rtarget states: 1 of 4 tokens, 0.5 tokens/s, 0:06 left\x1b[K"
    assert stream.getvalue() == line + line + "\n"


def test_what_is_left_heeds_the_time_limit(clock: list[float]) -> None:
    stream = io.StringIO()
    with TokenProgress("target writes", 90000, max_seconds=40, stream=stream) as shown:
        for _ in range(2):
            clock[0] += 30
            shown.add(100)
    first, second = stream.getvalue().splitlines()[:2]
    assert first.endswith("0:10 left")
    assert second.endswith("time is up, last batch")


def test_work_that_was_done_before_shows_nothing(clock: list[float]) -> None:
    stream = io.StringIO()
    with TokenProgress("target writes", 0, stream=stream):
        pass
    assert not stream.getvalue()
