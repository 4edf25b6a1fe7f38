from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from hf_specdec.benchmark import records
from hf_specdec.benchmark.records import Note, Picture, Record
from hf_specdec.benchmark.report import markdown, page
from hf_specdec.benchmark.report.columns import COLUMNS
from hf_specdec.decoding.trace import Trace
from hf_specdec.visualize.page import pictures
from tests.benchmark.samples import METHODS, call, environment, run
from tests.browser import look_at, needs_browser
from tests.methods import METHODS as DRAFTERS
from tests.targets import make_target, one_prompt, tiny_tokenizer


@pytest.fixture(scope="module")
def made() -> list[Record]:
    drafter = DRAFTERS["specblock"](make_target())
    drafter.trace = Trace()
    make_target().generate(**one_prompt(), assistant_model=drafter, max_new_tokens=20, do_sample=False)
    return [*run(), Picture("specblock", "a tree", pictures(drafter.trace, tiny_tokenizer(), range(3)))]


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
    assert "no compiler" in text, "what was not measured is said"
    assert "gap up to 1e-06" in text, "a difference is shown with its gap"
    for fact in ("A machine, 2 cores", "torch 2.13.0", "hf-specdec bench --quick", "2026-11-21"):
        assert fact in text


def test_the_page_asks_the_network_for_nothing_and_runs_no_script(made: list[Record]) -> None:
    html = page(made)
    assert "<script" not in html
    assert not re.findall(r"""(?:src|href)=['"](?!data:|#)""", html)
    assert "@import" not in html
    assert "http://www.w3.org/2000/svg" in html
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html)


def test_names_that_look_like_html_are_shown_as_they_are() -> None:
    name = "<b>&ddtree"
    made = [environment(target="<i>"), call("plain, eager"), call(name, seconds=0.5)]
    html = page(made)
    assert "<b>" not in html
    assert "<i>" not in html
    assert "&lt;b&gt;&amp;ddtree" in html


def test_every_chart_has_a_description_axes_with_units_and_its_numbers_in_a_table(made: list[Record]) -> None:
    html = page(made)
    figures = re.findall(r"<figure>.*?</figure>", html, flags=re.DOTALL)
    # Two temperatures of seven charts; the budgets have two more charts each, of one table.
    assert len(figures) == 2 * 8
    for figure in figures:
        assert re.search(r"<svg[^>]* role=\"img\" aria-label=\"[^\"]{10,}\"", figure)
        texts = [unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)</text>", figure)]
        units = [text for text in texts if re.search(r"\((times|ms|tokens|drafted nodes)|^share of|^tokens per", text)]
        assert units, texts
        assert "<table>" in figure or "table above" in figure


def test_a_run_with_only_a_baseline_still_gives_a_report() -> None:
    made = [environment(), call("plain, eager")]
    assert "plain, eager" in markdown(made)
    assert "Greedy" in page(made)


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_the_page_without_overlaps_or_complaints(
    made: list[Record], tmp_path: Path, dark: bool
) -> None:
    seen = look_at(page(made), tmp_path, dark=dark)
    assert seen.console == []
    assert seen.problems == []
    assert seen.counts["figure"] == 16
    assert seen.counts["svg"] == 16 + 3
    assert (seen.background == "rgb(20, 24, 29)") == dark
