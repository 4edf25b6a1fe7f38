"""README and `docs/`: what they link to is there, and the quick start runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
