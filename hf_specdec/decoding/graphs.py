"""Rounds of fixed shapes: the verify forward captured once per shape, and replayed.

On a GPU launching a forward's kernels one by one takes longer than they run. A CUDA graph launches them in one go, but
only for the very shapes and addresses that it was captured with. So trees are padded to a few numbers of nodes, the
prefix to a few lengths (entries beyond a row's own are masked by lengths that only the device knows), nodes lie at a
fixed place behind the prefix (`TreeCache.place_nodes`), and buffers are kept from call to call (`Workspace`), so that a
graph captured in one `generate` serves the next. The forward itself is in `static_verify.py`.

Where a forward cannot be captured, it runs launch by launch on the same buffers, with the same bytes as its result.
What runs where there is no GPU is tested with a stand-in for the graph; its speed on one is not measured.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.decoding.attention import own_implementation
from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.host import experts_of
from hf_specdec.decoding.rotary import rotary_limits

logger = logging.getLogger(__name__)

# Nodes of a tree, root included; beyond the last, multiples of it.
NODE_BUCKETS = (1, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256)
FIRST_PREFIX = 256  # entries; longer prefixes are padded to twice that, four times, ...
CompileMode = Literal["none", "reduce-overhead"]
Forward = Callable[[], tuple[Tensor, ...]]


class Graph(Protocol):
    """A captured forward."""

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Computes `outputs` anew from what the inputs hold now."""


class CudaGraph:
    """A forward of fixed addresses as one launch, on the current device.

    Args:
        forward: reads and writes the same tensors each time it is called.

    Raises:
        RuntimeError: something in it cannot be captured, as a wait for the device.
    """

    def __init__(self, forward: Forward) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are chosen and compiled, workspaces made
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        device = torch.cuda.current_device()
        numbers = torch.cuda.default_generators[device]
        before = numbers.clone_state()
        try:
            # Without the outer context, a capture that fails would leave its stream as the current one. Other threads
            # may go on meanwhile: one may draft, or learn.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(self._graph, stream=capture_stream(device), capture_error_mode="thread_local"),
            ):
                self.outputs = forward()
        except BaseException:
            numbers.graphsafe_set_state(before)  # else it would refuse to draw, as if the capture were going on
            raise

    def replay(self) -> None:
        self._graph.replay()


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """One for all captures on a device; torch's own is on the device of the very first."""
    return torch.cuda.Stream(device)


def make_graph(forward: Forward) -> Graph:
    """Captures a forward."""
    return CudaGraph(forward)


def can_capture(device: torch.device) -> bool:
    """Whether forwards on this device can be captured at all."""
    return abilities(device).works_ahead


def obstacle(model: nn.Module, device: torch.device) -> str | None:
    """Why forwards of `model` are not captured now, as far as that can be told beforehand; None if they are."""
    if torch.is_autocast_enabled(device.type):
        return "under torch.autocast they read copies of weights, which end with its context"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "its modules are offloaded or spread over devices"
    config = model.config.get_text_config(decoder=True) if isinstance(model, PreTrainedModel) else None
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if config is not None and experts and experts_of(config) == "eager":
        return "its experts are run in a loop that depends on the data (experts_implementation='eager')"
    limits = [] if config is None else rotary_limits(config)
    if limits:
        return f"its rotary embedding depends on how long a text is (rope_type={limits[0].rope_type!r})"
    return None


def state_of(modules: Sequence[nn.Module], passing: Collection[int] = ()) -> list[object]:
    """What forwards of modules depend on besides their tensors: a captured one has it built in.

    Args:
        modules: with all their parts.
        passing: ids of forward hooks that come and go with a call, and are left out.
    """
    found: list[object] = []
    for module in modules:
        config = module.config.get_text_config(decoder=True) if isinstance(module, PreTrainedModel) else None
        if config is not None:  # the target's own attention, though another thread may verify a tree with it just now
            found += [own_implementation(config), experts_of(config)]
    left: list[nn.Module | None] = [*modules]
    while left:  # a third of the time of `modules()`
        part: Any = left.pop()
        if part is None:
            continue
        found.append(part.training)
        if part._forward_hooks or part._forward_pre_hooks:
            found += [hook for hook in (*part._forward_hooks, *part._forward_pre_hooks) if hook not in passing]
        if hasattr(type(part), "merged_adapters"):  # a layer of PEFT's
            scaling = getattr(part, "scaling", None)  # of LoRA's
            found += [part.disable_adapters, *part.active_adapters, None, *part.merged_adapters]
            found.append(dict(scaling) if isinstance(scaling, dict) else scaling)
        if part._modules:
            left += part._modules.values()
    return found


