"""What progress shows, on standard error."""

from __future__ import annotations

import time

import pytest

from hf_specdec import progress
from hf_specdec.progress import Progress


def test_the_last_line_counts_and_ends_at_the_lowered_total(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("target writes", 30, unit="tokens", max_seconds=90) as shown:
        shown.update(20)
        shown.total -= 10
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("target writes, at most 1.5 min: 100%")
    assert " 20/20 [" in last
    assert last.endswith(" tokens/s]")


def test_only_the_first_process_and_only_work_that_is_left_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for total, first in ((30, False), (0, True)):
        with Progress("target writes", total, unit="tokens", shown=first) as shown:
            shown.update(20)
            shown.total -= 10
    assert not capsys.readouterr().err


def test_without_a_terminal_time_passes_in_lines_while_a_step_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with Progress("a step", 2, unit="steps", interval_s=0.001) as shown:
        while len(lines) < 4:  # nothing is done meanwhile
            time.sleep(0.001)
            lines += capsys.readouterr().err.splitlines()
        shown.update()
    lines += capsys.readouterr().err.splitlines()
    assert all(line.startswith("a step: ") and "\r" not in line for line in lines)
    assert " 0/2 [" in lines[3]
    assert " 1/2 [" in lines[-1]


def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "quiet", True)
    with Progress("a step", 2, unit="steps") as shown:
        shown.update()
    assert not capsys.readouterr().err
