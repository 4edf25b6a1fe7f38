"""The cards of the bundled drafters are what the code that publishes a drafter would write for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.hub.card import MARKER

ROOT = Path(__file__).parent.parent
CHECKPOINTS = sorted(file.parent for file in ROOT.glob("examples/*/*/config.json"))
DRAFTERS = [folder for folder in CHECKPOINTS if folder.name != "target"]
NAMES = [f"{folder.parent.name}-{folder.name}" for folder in DRAFTERS]


@pytest.mark.parametrize("folder", DRAFTERS, ids=NAMES)
def test_card_of_bundled_drafter_is_in_step_with_its_records(folder: Path) -> None:
    # To write it anew: `python model_cards/generate.py`.
    drafter: Any = load_drafter(folder)
    card = drafter.model_card(folder.relative_to(ROOT).as_posix()).content
    beside = (folder / "README.md").read_text()
    assert beside == card or MARKER not in beside


@pytest.mark.parametrize("folder", DRAFTERS, ids=NAMES)
def test_card_of_bundled_drafter_claims_what_was_measured(folder: Path) -> None:
    read = ModelCard.load(folder / "README.md", ignore_metadata_errors=False).data
    measured = json.loads((folder / "measurements.json").read_text())
    claimed = {result.metric_name: result.metric_value for result in read.eval_results or []}
    for method, numbers in measured["methods"].items():
        assert claimed[f"Speedup, {method}, greedy"] == numbers["speedup"]
    assert read.license == "apache-2.0"


@pytest.mark.parametrize("folder", DRAFTERS, ids=NAMES)
def test_bundled_drafter_has_no_problems(folder: Path) -> None:
    assert inspect_drafter(folder).problems == []


def test_every_bundled_model_has_its_card_beside_it() -> None:
    assert len(CHECKPOINTS) > 2
    assert [folder.name for folder in CHECKPOINTS if not (folder / "README.md").is_file()] == []
