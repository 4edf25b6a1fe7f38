from __future__ import annotations

from pathlib import Path

import pytest

from hf_specdec.benchmark import records
from hf_specdec.benchmark.records import Note, Record
from hf_specdec.benchmark.report import COLUMNS, markdown
from tests.benchmark.samples import METHODS, call, environment, run


@pytest.fixture(scope="module")
def made() -> list[Record]:
    return run()


def test_records_come_back_as_they_were_written(made: list[Record], tmp_path: Path) -> None:
    made = [*made, Note("marks that end a line elsewhere: \u2028 \u2029 \u0085")]
    records.write(made, tmp_path / "report.jsonl")
    assert records.read(tmp_path / "report.jsonl") == made


def test_a_file_that_is_no_record_raises(tmp_path: Path) -> None:
    (tmp_path / "report.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="line 1 is not a record of hf_specdec.benchmark"):
        records.read(tmp_path / "report.jsonl")


def test_records_without_their_environment_raise(made: list[Record]) -> None:
    with pytest.raises(ValueError, match="must be the environment"):
        markdown(made[1:])


def test_the_markdown_table_has_a_row_per_method_and_a_cell_per_column(made: list[Record]) -> None:
    text = markdown(made)
    greedy = text.split("## Greedy")[1].split("##")[0]
    whole, groups = greedy.split("Budgets")[0].split("by group of prompts:")
    assert groups.strip().startswith("| method | mt_bench | translation | summarization |")
    assert len([line for line in groups.splitlines() if line.startswith("| ")]) == 2 + 1 + len(METHODS)
    rows = [line for line in whole.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 2 + len(METHODS)  # heading, rule, baselines
    assert all(row.count(" | ") == len(COLUMNS) - 1 for row in rows)
    assert "Budgets of ddtree (dflash):" in text
    stages = greedy.split("by stage:")[1]
    assert stages.strip().startswith("| method | draft | tree | verify | accept | commit |")
    assert len([line for line in stages.splitlines() if line.startswith("| ")]) == 2 + len(METHODS)
    assert "no compiler" in text, "what was not measured is said"
    assert "gap up to 1e-06" in text, "a difference is shown with its gap"
    for fact in ("A machine, 2 cores", "torch 2.13.0", "hf-specdec bench --quick", "2026-11-21"):
        assert fact in text


def test_a_run_with_only_a_baseline_still_gives_a_report() -> None:
    made = [environment(), call("plain, eager")]
    assert "plain, eager" in markdown(made)
