"""README and `docs/`: what they link to is there, and the quick start runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for place in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        file, _, heading = place.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), place
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings]
            assert heading in slugs, place


def test_the_quick_start_runs_as_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    plain: Any = None
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL):
        exec(block, names)
        if plain is None:
            plain = names["model"].generate(**names["inputs"], max_new_tokens=64, do_sample=False)
        assert names["output"].tolist() == plain.tolist(), block
    assert "def quicksort(" in capsys.readouterr().out
    assert set(names["both"].stats.by_source) == {"ddtree", "suffix"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What a reader has after the first lines of the quick start; files go to a folder of their own."""
    names: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    exec(blocks(ROOT / "docs" / "index.md", "python")[0], names)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return names | {"stream": [names["inputs"]]}


@pytest.mark.one_in(2)  # the second takes 40 s
@pytest.mark.parametrize("page", ["benchmarks", "guarantees", "adaptation"])
def test_code_of_the_guide_runs_as_printed(page: str, begun: dict[str, Any]) -> None:
    found = blocks(ROOT / "docs" / f"{page}.md", "python")
    assert found
    for block in found:
        exec(block, begun)


def test_code_of_readme_runs_on_the_bundled_pair(begun: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks(ROOT / "README.md", "python")
    for theirs, ours in (
        ("Qwen/Qwen3-8B", "examples/tiny-code/target"),
        ("z-lab/Qwen3-8B-DFlash-b16", "examples/tiny-code/dflash"),
        (', dtype="bfloat16", device_map="cuda"', ""),
    ):
        assert theirs in block
        block = re.sub(rf"(?<!lab/){re.escape(theirs)}(?!-)", ours, block)
    exec(block, begun)
    assert "mean acceptance length" in capsys.readouterr().out


COMMAND = re.compile(r"hf-specdec (\w+)((?:[^\n`|#]|\\\n)*)")


def test_options_of_printed_commands_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    printed = {(name, option) for page in PAGES for name, rest in COMMAND.findall(page.read_text().replace("\\\n", " "))
               for option in re.findall(r"(?<!\S)--[\w-]+", rest)}  # fmt: skip
    assert len(printed) > 20
    known = {}
    for name in {name for name, _ in printed}:
        for suite in ([], ["--suite", "speed"]) if name == "bench" else ([],):  # which has options of its own
            with pytest.raises(SystemExit):
                main([name, *suite, "--help"])
        known[name] = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert {(name, option) for name, option in printed if option not in known[name]} == set()


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
