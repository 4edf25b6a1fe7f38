"""Checkpoints made to harm: a clear error from load_drafter and inspect_drafter, nothing run, nothing left behind."""

from __future__ import annotations

import json
import pickle
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec import inspect_drafter, load_drafter
from hf_specdec.drafters.dflash import DFlashDrafter
from tests.methods import make_medusa, make_specblock

GIGABYTE = 2**30


class Payload:
    """Pickled, it makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, folder: Path) -> Iterator[None]:
    """The folder stays as the test left it, nothing ran, and no memory for what a header claims was taken."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert not (tmp_path / "ran").exists()
    names = {file.name for file in folder.iterdir()}
    assert not names & {"__pycache__", "model.safetensors.tmp"}
    kilobytes = 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GIGABYTE / kilobytes


def refused(folder: Path, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        load_drafter(folder)
    problems = inspect_drafter(folder).problems
    assert problems, "inspect found nothing wrong"


def write_header(file: Path, header: bytes, claimed: int | None = None, data: bytes = b"") -> None:
    file.write_bytes(struct.pack("<Q", len(header) if claimed is None else claimed) + header + data)


def tensor(shape: list[int], size: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}


@pytest.mark.parametrize("claimed", [10 * GIGABYTE, 2**63, 2**64 - 1, 0])
def test_header_that_claims_gigabytes_is_refused(folder: Path, claimed: int) -> None:
    write_header(folder / "model.safetensors", b'{"fc.weight":{}}', claimed)
    refused(folder, "model.safetensors of '.*saved' .* cannot be read as safetensors")


def test_sparse_file_with_a_header_of_gigabytes_is_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 10 * GIGABYTE))
        file.truncate(11 * GIGABYTE)  # holes: takes no room on the disk
    refused(folder, "cannot be read as safetensors")


@pytest.mark.parametrize(
    "described",
    [
        tensor([2**40, 2**40], 4),
        tensor([2**62], 4),
        tensor([-1, 4], 4),
        tensor([1], 2**50),
        tensor([1], -4),
        {"dtype": "F32", "shape": [1]},
        {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]},
        [],
    ],
    ids=[
        "shape",
        "one axis",
        "negative axis",
        "beyond the file",
        "negative size",
        "no offsets",
        "no such type",
        "list",
    ],
)
def test_tensors_of_absurd_shape_are_refused(folder: Path, described: Any) -> None:
    write_header(folder / "model.safetensors", json.dumps({"fc.weight": described}).encode(), data=b"\0" * 4)
    refused(folder, "cannot be read as safetensors")


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 2**62},
        {"hidden_size": -32},
        {"vocab_size": 0},
        {"num_attention_heads": 0},
        {"intermediate_size": True},
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0] * 10**6}},
    ],
    ids=["layers", "width", "negative width", "no vocabulary", "no heads", "no number", "taps"],
)
def test_configs_of_absurd_size_are_refused(folder: Path, fields: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    refused(folder, "config.json|another shape")


def test_config_of_endless_depth_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(folder, "config.json of '.*saved' is not valid JSON")


def test_config_of_gigabytes_is_refused_unread(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(10 * GIGABYTE)
    refused(folder, "config.json of '.*saved' has 10737418240 bytes, more than the 67108864 that are read")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "secret")
    message = f"{name} of '.*saved' is a link to '.*secret', outside the folder; files elsewhere are not opened"
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_shard_that_is_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "secret")
    (folder / "weights.safetensors").symlink_to(tmp_path / "secret")
    index = {"weight_map": {"fc.weight": "weights.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "weights.safetensors of '.*saved' is a link to '.*secret', outside the folder")


def test_link_inside_the_folder_is_followed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights-of-today")
    (folder / "model.safetensors").symlink_to("weights-of-today")
    assert load_drafter(folder).fc.weight.any()


def test_config_cannot_send_the_loader_elsewhere(folder: Path, tmp_path: Path, drafter: DFlashDrafter) -> None:
    (tmp_path / "stolen.safetensors").write_bytes(b"?")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "../stolen.safetensors"}))
    with pytest.warns(UserWarning, match="has transformers_weights="):
        assert torch.equal(load_drafter(folder).fc.weight, drafter.fc.weight)
    (folder / "config.json").write_text(json.dumps(config | {"weights_file": "../stolen.safetensors"}))
    refused(folder, "has weights_file='../stolen.safetensors': the reader of dflash does not know")


def carries_code(folder: Path, tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\nclass DFlashDraftModel: pass\n"
    for name in ("dflash.py", "modeling_drafter.py", "custom_generate/generate.py", "__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoModel": "dflash.DFlashDraftModel", "AutoModelForCausalLM": "modeling_drafter.DFlashDraftModel"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))


def test_code_of_a_repo_is_not_run(
    folder: Path, tmp_path: Path, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    carries_code(folder, tmp_path)
    load_drafter(folder, target)
    assert not inspect_drafter(folder).problems
    target.save_pretrained(tmp_path / "model")
    carries_code(tmp_path / "model", tmp_path)
    monkeypatch.chdir(tmp_path / "model")
    load_drafter(tmp_path / "model", target)


PICKLES: dict[str, tuple[Callable[..., Any], str]] = {
    "SpecBlock": (make_specblock, "vocab_mapping.pt"),
    "Medusa": (make_medusa, "medusa_lm_head.pt"),
}


@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_pickle_with_a_payload_is_not_run(kind: str, protocol: int, target: PreTrainedModel, tmp_path: Path) -> None:
    make, file = PICKLES[kind]
    folder = tmp_path / "hostile"
    if kind == "Medusa":
        folder.mkdir()
        (folder / "config.json").write_text('{"medusa_num_heads": 3}')
    else:
        make(target).save_pretrained(folder)
    (folder / file).write_bytes(pickle.dumps({"t2d": Payload(tmp_path / "ran")}, protocol=protocol))
    with pytest.raises(ValueError, match=rf"{file}.* cannot be read|{file}"):
        load_drafter(folder)
    inspect_drafter(folder)


def test_heads_of_absurd_numbers_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    folder.mkdir()
    (folder / "config.json").write_text('{"medusa_num_heads": 3}')
    name = "0.999999999999.linear.weight"
    write_header(folder / "model.safetensors", json.dumps({name: tensor([1, 1], 4)}).encode(), data=b"\0" * 4)
    refused(folder, "with gaps: the file is not whole")
