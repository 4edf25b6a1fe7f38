"""What is saved is complete or not there, whatever ends the saving."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec import export_drafter, load_drafter
from hf_specdec.hub.saving import PROBE_BYTES, check_writable, going_on
from tests.method_table import METHODS
from tests.targets import fresh_target


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """No file may have more bytes: a write beyond them fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target(dtype=torch.float32)


def stopped(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.combinations(8)
@pytest.mark.parametrize("method", ["eagle3", "specbound", "specbranch", "causal_lm_chain"])
@pytest.mark.parametrize("full", [True, False])
def test_a_save_that_fails_leaves_the_drafter_that_was_there(
    method: str, full: bool, target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter: Any = METHODS[method](target)
    drafter.save_pretrained(tmp_path / "there")
    before = content(tmp_path / "there")
    assert not any("unfinished" in name for name in before)
    with torch.no_grad():
        for parameter in (drafter.draft_model if method == "specbranch" else drafter.saved_model).parameters():
            parameter.add_(1)
    for folder in ("there", "new"):
        if full:
            with small_disk(600), pytest.raises(OSError, match=f"Nothing was saved to '.*{folder}': .*too large"):
                drafter.save_pretrained(tmp_path / folder)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(Path, "rglob", stopped)
                with pytest.raises(KeyboardInterrupt):
                    drafter.save_pretrained(tmp_path / folder)
    assert content(tmp_path / "there") == before
    assert not (tmp_path / "new").exists()
    drafter.save_pretrained(tmp_path / "there")
    assert content(tmp_path / "there").keys() == before.keys()
    assert content(tmp_path / "there") != before


def test_an_export_that_fails_leaves_nothing(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter: Any = METHODS["eagle3"](target)
    with small_disk(2000), pytest.raises(OSError, match="Nothing was saved to '.*out': .*too large"):
        export_drafter(drafter, tmp_path / "out", target_id="owner/target")
    assert not (tmp_path / "out").exists()


def test_shards_and_single_files_of_an_earlier_save_are_replaced(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter: Any = METHODS["eagle3"](target)
    for size in ("5KB", "50GB", "5KB", "8KB"):
        drafter.save_pretrained(tmp_path, max_shard_size=size)
        names = {file.name for file in tmp_path.glob("model*")}
        assert ("model.safetensors" in names) == (size == "50GB")
        shards = sorted(name for name in names if "-of-" in name)
        assert all(name.endswith(f"-of-{len(shards):05d}.safetensors") for name in shards)
        for name, tensor in load_drafter(tmp_path).state_dict().items():
            assert torch.equal(tensor, drafter.state_dict()[name])


def test_a_folder_is_tried_without_a_trace(tmp_path: Path) -> None:
    check_writable(tmp_path / "a/b")
    assert not (tmp_path / "a").exists()
    with (
        small_disk(PROBE_BYTES - 1),
        pytest.raises(OSError, match="Nothing can be written to '.*a/b': File too large. Make"),
    ):
        check_writable(tmp_path / "a/b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(OSError, match="Nothing can be written to '/proc/drafter': No such file"):
        check_writable(Path("/proc/drafter"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyboardInterrupt(), "again"),
        (OSError("full"), "full; again"),
        (RuntimeError("CUDA error"), "CUDA error; again"),
    ],
)
def test_a_stop_says_how_to_go_on(error: BaseException, message: str) -> None:
    with pytest.raises(type(error)) as raised, going_on(lambda: "again"):
        raise error
    assert str(raised.value) == message