@dataclass
class Captured:
    """A forward of one shape: what it reads, and its graph; without one it is run launch by launch."""

    inputs: tuple[Tensor, ...]
    graph: Graph | None


class Workspace:
    """What calls with one model share: key and value buffers, static inputs, captured forwards.

    One call at a time: a call that finds it taken does without.
    """

    def __init__(self) -> None:
        self.owner: weakref.ref[Any] | None = None
        self._weights: frozenset[int] = frozenset()
        self._state: list[object] = []
        self._captured: dict[Hashable, Captured] = {}
        self._slabs: dict[Hashable, list[Tensor]] = {}
        self._taken: list[Tensor] = []
        self._said = False

    def claim(self, owner: object, *modules: nn.Module, passing: Collection[int] = ()) -> bool:
        """Takes the workspace for a call, until `owner` is gone or releases it; False if another call has it.

        Args:
            owner: the state of the call; captured forwards find it here, and must not hold it themselves.
            modules: whose weights the forwards read. Where these lie elsewhere than before, nothing is kept: a graph
                would go on reading where they were. Nor where anything else has changed (`state_of`), as the adapter
                in use: a graph would go on with what was.
            passing: see `state_of`.
        """
        if self.owner is not None and self.owner() is not None:
            return False
        self.owner = weakref.ref(owner)
        weights = frozenset(
            part.untyped_storage().data_ptr()
            for module in modules
            for part in (*module.parameters(), *module.buffers())
        )
        state = state_of(modules, passing)
        if weights != self._weights or state != self._state:
            self._captured, self._slabs, self._taken = {}, {}, []
            self._weights, self._state = weights, state
        for slab in self._taken:  # of a call that ended in an error
            self._keep(slab)
        self._taken = []
        return True

    @property
    def lasting(self) -> set[int]:
        """Where tensors begin that live from call to call: all that a captured forward may read but did not make."""
        inputs = [part for captured in self._captured.values() for part in captured.inputs]
        slabs = [slab for free in self._slabs.values() for slab in free]
        return {part.untyped_storage().data_ptr() for part in (*inputs, *slabs, *self._taken)} | self._weights

    def release(self) -> None:
        """Ends the claim."""
        self.owner = None

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of zeros for keys and values, at the address of one that was given back, if there is one."""
        free = self._slabs.get((shape, dtype, device))
        with torch.inference_mode(False):  # it outlives the call, whatever mode the call runs in
            slab = free.pop().zero_() if free else torch.zeros(shape, dtype=dtype, device=device)
        self._taken.append(slab)
        return slab

    def give_back(self, slab: Tensor) -> None:
        """Keeps a buffer, at its address, for the next call of the same shape."""
        self._taken = [taken for taken in self._taken if taken is not slab]
        self._keep(slab)

    def _keep(self, slab: Tensor) -> None:
        self._slabs.setdefault((tuple(slab.shape), slab.dtype, slab.device), []).append(slab)

    def inputs(self, key: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The static inputs of a shape, to be written before `run`."""
        if key not in self._captured:
            self._captured[key] = Captured(make(), None)
        return self._captured[key].inputs

    def run(self, key: Hashable, forward: Forward, model: nn.Module) -> tuple[Tensor, ...]:
        """The outputs of `forward` for what the static inputs hold; they are written over by the next run."""
        captured = self._captured[key]
        if captured.graph is None and not self._said:
            with torch.cuda.device_of(captured.inputs[0]):  # of the model; a call may be made under another
                captured.graph = self._capture(forward, model)
            # Warming up and capturing are no run: what the graph has computed is defined by its first replay.
        if captured.graph is None:
            return forward()
        captured.graph.replay()
        return captured.graph.outputs

    def _capture(self, forward: Forward, model: nn.Module) -> Graph | None:
        try:
            return make_graph(forward)
        except RuntimeError as error:
            self._said = True
            logger.warning(
                "A forward of %s cannot be captured as a graph and is run launch by launch, with the same result: %s",
                type(model).__name__,
                error,
            )
            return None


