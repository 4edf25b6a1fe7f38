"""Rounds of fixed shapes: the verify forward is captured once per shape as a CUDA graph, and replayed.

On a GPU, launching the kernels of a forward one by one takes longer than running them. A CUDA graph launches all of
them at once, but only for the shapes and addresses that it was captured with. Therefore trees are padded to a few
numbers of nodes and the prefix to a few lengths (a mask, computed on the device, hides entries beyond a row's length),
nodes are written at a fixed entry after the prefix (`TreeCache.place_nodes`), and buffers are reused by later calls
(`Workspace`), so that a graph captured in one `generate` call is replayed in the next. `static_verify.py` has the
forward.

The graphs of a model share one memory pool: only one of them runs at a time, and their outputs are copied out of it, so
that the temporary tensors of all shapes may lie at the same addresses. A drafter has a pool of its own, because it may
run beside its target (`drafting/thread.py`).

A forward that cannot be captured runs without a graph on the same buffers, with bitwise the same result. Tests without
a GPU replace the graph by an emulation.
"""

from __future__ import annotations

import bisect
import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.targets.attention import own_implementation
from hf_specdec.decoding.targets.rotary import rotary_limits
from hf_specdec.decoding.upstream import experts_of

logger = logging.getLogger(__name__)

# Drafted nodes, root not counted, to which trees are padded and for which times are measured; larger trees are padded
# to multiples of the last one.
DRAFT_SIZES = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_CAPTURED, MOST_SLAB_SHAPES = 64, 4  # of a workspace; those that were not used for the longest time leave
# Entries; longer prefixes are padded to this times a power of 2, from PREFIX_STEP on to its multiples. On an H100 a
# padded entry of an 8B model costs 44 ns a round on paper. With 0.15 s for a capture, steps of 7,000 cost least.
FIRST_PREFIX, PREFIX_STEP = 256, 8192
FIRST_RUNS = 2  # of a shape that compile_mode="auto" does not capture yet: many shapes never come again
CompileMode = Literal["none", "auto", "reduce-overhead"]
Forward = Callable[[], tuple[Tensor, ...]]


class CudaGraph:
    """A forward with fixed addresses as one launch, on the current device.

    Args:
        forward: reads and writes the same tensors in each call.
        pool: `pool` of an existing graph that never runs at the same time, to share its memory; None for a new pool.

    Attributes:
        outputs: of the last replay, outside of the pool: replays of graphs that share it do not change them.
        pool: the handle of its memory pool, valid as long as a graph with it exists.

    Raises:
        RuntimeError: an operation cannot be captured, for example a device sync.
    """

    def __init__(self, forward: Forward, pool: Any = None) -> None:
        device = torch.cuda.current_device()
        stream = capture_stream(device)
        with _CAPTURING:  # another thread may capture a drafter meanwhile
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                forward()  # warm-up: chooses and compiles kernels, allocates their workspaces
                outputs = forward()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.inference_mode(False):  # they outlive the call, as inputs do
                self.outputs = tuple(map(torch.empty_like, outputs))
            self._graph = torch.cuda.CUDAGraph()
            numbers = torch.cuda.default_generators[device]
            before = numbers.clone_state()
            try:
                # The outer context restores the current stream if the capture fails. "thread_local" lets other threads
                # use the device meanwhile: one may draft, or train.
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    for kept, output in zip(self.outputs, forward(), strict=True):
                        kept.copy_(output)
            except BaseException:
                numbers.graphsafe_set_state(before)  # otherwise it raises, as if the capture were still active
                raise
        self.pool = self._graph.pool()

    def replay(self) -> None:
        self._graph.replay()


_CAPTURING = threading.Lock()


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures on a device; torch's default is on the device of the first capture."""
    return torch.cuda.Stream(device)


def lacked_memory(error: RuntimeError) -> bool:
    """Whether a capture failed for lack of memory: torch's own allocator, the driver and cuBLAS say so differently.

    Examples:
        >>> lacked_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
        True
    """
    told = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in told or "ALLOC_FAILED" in told


def can_capture(device: torch.device) -> bool:
    """Whether forwards on this device can be captured."""
    return abilities(device).works_ahead


