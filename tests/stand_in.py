"""A stand-in for CUDA devices: tensors that say they are on one, with real arithmetic in host memory underneath.

It shows on a CPU what a GPU would: a mix of devices raises, every wait of the host for a device is noted, and a copy
that the host does not wait for arrives only once the host has waited for an event, a stream or a device behind it.
A stream that reads what another one has written, without having waited for it, raises. Nothing runs beside the host: it
shows nothing of speed, and nothing of memory that is written again while another stream still reads it.

A tensor is a wrapper (`StandIn`) whose operations run on a tensor of the host. Operations that make tensors reach it by
kernels of `aten::empty` for the dispatch key CUDA, which torch for CPUs leaves empty. Of `torch.cuda`, what the library
uses is replaced as long as the stand-in is in use.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hf_specdec.drafting.drafter import Drafter

NUM_DEVICES = 2
STAGED_BYTES = 64 * 1024  # a copy that is not waited for, from pageable memory, waits only if it is larger than this
# Operations whose kernels for CUDA wait for the device: the size of their result, or a check, depends on values.
# `multinomial` reads a check of its input in the oldest torch that we support.
WAITS_INSIDE = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "multinomial", "bincount", "_unique2", "_unique",
     "unique_dim", "unique_consecutive", "repeat_interleave"}
)  # fmt: skip
TAKES_SCALARS = frozenset({"masked_fill", "masked_fill_", "fill", "fill_", "where", "index_put", "index_put_"})
NOT_ARRIVED = {True: 77, False: -7.0e7}  # what a copy holds before it has arrived: by whether it is of integers


class Host:
    """What the host has waited for, and where in the library, since the last `clear`.

    Waits of other threads than the main one are in `beside`.
    """

    seen: ClassVar[dict[Stream, int]] = {}  # how much of each stream it has waited for
    waits: ClassVar[list[str]] = []
    beside: ClassVar[list[str]] = []
    lock: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    def note(cls, what: str) -> None:
        frame: Any = sys._getframe(1)
        while frame.f_back is not None and "/hf_specdec/" not in frame.f_code.co_filename:
            frame = frame.f_back
        with cls.lock:
            waits = cls.waits if threading.current_thread() is threading.main_thread() else cls.beside
            waits.append(f"{what} ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})")


class Stream:
    """A queue of a device. Work is done at once, but copies to the host arrive when they are waited for."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", _index(device))
        self.flying: list[tuple[Tensor, Tensor]] = []  # copies: where to, and the values
        self.seen: dict[Stream, int] = {self: 0}  # the number of its own operations, and those of others before them

    def follow(self, seen: dict[Stream, int]) -> None:
        """What comes next comes after so many operations of each stream."""
        _merge(self.seen, seen)

    def arrive(self, number: int | None = None) -> None:
        """The first `number` copies arrive; all by default."""
        with Host.lock:
            for goal, values in self.flying[:number]:
                goal.copy_(values)
            del self.flying[:number]

    def synchronize(self) -> None:
        Host.note("stream")
        self.arrive()
        _merge(Host.seen, self.seen)

    def wait_stream(self, other: Stream) -> None:
        self.follow(other.seen)

    def wait_event(self, event: Event) -> None:
        self.follow(event.seen)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A place in a stream; waiting for it makes the copies before it arrive, and those of no other stream."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.stream: Stream | None = None
        self.before: list[tuple[Tensor, Tensor]] = []
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.stream = Cuda.current_stream() if stream is None else stream
        self.before = list(self.stream.flying)
        self.seen = dict(self.stream.seen)

    def synchronize(self) -> None:
        Host.note("event")
        self._arrive()

    def query(self) -> bool:
        self._arrive()
        return True

    def _arrive(self) -> None:
        _merge(Host.seen, self.seen)
        if self.stream is not None:
            with Host.lock:
                self.stream.arrive(sum(any(copy is each for each in self.before) for copy in self.stream.flying))

    def elapsed_time(self, later: Event) -> float:
        assert self.stream is not None, "an event that was never recorded"
        return 1.0


def _merge(seen: dict[Stream, int], other: dict[Stream, int]) -> None:
    with Host.lock:
        for stream, number in other.items():
            seen[stream] = max(number, seen.get(stream, 0))


