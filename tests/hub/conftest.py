"""Fixtures for the tests of loading and publishing: saved drafters, their targets, and a Hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec.methods.dflash.network import DFlashDrafter
from tests.hub.loopback_hub import LoopbackHub
from tests.method_table import make_ddtree
from tests.targets import make_target


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("llama", dtype=torch.float32)


@pytest.fixture
def drafter(target: PreTrainedModel) -> DFlashDrafter:
    return make_ddtree(target)


@pytest.fixture
def folder(drafter: DFlashDrafter, tmp_path: Path) -> Path:
    """A saved drafter."""
    drafter.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """Where the client looks for a token; there is none."""
    return tmp_path / "token"


@pytest.fixture
def no_token(tmp_path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client finds no token and no cache of the machine's user."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(token_file))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub(no_token: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """An empty Hub on loopback that the client talks to."""
    with LoopbackHub() as server:
        server.point_client_here(monkeypatch)
        yield server