def obstacle(model: nn.Module, device: torch.device) -> str | None:
    """Why forwards of `model` are not captured, as far as it is known in advance; None if they are."""
    if torch.is_autocast_enabled(device.type):
        return "under torch.autocast they read copies of weights, which are freed at the end of its context"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "its modules are offloaded or on several devices"
    config = model.config.get_text_config(decoder=True) if isinstance(model, PreTrainedModel) else None
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if config is not None and experts and experts_of(config) == "eager":
        return "its experts run in a loop that depends on the data (experts_implementation='eager')"
    limits = [] if config is None else rotary_limits(config)
    if limits:
        return f"its rotary embedding depends on the length of the text (rope_type={limits[0].rope_type!r})"
    return None


def state_of(modules: Sequence[nn.Module], passing: Collection[int] = ()) -> list[object]:
    """What forwards of modules depend on besides their tensors. A captured graph is valid only while it is the same.

    Args:
        modules: with all their submodules.
        passing: ids of forward hooks that exist only during a call; they are ignored.
    """
    found: list[object] = []
    for module in modules:
        config = module.config.get_text_config(decoder=True) if isinstance(module, PreTrainedModel) else None
        if config is not None:  # the target's own attention, even if another thread is in `tree_attention`
            found += [own_implementation(config), experts_of(config)]
    left: list[nn.Module | None] = [*modules]
    while left:  # three times as fast as `modules()`
        part: Any = left.pop()
        if part is None:
            continue
        found.append(part.training)
        if part._forward_hooks or part._forward_pre_hooks:
            found += [hook for hook in (*part._forward_hooks, *part._forward_pre_hooks) if hook not in passing]
        if hasattr(type(part), "merged_adapters"):  # a PEFT layer
            scaling = getattr(part, "scaling", None)  # of LoRA layers
            found += [part.disable_adapters, *part.active_adapters, None, *part.merged_adapters]
            found.append(dict(scaling) if isinstance(scaling, dict) else scaling)
        if part._modules:
            left += part._modules.values()
    return found


@dataclass
class Captured:
    """A forward of one shape.

    Attributes:
        inputs: written before each run.
        graph: None if it is not captured yet, or cannot be.
        lacked_memory: whether there was no memory to capture it in the present call.
        runs: how often it was run without a graph.
    """

    inputs: tuple[Tensor, ...]
    graph: CudaGraph | None = None
    lacked_memory: bool = False
    runs: int = 0