class StaticCalls:
    """What a drafter computes of tensors in one `generate` call, captured for each shape that it computes it in.

    Args:
        workspace: of the drafter, claimed for the state of the call.
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
        """`compute(owner, *values, *padded)`, good until the next call with this key and these shapes.

        Args:
            key: names the computation and all that it depends on but the values: a graph serves every call with an
                equal key, so that nothing else may be read that changes or ends.
            compute: makes tensors of fixed shapes, without waiting for the device.
            values: [batch, ...] each.
            padded: [batch, up to `width`, ...] each; `compute` gets them with `width` there, filled up with the first.
            width: see `padded`.
        """
        shapes = [value.shape for value in values]
        shapes += [torch.Size((len(value), width, *value.shape[2:])) for value in padded]
        values = (*values, *padded)
        key = (key, *((shape, value.dtype) for shape, value in zip(shapes, values, strict=True)))

        def make() -> tuple[Tensor, ...]:
            return tuple(value.new_zeros(shape) for shape, value in zip(shapes, values, strict=True))

        with torch.inference_mode(False):  # they outlive the call, whatever mode it runs in
            inputs = self.workspace.inputs(key, make)
        for goal, value in zip(inputs, values, strict=True):
            if value.dim() > 1:
                goal[:, : value.shape[1]].copy_(value)
                goal[:, value.shape[1] :].copy_(value[:, :1])  # as in `write_tree`
            else:
                goal.copy_(value)
        workspace = self.workspace

        def forward() -> tuple[Tensor, ...]:
            assert workspace.owner is not None
            return compute(workspace.owner(), *inputs)

        return workspace.run(key, forward, self.model)


_WORKSPACES: weakref.WeakKeyDictionary[nn.Module, Workspace] = weakref.WeakKeyDictionary()
_REFUSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def workspace_of(model: nn.Module, device: torch.device) -> Workspace | None:
    """The workspace of a model whose forwards are captured; None where they are not, which is said once."""
    if not can_capture(device):
        return None
    reason = obstacle(model, device)
    if reason is not None:
        if model not in _REFUSED:
            _REFUSED.add(model)
            logger.warning("Forwards of %s are not captured as graphs: %s.", type(model).__name__, reason)
        return None
    return _WORKSPACES.setdefault(model, Workspace())


def static_calls(
    owner: object, model: nn.Module, borrowed: Sequence[nn.Module], compile_mode: CompileMode
) -> StaticCalls | None:
    """What captures a drafter's computations in one call; None where they are to run as they are.

    Args:
        owner: the state of the call.
        model: the drafter.
        borrowed: modules of the target that it runs too.
        compile_mode: as for the target's forward; on a CPU a drafter's are too small to gain from being compiled.
    """
    device = next(model.parameters()).device
    if compile_mode == "none" or any(part.device != device for each in borrowed for part in each.parameters()):
        return None
    workspace = workspace_of(model, device)
    if workspace is None or not workspace.claim(owner, model, *borrowed):
        return None
    return StaticCalls(workspace, model)


def run(model: nn.Module, **inputs: Any) -> Any:
    """A forward as it is."""
    return model(**inputs)


@functools.cache
def compiled_forward() -> Callable[..., Any]:
    """A forward compiled by torch, for any model; lengths and numbers of nodes may vary."""
    return torch.compile(run, dynamic=True)


def nodes_bucket(nodes: int) -> int:
    """The number of nodes that a tree is padded to.

    Example:
        >>> nodes_bucket(1), nodes_bucket(17), nodes_bucket(65), nodes_bucket(300)
        (1, 24, 80, 512)
    """
    for size in NODE_BUCKETS:
        if nodes <= size:
            return size
    return -(-nodes // NODE_BUCKETS[-1]) * NODE_BUCKETS[-1]


def prefix_bucket(entries: int) -> int:
    """The number of entries that a prefix is padded to.

    Example:
        >>> prefix_bucket(0), prefix_bucket(256), prefix_bucket(1100)
        (256, 256, 2048)
    """
    size = FIRST_PREFIX
    while size < entries:
        size *= 2
    return size


def write_tree(inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Writes per-node values [batch, nodes] or [batch, nodes, seen], padded to the bucket by those of the root.

    What pads is seen by no node, but NaN would pass: so it must not be a token that the target has no numbers for.
    """
    for goal, value in zip(inputs, values, strict=True):
        if value.dim() == 3:
            _, nodes, seen = value.shape
            goal[:, :nodes, :seen].copy_(value)
            goal[:, :nodes, seen:].fill_(False)  # no node sees padding; what padding sees is of no use to anybody
        elif value.dim() == 2:
            goal[:, : value.shape[1]].copy_(value)
            goal[:, value.shape[1] :].copy_(value[:, :1])
        else:
            goal.copy_(value)
