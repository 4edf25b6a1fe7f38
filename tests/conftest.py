"""Settings that hold for all tests: no network, one thread, a fixed seed per test."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished rows stay in the batch, for tests that look at rows of it by their number."""
    monkeypatch.setattr("hf_specdec.decoding.loop.SpeculativeDecoding.drop_finished_rows", lambda self, generator: None)