class Workspace:
    """What `generate` calls with one model share: key and value buffers, static inputs, captured forwards.

    For one call at a time: a call that runs at the same time gets no workspace.

    Attributes:
        first_runs: how often a shape is run before it is captured.
    """

    def __init__(self) -> None:
        self.owner: weakref.ref[Any] | None = None
        self._weights: frozenset[int] = frozenset()
        self._state: list[object] = []
        self._captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self._slabs: OrderedDict[Hashable, list[Tensor]] = OrderedDict()
        self._taken: list[Tensor] = []
        self._capture_failed = False
        self._stream: torch.cuda.Stream | None = None  # of the latest call
        self.first_runs = 0

    def claim(self, owner: object, *modules: nn.Module, passing: Collection[int] = ()) -> bool:
        """Reserves the workspace for a call, until `owner` is freed or releases it; False if another call has it.

        Args:
            owner: the state of the call. Captured forwards look it up here, and must not refer to it themselves.
            modules: whose weights the forwards read. If the addresses of weights or anything else has changed
                (`state_of`), for example the active adapter, graphs and buffers are discarded, because a graph would
                use the old values.
            passing: see `state_of`.
        """
        if self.owner is not None and self.owner() is not None:
            return False
        self.owner = weakref.ref(owner)
        device = next(modules[0].parameters()).device
        if device.type == "cuda":  # an earlier call may have run in another stream
            stream = torch.cuda.current_stream(device)
            stream.wait_stream(self._stream or stream)
            self._stream = stream
        weights = frozenset(
            part.untyped_storage().data_ptr()
            for module in modules
            for part in (*module.parameters(), *module.buffers())
        )
        state = state_of(modules, passing)
        if weights != self._weights or state != self._state:
            self._captured, self._slabs, self._taken = OrderedDict(), OrderedDict(), []
            self._weights, self._state, self._capture_failed = weights, state, False
        for captured in self._captured.values():
            captured.lacked_memory = False
        for slab in self._taken:  # left by a call that raised an error
            self._keep(slab)
        self._taken = []
        return True

    def release(self, owner: object = None) -> None:
        """Ends the reservation; with an `owner` only if it is its own."""
        if owner is None or (self.owner is not None and self.owner() is owner):
            self.owner = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of zeros for keys and values, reusing one of this shape that was given back, if there is one."""
        free = self._slabs.get((shape, dtype, device))
        with torch.inference_mode(False):  # it outlives the call, which may run in inference mode
            slab = free.pop().zero_() if free else torch.zeros(shape, dtype=dtype, device=device)
        self._taken.append(slab)
        return slab

    def give_back(self, slab: Tensor) -> None:
        """Keeps a buffer for the next `take` of the same shape."""
        self._taken = [taken for taken in self._taken if taken is not slab]
        self._keep(slab)

    def _keep(self, slab: Tensor) -> None:
        key = (tuple(slab.shape), slab.dtype, slab.device)
        self._slabs.setdefault(key, []).append(slab)
        self._slabs.move_to_end(key)
        if len(self._slabs) > MOST_SLAB_SHAPES:
            self._slabs.popitem(last=False)

    def inputs(self, key: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The static inputs for a key; write them before `run`."""
        if key not in self._captured:
            with torch.inference_mode(False):  # they outlive the call, which may run in inference mode
                self._captured[key] = Captured(make())
        self._captured.move_to_end(key)
        if len(self._captured) > MOST_CAPTURED:
            self._captured.popitem(last=False)
        return self._captured[key].inputs

    def run(self, key: Hashable, forward: Forward, model: nn.Module) -> tuple[Tensor, ...]:
        """The outputs of `forward` for the current static inputs; the next run overwrites them."""
        captured = self._captured[key]
        may_capture = captured.runs >= self.first_runs and not (self._capture_failed or captured.lacked_memory)
        captured.runs += 1
        if captured.graph is None and may_capture:
            with torch.cuda.device_of(captured.inputs[0]):  # the model's device, which may not be the current one
                self._capture(captured, forward, model)
            # A capture computes nothing: outputs are valid only after the first replay.
        if captured.graph is None:
            return forward()
        captured.graph.replay()
        return captured.graph.outputs

    def _capture(self, captured: Captured, forward: Forward, model: nn.Module) -> None:
        pools = [each.graph.pool for each in self._captured.values() if each.graph is not None]
        try:
            captured.graph = CudaGraph(forward, pools[0] if pools else None)
        except RuntimeError as error:
            if lacked_memory(error):  # later captures may have the memory of the graphs that are freed here
                captured.lacked_memory = True
                for other in self._captured.values():
                    other.graph = None
                logger.warning(
                    "There was no memory to capture a forward of %s as a CUDA graph: its other graphs were freed, and "
                    "in this call rounds of this shape run without one, with the same result.",
                    type(model).__name__,
                )
                return
            self._capture_failed = True
            logger.warning(
                "A forward of %s cannot be captured as a CUDA graph and runs without one, with the same result: %s",
                type(model).__name__,
                error,
            )


class StaticCalls:
    """Computations of a drafter in one `generate` call, captured once per key and shape.

    Args:
        workspace: of the drafter, reserved for this call.
        model: the drafter, for messages.
    """

    def __init__(self, workspace: Workspace, model: nn.Module) -> None:
        self.workspace, self.model = workspace, model

    def __call__(
        self,
        key: Hashable,
        compute: Callable[..., tuple[Tensor, ...]],
        *values: Tensor,
        padded: Sequence[Tensor] = (),
        width: int = 0,
    ) -> tuple[Tensor, ...]:
        """`compute(owner, *values, *padded)`; valid until the next call with this key and these shapes.

        Args:
            key: identifies the computation and everything it depends on besides the values. Calls with equal keys
                replay the same graph, so `compute` must not read anything else that may change or be freed.
            compute: returns tensors of fixed shapes, without a device sync.
            values: [batch, ...] each.
            padded: [batch, up to `width`, ...] each; padded to `width` with the first column for `compute`.
            width: see `padded`.
        """
        shapes = [value.shape for value in values]
        shapes += [torch.Size((len(value), width, *value.shape[2:])) for value in padded]
        values = (*values, *padded)
        key = (key, *((shape, value.dtype) for shape, value in zip(shapes, values, strict=True)))

        def make() -> tuple[Tensor, ...]:
            return tuple(value.new_zeros(shape) for shape, value in zip(shapes, values, strict=True))

        inputs = self.workspace.inputs(key, make)
        for target, value in zip(inputs, values, strict=True):
            if value.dim() > 1:
                target[:, : value.shape[1]].copy_(value)
                target[:, value.shape[1] :].copy_(value[:, :1])  # as in `write_tree`
            else:
                target.copy_(value)
        workspace = self.workspace

        def forward() -> tuple[Tensor, ...]:
            assert workspace.owner is not None
            return compute(workspace.owner(), *inputs)

        return workspace.run(key, forward, self.model)


