"""What the line of progress says, in a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from hf_specdec.training.progress import TokenProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Stands still unless it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_file_gets_a_line_every_half_minute_and_one_at_the_end(clock: Clock) -> None:
    stream = io.StringIO()
    with TokenProgress("target writes", 9000, stream=stream, clock=clock) as shown:
        for _ in range(8):
            clock.now += 10
            shown.add(1000)
        shown.skip(1000)
    assert stream.getvalue().splitlines() == [
        "target writes: 3,000 of 9,000 tokens, 100.0 tokens/s, 1:00 left",
        "target writes: 6,000 of 9,000 tokens, 100.0 tokens/s, 0:30 left",
        "target writes: 8,000 of 8,000 tokens, 100.0 tokens/s, 0:00 left",
    ]


def test_a_terminal_gets_one_line_that_is_written_over(clock: Clock) -> None:
    stream = Terminal()
    with TokenProgress("target states", 4, stream=stream, clock=clock) as shown:
        clock.now += 2
        shown.add(1)
    line = "\rtarget states: 1 of 4 tokens, 0.5 tokens/s, 0:06 left\x1b[K"
    assert stream.getvalue() == line + line + "\n"


def test_what_is_left_heeds_the_time_limit(clock: Clock) -> None:
    stream = io.StringIO()
    with TokenProgress("target writes", 90000, max_seconds=40, stream=stream, clock=clock) as shown:
        for _ in range(2):
            clock.now += 30
            shown.add(100)
    first, second = stream.getvalue().splitlines()[:2]
    assert first.endswith("0:10 left")
    assert second.endswith("time is up, last batch")


def test_work_that_was_done_before_shows_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    with TokenProgress("target writes", 0, stream=stream, clock=clock):
        pass
    assert not stream.getvalue()
