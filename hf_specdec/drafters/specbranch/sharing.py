"""A draft model in memory that two processes share: its tensors lie there once, and both run it.

`SharedModel` copies the tensors of a model into memory that has a place for each of them, makes the model use those
places, and pickles the rest of the model behind them. `open_shared` builds the same model in another process, on the
same tensors. The model that was shared works as before: its parameters are the same objects, tied weights stay tied,
it can be saved, copied and pickled, and what is written into its tensors is seen on both sides. Only their `data_ptr()`
has changed. Tensors that somebody else made from its storages, as an earlier `state_dict()`, keep the old storages.

Torch's own way of sharing would do for the tensors, but takes its memory from `/dev/shm`, of which containers often
have 64 MB, and an open file for every tensor.
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

ALIGNMENT = 64  # bytes; as torch's own storages on a CPU


class CannotShareError(ValueError):
    """The model cannot be given to another process; the message says why."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        start: first byte of its storage.
        nbytes: bytes of its storage, which tensors may share.
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
        """The tensor that lies there; it keeps the memory alive."""
        storage = _bytes(memory, self.start, self.nbytes).untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class SharedModel:
    """A model whose tensors lie in memory that another process can open.

    Attributes:
        address: what `open_shared` needs in the other process.
        inherited: the open file that the other process must inherit; none on Windows, where the memory has a name.

    Raises:
        CannotShareError: a tensor is not an ordinary one on the CPU, or the rest of the model cannot be pickled. The
            model is as it was.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        tensors = _tensors(model)
        places, size = _lay_out(tensors)
        rest = _pickled(model, tensors, places)
        memory, self.inherited, name = _allocate(size + len(rest))
        memory[size:] = rest
        self.address = (name, size, len(rest))
        _move(tensors, places, memory)
        self.memory = memory  # while it is there, no other tensor can have one of these addresses
        self.model = weakref.ref(model)
        self.pointers = [tensor.data_ptr() for tensor in tensors]
        for file in self.inherited:
            weakref.finalize(self, os.close, file)

    def holds(self, model: PreTrainedModel) -> bool:
        """Whether this is the model, and none of its tensors was replaced."""
        return self.model() is model and self.pointers == [tensor.data_ptr() for tensor in _all_tensors(model)]


def open_shared(name: int | str, size: int, rest: int) -> PreTrainedModel:
    """The model at a `SharedModel.address`, in the process that inherited its file."""
    memory = mmap.mmap(name, 0) if isinstance(name, int) else _named(name, size + rest)
    file = io.BytesIO(memory[size : size + rest])
    places: list[Place] = pickle.load(file)
    tensors = [place.tensor(memory) for place in places]
    parameters = [
        nn.Parameter(tensor, requires_grad=False) if place.is_parameter else tensor
        for tensor, place in zip(tensors, places, strict=True)
    ]
    return _Unpickler(file, parameters).load()


class _Pickler(pickle.Pickler):
    """Writes tensors that have a place as the number of that place."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

    def persistent_id(self, value: Any) -> int | None:
        return self.numbers.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in the program that was started, which another process does not "
                "run: move it into a module"
            )
        if isinstance(value, FunctionType) and value.__module__ == output_capturing.__name__:
            return _no_hook, ()  # of a model that was asked for hidden states once; the draft model never is
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
    """Tied weights once; without empty tensors, which have no place."""
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()]


def _tensors(model: PreTrainedModel) -> list[Tensor]:
    tensors = _all_tensors(model)
    for tensor in tensors:
        ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
        if not ordinary or tensor.device.type != "cpu":
            raise CannotShareError(
                f"the draft model has a {type(tensor).__name__} of {tensor.layout} on {tensor.device}, and only "
                "ordinary tensors on the CPU can be given to another process"
            )
    return tensors


def _lay_out(tensors: Sequence[Tensor]) -> tuple[list[Place], int]:
    """A place per tensor, the same bytes for tensors of one storage; and the bytes of all."""
    starts: dict[tuple[int, int], int] = {}
    places, size = [], 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in starts:
            starts[key] = size
            size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        places.append(
            Place(
                starts[key],
                storage.nbytes(),
                tensor.dtype,
                int(tensor.storage_offset()),
                tuple(tensor.shape),
                tensor.stride(),
                isinstance(tensor, nn.Parameter),
            )
        )
    return places, size


def _pickled(model: PreTrainedModel, tensors: Sequence[Tensor], places: Sequence[Place]) -> bytes:
    file = io.BytesIO()
    pickle.dump(places, file)
    try:
        _Pickler(file, tensors).dump(model)
    except Exception as error:  # whatever an attribute's own pickling may raise
        raise CannotShareError(f"the draft model cannot be pickled: {error}") from error
    return file.getvalue()


def _move(tensors: Sequence[Tensor], places: Sequence[Place], memory: mmap.mmap) -> None:
    """Copies tensors to their places one by one, each of which then frees its old storage."""
    copied: set[int] = set()
    for tensor, place in zip(tensors, places, strict=True):
        if place.start not in copied:
            source = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            _bytes(memory, place.start, place.nbytes).copy_(source)
            copied.add(place.start)
        with torch.inference_mode(tensor.is_inference()):  # `data` must be of the same kind
            tensor.data = place.tensor(memory)


def _bytes(memory: mmap.mmap, start: int, count: int) -> Tensor:
    """[count] uint8 in the memory, with a storage that has no more than these."""
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)


def _allocate(size: int) -> tuple[mmap.mmap, tuple[int, ...], int | str]:
    """Memory, the files that another process must inherit to open it, and what it is called there.

    The system frees it when the last process that uses it has ended, however that ended.
    """
    if sys.platform == "win32":
        name = f"hf_specdec-{uuid.uuid4()}"
        return _named(name, size), (), name
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("hf_specdec-draft-model")
    else:
        with tempfile.TemporaryFile(prefix="hf_specdec-") as nameless:
            file = os.dup(nameless.fileno())
    os.truncate(file, size)
    return mmap.mmap(file, size), (file,), file


def _named(name: str, size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size, tagname=name)
    raise AssertionError("memory has a name on Windows only")