class Cuda:
    """What stands in for functions of `torch.cuda`."""

    here = threading.local()
    default: ClassVar[dict[int, Stream]] = {}
    written: ClassVar[dict[int, tuple[Stream, int]]] = {}  # by address: the latest operation that has written there

    @classmethod
    def current_device(cls) -> int:
        return getattr(cls.here, "device", 0)

    @classmethod
    def exchange_device(cls, index: int) -> int:
        before = cls.current_device()
        if index >= 0:
            cls.here.device = index
        return before if index >= 0 else -1

    @classmethod
    def set_device(cls, device: Any) -> None:
        cls.exchange_device(_index(device))

    @classmethod
    def current_stream(cls, device: Any = None) -> Stream:
        index = _index(device)
        streams = cls.here.__dict__.setdefault("streams", {})
        return streams.get(index) or cls.default.setdefault(index, Stream(index))

    @classmethod
    @contextmanager
    def stream(cls, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        streams = cls.here.__dict__.setdefault("streams", {})
        index, device = _index(stream.device), cls.current_device()
        before, streams[index] = streams.get(index), stream
        cls.exchange_device(index)
        try:
            yield
        finally:
            streams[index] = before
            cls.exchange_device(device)

    @classmethod
    def synchronize(cls, device: Any = None) -> None:
        Host.note("device")
        cls.waited(device)
        cls.current_stream(device).arrive()

    @classmethod
    def waited(cls, device: Any) -> None:
        """The host has waited for the current stream of a device."""
        _merge(Host.seen, cls.current_stream(device).seen)

    @classmethod
    def use(cls, device: Any, read: Iterable[Tensor], write: Iterable[Tensor] = ()) -> None:
        """An operation in the current stream of a device.

        Raises:
            RuntimeError: the stream has not waited for the operation that has written what this one reads.
        """
        stream = cls.current_stream(device)
        with Host.lock:  # threads may share a stream
            stream.follow(Host.seen)
            stream.seen[stream] += 1
            for part in read:
                writer, number = cls.written.get(part.untyped_storage().data_ptr(), (stream, 0))
                if number > stream.seen.get(writer, 0):
                    raise RuntimeError(
                        "A tensor is used in a stream that has not waited for the one that has written it"
                    )
            for part in write:
                cls.written[part.untyped_storage().data_ptr()] = stream, stream.seen[stream]


def _index(device: Any) -> int:
    """Of a device in any form; None for the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return Cuda.current_device() if index is None else index


class StandIn(Tensor):
    """A tensor on a stand-in device.

    Args:
        inner: in host memory.
        device: where it says it is.
    """

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> StandIn:
        made: StandIn = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=device, requires_grad=False,
        )  # fmt: skip
        made.held = inner
        return made

    def __init__(self, inner: Tensor, device: torch.device) -> None: ...

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"StandIn({self.held!r}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def tolist(self) -> Any:
        Host.note("tolist")
        Cuda.use(self.device, [self])
        Cuda.waited(self.device)
        return self.held.tolist()

    def numpy(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy.")

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def record_stream(self, stream: Stream) -> None:
        pass

    # torch's own methods of these names look for the driver of the device.

    def item(self) -> Any:
        Host.note("item")
        Cuda.use(self.device, [self])
        Cuda.waited(self.device)
        return self.held.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        return self if self.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)

    def __invert__(self) -> Tensor:
        return self.bitwise_not()

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        return _copy(self, src, non_blocking)

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        places = torch.ops.aten.nonzero(self)
        return tuple(places.unbind(1)) if as_tuple else places

    def __getitem__(self, key: Any) -> Tensor:
        found = StandIn(self.held[_index_key(key, self.device)], self.device)
        if _is_advanced(key):
            Cuda.use(self.device, [self], [found])
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        is_fill = not isinstance(value, Tensor) or value.numel() == 1
        key = _index_key(key, self.device, is_fill=is_fill)
        if isinstance(value, Tensor) and value.device != self.device:
            if value.dim() > 0 and _is_advanced(key):
                raise RuntimeError(f"Expected all tensors to be on {self.device}, but the value is on {value.device}")
            if not isinstance(value, StandIn):
                _note_upload(value, non_blocking=False)
        Cuda.use(self.device, [self, *([value] if isinstance(value, StandIn) else [])], [self])
        self.held[key] = _inner(value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name == "copy_":
            return _copy(*args, **kwargs)
        if name == "_to_copy":
            return _to_copy(args[0], **kwargs)
        if name == "_fused_sdp_choice":
            return 0  # attention in plain operations
        given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        device = _device_of(func, name, args, given)
        _note_waits(name, args, kwargs)
        wrappers = {id(part.held): part for part in given if isinstance(part, StandIn)}
        goal = kwargs.get("device")
        if goal is not None:
            device, kwargs["device"] = torch.device(goal), torch.device("cpu")
        kwargs.pop("pin_memory", None)
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))

        def wrapped(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            if id(part) not in wrappers:
                return StandIn(part, device) if device.type == "cuda" else part
            assert wrappers[id(part)].shape == part.shape, f"{func} changes the shape of its argument"
            return wrappers[id(part)]

        made = tree_map(wrapped, result)
        alias = [returned.alias_info for returned in func._schema.returns]
        if device.type == "cuda" and not any(each is not None and not each.is_write for each in alias):  # no view
            new = [part for part in tree_leaves(made) if isinstance(part, StandIn)]
            Cuda.use(device, [part for part in given if isinstance(part, StandIn)], new)
        return made


def _inner(part: Any) -> Any:
    return part.held if isinstance(part, StandIn) else part


def _device_of(func: Any, name: str, args: Any, given: list[Tensor]) -> torch.device:
    """The device that an operation runs on.

    Raises:
        RuntimeError: its tensors are on several, where CUDA would refuse that.
    """
    devices = {part.device for part in given if isinstance(part, StandIn)}
    takes_scalars = name in TAKES_SCALARS or torch.Tag.pointwise in func.tags
    indices = [] if name not in ("index", "index_put", "index_put_") else tree_leaves(args[1])
    for part in given:
        is_index = any(part is index for index in indices)
        if not isinstance(part, StandIn) and not (takes_scalars and part.dim() == 0) and not is_index:
            devices.add(part.device)
    if len(devices) != 1:
        places = sorted(map(str, devices))
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} found {', '.join(places)}")
    return devices.pop()


def _note_waits(name: str, args: Any, options: dict[str, Any]) -> None:
    if name in WAITS_INSIDE and (name != "repeat_interleave" or options.get("output_size") is None):
        Host.note({"_local_scalar_dense": "item"}.get(name, name))
    elif name in ("index", "index_put", "index_put_"):
        fills = name != "index" and args[2].numel() == 1
        _index_key(tuple(args[1]), args[0].device, is_fill=fills)


def _index_key(key: Any, device: torch.device, *, is_fill: bool = False) -> Any:
    """A key of a tensor's entries for the tensor in host memory; notes what it waits for.

    Args:
        key: as the caller has passed it.
        device: of the tensor.
        is_fill: whether one number is written to all entries, which a mask may select without waiting.
    """
    parts = key if isinstance(key, tuple) else (key,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    for part in parts:
        if isinstance(part, list):
            Host.note("upload of indices")
        elif isinstance(part, Tensor):
            if not isinstance(part, StandIn):
                Host.note("upload of indices")
            elif part.device != device:
                raise RuntimeError(f"indices should be on {device} or the host, not on {part.device}")
            if part.dtype in (torch.bool, torch.uint8):
                if not (is_fill and len(tensors) == 1):  # that runs as `masked_fill`
                    Host.note("boolean index")
            elif part.dim() == 0:
                Host.note("item")
    return tuple(map(_inner, key)) if isinstance(key, tuple) else _inner(key)


def _is_advanced(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return any(isinstance(part, (Tensor, list)) for part in parts)


def _copy(goal: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`aten::copy_`, where at least one of the two is a stand-in."""
    if isinstance(goal, StandIn):
        if not isinstance(source, StandIn):
            _note_upload(source, non_blocking)
        read = _meeting(source, goal.device) if isinstance(source, StandIn) else []
        Cuda.use(goal.device, [goal, *read], [goal])
        goal.held.copy_(_inner(source))
        return goal
    assert isinstance(source, StandIn)
    if non_blocking and is_pinned(goal):
        _fly(goal, source.held.to(goal.dtype).expand(goal.shape), source.device)
    else:
        Host.note("download")
        Cuda.use(source.device, [source])
        Cuda.waited(source.device)
        goal.copy_(source.held)
    return goal


def _to_copy(source: StandIn, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    """`aten::_to_copy` of a stand-in."""
    options.pop("pin_memory", None)
    values = torch.ops.aten._to_copy(source.held, **options)
    device = source.device if device is None else torch.device(device)
    if device.type == "cuda":
        made = StandIn(values, torch.device("cuda", _index(device)))
        Cuda.use(made.device, _meeting(source, made.device), [made])
        return made
    Cuda.use(source.device, [source])
    if not non_blocking:
        Host.note("download")
        Cuda.waited(source.device)
        return values
    goal = pinned(torch.empty_like(values))  # torch pins what it makes for such a copy
    _fly(goal, values, source.device)
    return goal


def _meeting(source: StandIn, device: torch.device) -> list[Tensor]:
    """What a copy to a device reads: between two devices, their current streams wait for each other."""
    Cuda.current_stream(device).wait_stream(Cuda.current_stream(source.device))
    return [source]


def _fly(goal: Tensor, values: Tensor, device: torch.device) -> None:
    goal.fill_(True if goal.dtype == torch.bool else NOT_ARRIVED[not goal.is_floating_point()])
    with Host.lock:
        Cuda.current_stream(device).flying.append((goal, values.clone()))


def _note_upload(source: Tensor, non_blocking: bool) -> None:
    staged = is_pinned(source) or source.numel() * source.element_size() <= STAGED_BYTES
    if not (non_blocking and staged):
        Host.note("upload")


def pinned(tensor: Tensor) -> Tensor:
    """Marks a tensor as one in pinned memory."""
    tensor.stand_in_pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Whether a tensor of the host is in pinned memory."""
    return getattr(tensor, "stand_in_pinned", False)


def _make(size: Any, device: Any, make: Callable[..., Tensor], **options: Any) -> Tensor:
    made = make(size, **{name: value for name, value in options.items() if value is not None})
    # What nobody has written must not look like a result.
    made.fill_(True if made.dtype == torch.bool else NOT_ARRIVED[not (made.is_floating_point() or made.is_complex())])
    found = StandIn(made, torch.device("cuda", _index(device)))
    Cuda.use(found.device, [], [found])
    return found


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> Tensor:  # fmt: skip
    return _make(size, device, torch.empty, dtype=dtype, memory_format=memory_format)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> Tensor:  # fmt: skip
    return _make(size, device, lambda size, **options: torch.empty_strided(size, stride, **options), dtype=dtype)


class Generator(torch.Generator):
    """Of any device; it draws in host memory."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


def place(module: Any, device: str) -> Any:
    """Moves a model, or a drafter with those that it consists of; their weights need no gradients."""
    if isinstance(module, torch.nn.Module):
        module.requires_grad_(False).to(device)
    for part in vars(module).values():
        for each in part if isinstance(part, (list, tuple)) else [part]:
            if isinstance(each, (torch.nn.Module, Drafter)):
                place(each, device)
    return module


def _making(op: Any) -> Callable[..., Tensor]:
    """A kernel for an operation that makes a tensor by resizing an empty one."""

    def make(*arguments: Any, device: Any = None, pin_memory: Any = None, **options: Any) -> Tensor:
        made = StandIn(op(*arguments, device=torch.device("cpu"), **options), torch.device("cuda", _index(device)))
        Cuda.use(made.device, [], [made])
        return made

    return make


@contextmanager
def devices() -> Iterator[type[Host]]:
    """In this context, `cuda:0` and `cuda:1` exist; gives what the host waits for."""
    if torch.cuda.is_available():
        pytest.skip("the stand-in is for machines without a GPU")
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "CUDA")
    library.impl("empty_strided", _empty_strided, "CUDA")
    for op in ("arange.default", "arange.start", "arange.start_step", "eye.default", "eye.m", "linspace.default",
               "randperm.default", "randperm.generator", "tril_indices.default", "triu_indices.default"):  # fmt: skip
        name, overload = op.split(".")
        kernel = _making(getattr(getattr(torch.ops.aten, name), overload))
        library.impl(op.removesuffix(".default"), kernel, "CUDA")
    empty = torch.empty

    def pinning(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = empty(*arguments, **options)
        return pinned(made) if pin_memory else made

    def uploading(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Of numbers of the host: torch copies them below the level of the wrapper."""

        def made(data: Any, *arguments: Any, device: Any = None, **options: Any) -> Tensor:
            if isinstance(data, StandIn):
                return make(data, *arguments, device=device, **options)
            there = make(data, *arguments, **options)
            device = None if device is None else torch.device(device)
            if device is None or device.type != "cuda":
                return there if device is None else there.to(device)
            return there.to(torch.device("cuda", _index(device)))

        return made

    with pytest.MonkeyPatch.context() as patch:
        for name, replaced in {
            "_lazy_init": lambda: None,
            "_exchange_device": Cuda.exchange_device,
            "_maybe_exchange_device": Cuda.exchange_device,
            "current_device": Cuda.current_device,
            "set_device": Cuda.set_device,
            "device_count": lambda: NUM_DEVICES,
            "current_stream": Cuda.current_stream,
            "stream": Cuda.stream,
            "Stream": Stream,
            "Event": Event,
            "synchronize": Cuda.synchronize,
        }.items():
            patch.setattr(torch.cuda, name, replaced)
        patch.setattr(torch.accelerator, "synchronize", Cuda.synchronize)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch, "empty", pinning)
        patch.setattr(torch, "tensor", uploading(torch.tensor))
        patch.setattr(torch, "as_tensor", uploading(torch.as_tensor))
        patch.setattr(Cuda, "default", {})
        patch.setattr(Cuda, "written", {})
        patch.setattr(Host, "seen", {})
        patch.setattr(Host, "waits", [])
        patch.setattr(Host, "beside", [])
        # Modules get new parameters on a move: the data of the old ones cannot become a wrapper.
        patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
        try:
            yield Host
        finally:
            library._destroy()
