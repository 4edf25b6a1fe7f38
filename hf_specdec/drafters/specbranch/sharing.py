"""A draft model in memory shared by two processes: its tensors are stored once, and both processes run it.

`SharedModel` copies the tensors of a model to shared memory, makes the model use them there, and pickles the rest of
the model after them. `open_shared` builds the same model in another process, on the same tensors. The shared model
works as before: its parameters are the same objects, tied weights stay tied, it can be saved, copied and pickled, and
writes to its tensors are visible in both processes. Only their `data_ptr()` changes. Tensors made earlier from its
storages, such as those of an earlier `state_dict()`, keep the old storages.

torch's own tensor sharing uses `/dev/shm`, which containers often limit to 64 MB, and an open file for every tensor.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

ALIGNMENT = 64  # bytes; as for torch's storages on a CPU


class CannotShareError(ValueError):
    """The model cannot be shared with another process; the message says why."""


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in the shared memory.

    Attributes:
        start: first byte of its storage.
        nbytes: size of its storage, which several tensors may share.
        dtype: the tensor's.
        offset: the tensor's first element in its storage.
        shape: the tensor's.
        stride: the tensor's.
        is_parameter: whether it is an `nn.Parameter`.
    """

    start: int
    nbytes: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_parameter: bool

    def tensor(self, memory: mmap.mmap) -> Tensor:
        """The tensor at this location; it keeps the memory alive."""
        storage = _bytes(memory, self.start, self.nbytes).untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class SharedModel:
    """A model whose tensors are in memory that another process can open.

    Attributes:
        address: what `open_shared` needs in the other process.
        inherited: open file that the other process must inherit; none on Windows, where the memory has a name.

    Raises:
        CannotShareError: a tensor is not an ordinary one on the CPU, or the rest of the model cannot be pickled. The
            model is then unchanged.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        tensors = _tensors(model)
        locations, size = _locate(tensors)
        rest = _pickled(model, tensors, locations)
        memory, self.inherited, name = _allocate(size + len(rest))
        memory[size:] = rest
        self.address = (name, size, len(rest))
        _move(tensors, locations, memory)
        self.memory = memory  # as long as it exists, no other tensor can have one of these addresses
        self.model = weakref.ref(model)
        self.pointers = [tensor.data_ptr() for tensor in tensors]
        for file in self.inherited:
            weakref.finalize(self, os.close, file)

    def holds(self, model: PreTrainedModel) -> bool:
        """Whether this is the model, with none of its tensors replaced."""
        return self.model() is model and self.pointers == [tensor.data_ptr() for tensor in _all_tensors(model)]


def open_shared(name: int | str, size: int, rest: int) -> PreTrainedModel:
    """The model at a `SharedModel.address`, in a process that has inherited its file."""
    memory = mmap.mmap(name, 0) if isinstance(name, int) else _named(name, size + rest)
    file = io.BytesIO(memory[size : size + rest])
    locations: list[TensorLocation] = pickle.load(file)
    tensors = [location.tensor(memory) for location in locations]
    parameters = [
        nn.Parameter(tensor, requires_grad=False) if location.is_parameter else tensor
        for tensor, location in zip(tensors, locations, strict=True)
    ]
    return _Unpickler(file, parameters).load()


class _Pickler(pickle.Pickler):
    """Pickles each shared tensor as its number."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def persistent_id(self, value: Any) -> int | None:
        return self.numbers.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in the main program, which the other process does not run: move it "
                "into a module"
            )
        if isinstance(value, FunctionType) and value.__module__ == output_capturing.__name__:
            return _no_hook, ()  # of a model that returned hidden states before; drafting does not request them
        return NotImplemented


def _no_hook() -> Callable[..., None]:
    return _ignore


def _ignore(*arguments: Any) -> None:
    """A hook that does nothing."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self.tensors[number]


def _all_tensors(model: PreTrainedModel) -> list[Tensor]:
    """The tensors of a model: tied weights once, without empty tensors."""
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()]


def _tensors(model: PreTrainedModel) -> list[Tensor]:
    tensors = _all_tensors(model)
    for tensor in tensors:
        ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
        if not ordinary or tensor.device.type != "cpu":
            raise CannotShareError(
                f"the draft model has a {type(tensor).__name__} of {tensor.layout} on {tensor.device}, but only "
                "ordinary tensors on the CPU can be shared with another process"
            )
    return tensors


def _locate(tensors: Sequence[Tensor]) -> tuple[list[TensorLocation], int]:
    """A location per tensor, the same bytes for tensors of one storage; and the total size in bytes."""
    starts: dict[tuple[int, int], int] = {}
    locations, size = [], 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in starts:
            starts[key] = size
            size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        locations.append(
            TensorLocation(
                starts[key],
                storage.nbytes(),
                tensor.dtype,
                int(tensor.storage_offset()),
                tuple(tensor.shape),
                tensor.stride(),
                isinstance(tensor, nn.Parameter),
            )
        )
    return locations, size


def _pickled(model: PreTrainedModel, tensors: Sequence[Tensor], locations: Sequence[TensorLocation]) -> bytes:
    file = io.BytesIO()
    pickle.dump(locations, file)
    try:
        _Pickler(file, tensors).dump(model)
    except Exception as error:  # the pickling of an attribute may raise anything
        raise CannotShareError(f"the draft model cannot be pickled: {error}") from error
    return file.getvalue()


def _move(tensors: Sequence[Tensor], locations: Sequence[TensorLocation], memory: mmap.mmap) -> None:
    """Copies tensors to their locations one by one, so that each frees its old storage."""
    copied: set[int] = set()
    for tensor, location in zip(tensors, locations, strict=True):
        if location.start not in copied:
            source = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            _bytes(memory, location.start, location.nbytes).copy_(source)
            copied.add(location.start)
        with torch.inference_mode(tensor.is_inference()):  # required by the assignment to `data`
            tensor.data = location.tensor(memory)


def _bytes(memory: mmap.mmap, start: int, count: int) -> Tensor:
    """[count] uint8 of the memory, with a storage of exactly these bytes."""
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)


def _allocate(size: int) -> tuple[mmap.mmap, tuple[int, ...], int | str]:
    """The memory, the files that another process must inherit to open it, and its name there.

    The system frees it when the last process that uses it has ended.
    """
    if sys.platform == "win32":
        name = f"hf_specdec-{uuid.uuid4()}"
        return _named(name, size), (), name
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("hf_specdec-draft-model")
    else:
        with tempfile.TemporaryFile(prefix="hf_specdec-") as unnamed:
            file = os.dup(unnamed.fileno())
    os.truncate(file, size)
    return mmap.mmap(file, size), (file,), file


def _named(name: str, size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size, tagname=name)
    raise AssertionError("memory has a name on Windows only")
