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