_WORKSPACES: weakref.WeakKeyDictionary[nn.Module, Workspace] = weakref.WeakKeyDictionary()
_REFUSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def workspace_of(model: nn.Module, device: torch.device, compile_mode: CompileMode) -> Workspace | None:
    """The workspace of a model whose forwards are captured; None if they are not, with one warning per model."""
    if compile_mode == "none" or not can_capture(device):
        return None
    reason = obstacle(model, device)
    if reason is not None:
        if model not in _REFUSED:
            _REFUSED.add(model)
            logger.warning("Forwards of %s are not captured as graphs: %s.", type(model).__name__, reason)
        return None
    workspace = _WORKSPACES.setdefault(model, Workspace())
    if workspace.owner is None or workspace.owner() is None:
        workspace.first_runs = FIRST_RUNS if compile_mode == "auto" else 0
    return workspace


def static_calls(
    owner: object, model: nn.Module, borrowed: Sequence[nn.Module], compile_mode: CompileMode
) -> StaticCalls | None:
    """Captures a drafter's computations in one call; None if they run without graphs.

    Args:
        owner: the state of the call.
        model: the drafter.
        borrowed: modules of the target that the drafter runs too.
        compile_mode: as for the target's forward. On a CPU nothing is compiled: a drafter's forwards are too small.
    """
    device = next(model.parameters()).device
    if any(part.device != device for each in borrowed for part in each.parameters()):
        return None
    workspace = workspace_of(model, device, compile_mode)
    if workspace is None or not workspace.claim(owner, model, *borrowed):
        return None
    return StaticCalls(workspace, model)


def run(model: nn.Module, **inputs: Any) -> Any:
    """`model(**inputs)`, as a function to compile."""
    return model(**inputs)


@functools.cache
def compiled_forward() -> Callable[..., Any]:
    """`run` compiled by torch with dynamic shapes, for any model."""
    return torch.compile(run, dynamic=True)


def nodes_bucket(nodes: int) -> int:
    """The number of nodes, root included, that a tree is padded to.

    Examples:
        >>> nodes_bucket(1), nodes_bucket(17), nodes_bucket(66), nodes_bucket(300)
        (1, 17, 97, 513)
    """
    return 1 + draft_size(nodes - 1)


def draft_size(nodes: int) -> int:
    """The number of drafted nodes that a draft of so many is padded to.

    Examples:
        >>> draft_size(5), draft_size(16), draft_size(300)
        (6, 16, 512)
    """
    if nodes > DRAFT_SIZES[-1]:
        return -(-nodes // DRAFT_SIZES[-1]) * DRAFT_SIZES[-1]
    return DRAFT_SIZES[bisect.bisect_left(DRAFT_SIZES, nodes)]


def prefix_bucket(entries: int) -> int:
    """The number of entries that a prefix is padded to.

    Examples:
        >>> prefix_bucket(0), prefix_bucket(256), prefix_bucket(1100), prefix_bucket(33_000)
        (256, 256, 2048, 40960)
    """
    size = FIRST_PREFIX
    while size < min(entries, PREFIX_STEP):
        size *= 2
    return -(-max(entries, 1) // size) * size


def write_tree(inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Writes per-node values [batch, nodes] or [batch, nodes, seen], padded to the bucket with those of the root.

    No node attends to padding, but additive masks do not stop NaN. So padding must not be a token for which the target
    gives NaN.
    """
    for target, value in zip(inputs, values, strict=True):
        if value.dim() == 3:
            _, nodes, seen = value.shape
            target[:, :nodes, :seen].copy_(value)
            target[:, :nodes, seen:].fill_(False)  # no node attends to padding; outputs of padding are unused
        elif value.dim() == 2:
            target[:, : value.shape[1]].copy_(value)
            target[:, value.shape[1] :].copy_(value[:, :1])
        else:
            target.copy_(value)
