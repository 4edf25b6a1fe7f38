"""The cards in model_cards/ are what the code that publishes a drafter would write for the bundled checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.drafters.card import may_overwrite

ROOT = Path(__file__).parent.parent
CHECKPOINTS = sorted(file.parent for file in ROOT.glob("examples/*/*/config.json"))
DRAFTERS = [folder for folder in CHECKPOINTS if folder.name != "target"]
NAMES = [f"{folder.parent.name}-{folder.name}" for folder in DRAFTERS]


@pytest.mark.parametrize("folder", DRAFTERS, ids=NAMES)
def test_card_of_bundled_drafter_is_in_step_with_its_records(folder: Path) -> None:
    # To write it anew: `python model_cards/generate.py`.
    drafter: Any = load_drafter(folder)
    card = drafter.model_card(folder.relative_to(ROOT).as_posix()).content
    assert (ROOT / "model_cards" / f"{folder.parent.name}-{folder.name}.md").read_text() == card
    beside = (folder / "README.md").read_text()
    assert beside == card or not may_overwrite(beside)


@pytest.mark.parametrize("folder", DRAFTERS, ids=NAMES)
def test_bundled_drafter_has_no_problems(folder: Path) -> None:
    assert inspect_drafter(folder).problems == []


def test_there_is_no_card_without_a_drafter() -> None:
    cards = {file.stem for file in (ROOT / "model_cards").glob("*.md")}
    assert cards == set(NAMES)


def test_every_bundled_model_has_its_card_beside_it() -> None:
    assert len(CHECKPOINTS) > 2
    assert [folder.name for folder in CHECKPOINTS if not (folder / "README.md").is_file()] == []
