"""The cards in model_cards/ are what the code that publishes a drafter would write for the bundled checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_specdec import load_drafter

ROOT = Path(__file__).parent.parent
BUNDLED = ROOT / "examples" / "tiny-code"


@pytest.mark.parametrize("name", ["dflash"])
def test_card_of_bundled_drafter_is_in_step_with_its_records(name: str) -> None:
    drafter = load_drafter(BUNDLED / name)
    card = drafter.model_card(f"tiny-code-{name}").content
    assert (ROOT / "model_cards" / f"tiny-code-{name}.md").read_text() == card


def test_every_bundled_model_has_its_card_beside_it() -> None:
    folders = [folder for folder in BUNDLED.iterdir() if folder.is_dir()]
    assert folders
    assert [folder.name for folder in folders if not (folder / "README.md").is_file()] == []
