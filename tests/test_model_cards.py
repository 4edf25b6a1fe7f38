"""The cards in model_cards/ are what the code that publishes a drafter would write for the bundled checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.drafters.card import may_overwrite

ROOT = Path(__file__).parent.parent
BUNDLED = ROOT / "examples" / "tiny-code"
CHECKPOINTS = sorted(file.parent for file in BUNDLED.glob("*/config.json"))
DRAFTERS = [folder.name for folder in CHECKPOINTS if folder.name != "target"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_card_of_bundled_drafter_is_in_step_with_its_records(name: str) -> None:
    # To write it anew: `python model_cards/generate.py`.
    drafter: Any = load_drafter(BUNDLED / name)
    card = drafter.model_card(f"examples/tiny-code/{name}").content
    assert (ROOT / "model_cards" / f"tiny-code-{name}.md").read_text() == card
    beside = (BUNDLED / name / "README.md").read_text()
    assert beside == card or not may_overwrite(beside)


@pytest.mark.parametrize("name", DRAFTERS)
def test_bundled_drafter_has_no_problems(name: str) -> None:
    assert inspect_drafter(BUNDLED / name).problems == []


def test_there_is_no_card_without_a_drafter() -> None:
    cards = {file.stem for file in (ROOT / "model_cards").glob("*.md")}
    assert cards == {f"tiny-code-{name}" for name in DRAFTERS}


def test_every_bundled_model_has_its_card_beside_it() -> None:
    assert len(CHECKPOINTS) > 2
    assert [folder.name for folder in CHECKPOINTS if not (folder / "README.md").is_file()] == []
