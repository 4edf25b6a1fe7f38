"""What a file of `torch.save` holds, by name, shape and type, without torch and without running anything in it.

Such a file is a zip archive: a small pickle of names and shapes, and the numbers of each tensor in an entry of its own,
which stays closed here. The pickle is read by an unpickler that knows only the names that tensors need, all of which
only take notes; whatever else it asks for is refused. `tensors.py` loads the numbers.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.hub.files import MAX_JSON_BYTES, StoredTensor

# torch's class of a storage -> safetensors' name of its numbers, and their bytes.
_STORAGES = {
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}


@dataclass(frozen=True)
class _Noted:
    """A tensor as the pickle describes it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Numbers:
    """The numbers that tensors are views of."""

    dtype: str
    count: int


def _note_tensor(numbers: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Noted:
    whole = [offset, *shape, *stride]
    if not isinstance(numbers, _Numbers) or any(type(part) is not int or part < 0 for part in whole):
        raise pickle.UnpicklingError("a tensor is described by something else than numbers")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and last >= numbers.count:
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} reaches beyond its {numbers.count} numbers")
    return _Noted(tuple(shape), numbers.dtype)


def _note_parameter(tensor: Any, *_: Any) -> Any:
    return tensor


_KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _note_tensor,
    ("torch._utils", "_rebuild_parameter"): _note_parameter,
}


class _NoteTaker(pickle.Unpickler):
    """Unpickles names and shapes of the archive's only pickle."""

    def __init__(self, archive: zipfile.ZipFile, entry: str) -> None:
        self.file = archive.open(entry)
        super().__init__(self.file)
        self.archive, self.folder = archive, entry.removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return name
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no tensor")
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> _Numbers:
        kind, storage, key, _, count = pid
        if kind != "storage" or storage not in _STORAGES or type(count) is not int:
            raise pickle.UnpicklingError("it refers to something else than numbers")
        dtype, size = _STORAGES[storage]
        stored = self.archive.getinfo(f"{self.folder}data/{key}")
        if stored.file_size != count * size or stored.compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError(f"{stored.filename} has {stored.file_size} bytes, not {count} of {size}")
        return _Numbers(dtype, count)


def pickle_header(file: Path, name: str) -> dict[str, StoredTensor]:
    """What a pickle of tensors holds; its numbers are not read.

    Args:
        file: a zip archive, as torch writes since 1.6. One from before has no such table: torch itself, with
            `weights_only`, has to read it.
        name: what the user asked for, for messages.

    Raises:
        ValueError: it is damaged, holds anything but tensors by name, or describes tensors that it does not hold.
    """
    if not zipfile.is_zipfile(file):
        from hf_specdec.hub.tensors import described_by_torch

        return described_by_torch(file, name)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if len(entries) != 1 or entries[0].file_size > MAX_JSON_BYTES:
                raise pickle.UnpicklingError("it has no table of tensors, or one of a size that none has")
            content = _NoteTaker(archive, entries[0].filename).load()
    except Exception as error:  # damage shows as errors of many kinds; whatever it is, nothing was run
        raise unreadable(file, name, error) from error
    if not isinstance(content, dict) or not all(isinstance(tensor, _Noted) for tensor in content.values()):
        raise ValueError(f"{file.name} of {name!r} must hold tensors by name, but holds something else.")
    return {str(key): StoredTensor(tensor.shape, tensor.dtype, file) for key, tensor in content.items()}


def unreadable(file: Path, name: str, error: Exception) -> ValueError:
    """The error for a pickle that is damaged or hostile."""
    return ValueError(
        f"{file.name} of {name!r} ({file.stat().st_size} bytes) cannot be read as plain tensors: it is damaged, or "
        f"holds objects whose loading would run code ({type(error).__name__}). Nothing in it was run: use a drafter "
        "saved as safetensors."
    )
