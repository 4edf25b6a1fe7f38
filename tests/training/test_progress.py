"""What the progress bar of tokens shows."""

from __future__ import annotations

import pytest

from hf_specdec.training.progress import token_progress


def test_the_bar_counts_tokens_and_ends_at_the_lowered_total(capsys: pytest.CaptureFixture[str]) -> None:
    with token_progress("target writes", 30, max_seconds=90) as progress:
        progress.update(20)
        progress.total -= 10
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("target writes, at most 1.5 min: 100%")
    assert " 20/20 [" in last
    assert last.endswith(" tokens/s]")


def test_only_the_first_process_and_only_work_that_is_left_shows_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with token_progress("target writes", 30, shown=False) as progress:
        progress.update(20)
        progress.total -= 10
    with token_progress("target writes", 0):
        pass
    assert not capsys.readouterr().err
