"""Headers of pickles are those of the tensors that they hold; anything else is refused, and no code is run."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec.hub.tensors import describe, load_tensors, pickle_header

TENSORS = {
    "f32": torch.zeros(2, 3),
    "f64": torch.zeros(1, dtype=torch.float64),
    "f16": torch.zeros(4, dtype=torch.float16),
    "bf16, a view": torch.arange(10).to(torch.bfloat16)[2:5],
    "i64": torch.arange(3),
    "bool": torch.zeros(5, dtype=torch.bool),
    "transposed": torch.zeros(2, 3).T,
    "expanded": torch.zeros(1).expand(7, 9),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(1.0),
    "parameter": torch.nn.Parameter(torch.zeros(2)),
}


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "from before torch 1.6"])
def test_list_is_what_torch_loads(kind: Callable[..., Any], zipped: bool, tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    torch.save(kind(TENSORS), file, _use_new_zipfile_serialization=zipped)
    found = pickle_header(file, "it")
    assert found == {name: describe(tensor, file) for name, tensor in load_tensors(file, "it").items()}
    assert {name: found[name].shape for name in TENSORS} == {name: tuple(t.shape) for name, t in TENSORS.items()}


def test_state_dict_of_a_module_is_listed(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "weights.bin")
    assert {name: tensor.shape for name, tensor in pickle_header(tmp_path / "weights.bin", "it").items()} == {
        "weight": (3, 2),
        "bias": (3,),
    }


def rewritten(
    file: Path, change: Callable[[str, bytes], bytes] = lambda name, data: data, compression: int = zipfile.ZIP_STORED
) -> None:
    """Writes the same archive with other contents, or compressed."""
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, change(name, data))


class Call:
    """Pickled, it is a call of anything."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "content",
    [
        lambda ran: {"a": Call(Path.touch, ran)},
        lambda ran: {"a": Call(eval, f"open({str(ran)!r}, 'w')")},
        lambda ran: {"a": Call(getattr, "text", "upper")},
        lambda ran: Call(torch.nn.Linear, 2, 2),
    ],
    ids=["call", "eval", "getattr", "class"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_is_no_tensor_is_refused_and_not_run(content: Any, protocol: int, tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    torch.save({"a": torch.zeros(1)}, file)
    hostile = pickle.dumps(content(tmp_path / "ran"), protocol=protocol)
    rewritten(file, lambda name, data: hostile if name.endswith("data.pkl") else data)
    with pytest.raises(ValueError, match="cannot be read as plain tensors: .*Nothing in it was run"):
        pickle_header(file, "it")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda name, data: data[:-4] if "/data/" in name else data,
        lambda name, data: data[: len(data) // 2] if name.endswith("data.pkl") else data,
        lambda name, data: data.replace(b"FloatStorage", b"ObjectStorage") if name.endswith("data.pkl") else data,
    ],
    ids=["fewer numbers", "half a table", "objects"],
)
def test_damage_is_refused(change: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3, 5)}, tmp_path / "weights.bin")
    rewritten(tmp_path / "weights.bin", change)
    for read in (pickle_header, load_tensors):
        with pytest.raises(ValueError, match="cannot be read as plain tensors"):
            read(tmp_path / "weights.bin", "it")


def test_compressed_archive_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "weights.bin")
    rewritten(tmp_path / "weights.bin", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="cannot be read as plain tensors") as refused:
        pickle_header(tmp_path / "weights.bin", "it")
    assert "it is compressed" in str(refused.value.__cause__)


@pytest.mark.parametrize("content", [torch.zeros(3), [torch.zeros(3)], {"a": 1}, {"a": torch.zeros(3).to_sparse()}])
def test_content_other_than_tensors_by_name_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.bin")
    with pytest.raises(ValueError, match="must hold tensors by name|cannot be read as plain tensors"):
        pickle_header(tmp_path / "weights.bin", "it")
