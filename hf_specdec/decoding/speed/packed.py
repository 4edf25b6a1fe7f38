"""Packed copies of linear weights, in the layout in which a CPU multiplies a few rows fastest.

A matrix product over the nodes of a tree has few rows. On many processors torch's product converts the whole weight to
another layout in each forward, which takes longer than the product itself. oneDNN can store a weight in that layout,
and products with the stored copy are equal within rounding. On other processors torch's product of a few rows is
faster: a trial for each shape of weight, once per process, decides.

A copy takes as long as some twenty products save. Therefore it is made after the first rounds of a call, of weights
that these rounds have run, if the tokens that the call may still write are enough to pay for it. It is kept for later
calls, as long as the weight itself exists, at most `MOST_BYTES` per call.

Weights may change between calls without notice. Therefore a call first compares the product of each copied weight and a
fixed vector with the one at the time of the copy, which takes as long as one token; calls that end soon use no copies.

Only plain weights of plain layers are packed, none inside a module that is compiled, and only products without
gradients use the copies: a thread that trains the same model at that time uses its weights.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

LEAST_BYTES, MOST_BYTES = 8 << 20, 2 << 30  # of the weights that rounds of a call run
LEAST_TOKENS = 16  # that a call may still write; otherwise looking at its weights takes longer than copies save
FIRST_ROUNDS = 2  # of a call, before it makes copies
TOKENS_PER_ROUND = 2  # to estimate the number of rounds that a call still has
ROWS = 16  # number of rows for which the layout is chosen; other numbers work too
TRIAL_ROWS = 1, 9  # a skipped round, and one with a small tree
TRIAL_BYTES, TRIAL_REPEATS = 16 << 20, 3
DTYPES = (torch.float32, torch.bfloat16)
_LINEAR_FORWARD = nn.Linear.forward


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operators on this processor, with the same results as a linear layer."""
    weight = torch.linspace(-1, 1, 96 * 64, device="cpu").view(96, 64).to(dtype)
    rows = torch.linspace(-2, 2, 128, device="cpu").view(1, 2, 64).to(dtype)
    try:
        found = _multiply(_pack(weight), None, rows)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    share = 100 * torch.finfo(dtype).eps
    return torch.allclose(found, nn.functional.linear(rows, weight), rtol=share, atol=share)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return packed


def _multiply(packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product


def _contents(weight: Tensor) -> Tensor:
    """[out_features], the product with a fixed vector: a change that it does not show is smaller than rounding."""
    index = torch.arange(weight.shape[1], device=weight.device)
    return torch.mv(weight.detach(), (index.cos() + index.remainder(2) - 0.5).to(weight.dtype))


@dataclass(frozen=True)
class Trial:
    """Cost and gain of packing a weight of one shape, in seconds.

    Attributes:
        packing_s: time of the copy.
        saved_s: per product, the mean over `TRIAL_ROWS`; below 0 if torch's product is faster.
    """

    packing_s: float
    saved_s: float

    def pays(self, num_tokens: int) -> bool:
        """Whether a call that still writes this many tokens is faster with the copy."""
        return self.saved_s * num_tokens / TOKENS_PER_ROUND > self.packing_s


_trials: dict[tuple[Any, ...], Trial] = {}


def trial_of(weights: Sequence[Tensor]) -> Trial:
    """The trial for the shape of these weights, run on some of them and cached.

    Several weights are used in turn, because a single one would stay in the processor's cache, unlike the weights of a
    model. Of a large weight, the first rows are tried.
    """
    key = (*weights[0].shape, weights[0].dtype, torch.get_num_threads())
    if key not in _trials:
        height, width = weights[0].shape
        part = min(height, max(1, TRIAL_BYTES // (width * weights[0].itemsize)))
        num_tried = -(-TRIAL_BYTES // (part * width * weights[0].itemsize))
        tried = [weight.detach()[:part] for weight in weights[:num_tried]]
        started = time.perf_counter()
        copies = [_pack(weight) for weight in tried]
        packing_s = time.perf_counter() - started
        saved_s = 0.0
        for num_rows in TRIAL_ROWS:
            rows = tried[0].new_ones(1, num_rows, width)
            own_s = _seconds(lambda: [nn.functional.linear(rows, weight) for weight in tried])  # noqa: B023
            packed_s = _seconds(lambda: [_multiply(copy, None, rows) for copy in copies])  # noqa: B023
            saved_s += (own_s - packed_s) / len(TRIAL_ROWS)
        scale = height / part / len(tried)
        _trials[key] = Trial(packing_s * scale, saved_s * scale)
    return _trials[key]


def _seconds(multiply: Callable[[], list[Tensor]]) -> float:
    """The shortest time of several runs."""
    least = float("inf")
    for _ in range(TRIAL_REPEATS):
        started = time.perf_counter()
        multiply()
        least = min(least, time.perf_counter() - started)
    return least


class _Copy(NamedTuple):
    """A copy of a weight, and what the weight contained when it was made."""

    packed: Tensor
    contents: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> _Copy:
        return cls(_pack(weight), _contents(weight))

    def is_current(self, weight: Tensor) -> bool:
        return self.contents.dtype == weight.dtype and torch.equal(self.contents, _contents(weight))


_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> `_Copy`; freed with the weight


class _Forward:
    """The forward of a layer during rounds of one call: with its copy, if there is one."""

    __slots__ = ("has_run", "layer", "packed", "version", "weight")

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.weight = layer, layer.weight
        self.has_run = False
        self.packed: Tensor | None = None
        self.version = 0

    def __call__(self, rows: Tensor) -> Tensor:
        layer, weight = self.layer, self.weight
        self.has_run = True
        if not (
            self.packed is None
            or torch.compiler.is_compiling()
            or torch.is_grad_enabled()  # in another thread, which trains the model
            or layer._parameters.get("weight") is not weight
            or weight._version != self.version
            or rows.dtype != weight.dtype
            or torch.is_autocast_enabled("cpu")
        ):
            return _multiply(self.packed, layer.bias, rows)
        return nn.Linear.forward(layer, rows)

    def use_copy(self, may_make: bool) -> None:
        """Uses the weight's copy from now on, if there is one or it may be made."""
        copy = _COPIES.get(self.weight)
        if copy is not None and not copy.is_current(self.weight):
            del _COPIES[self.weight]
            copy = None
        if copy is None:
            if not may_make:
                return
            copy = _COPIES[self.weight] = _Copy.of(self.weight)
        self.packed, self.version = copy.packed, self.weight._version


class PackedLinears(AbstractContextManager[None]):
    """A context in which linear layers may run on packed copies; to be entered again in each round of a call.

    Args:
        models: the networks that rounds run. Layers of other classes, with weights that are not plain parameters, with
            a replaced forward, or in compiled modules stay as they are.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._forwards: list[_Forward] = []
        if not torch.are_deterministic_algorithms_enabled():  # whether a weight is packed depends on time
            layers = dict.fromkeys(layer for model in models for layer in _plain_linears(model))
            self._forwards = [_Forward(layer) for layer in layers]
        self._depth = self._num_rounds = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            for forward in self._forwards:
                forward.layer.__dict__["forward"] = forward  # for hundreds of layers, faster than setattr

    def __exit__(self, *raised: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for forward in self._forwards:
                forward.layer.__dict__.pop("forward", None)

    def prepare(self, tokens_left: int) -> float:
        """Before a round: uses the copies of earlier calls, and after the first rounds makes those that pay.

        Args:
            tokens_left: that the call may still write.

        Returns:
            The seconds that it took.
        """
        num_rounds, self._num_rounds = self._num_rounds, self._num_rounds + 1
        # A mode watches all operations: for example, verify_lossless runs every one in float64.
        if not self._forwards or tokens_left < LEAST_TOKENS or _get_current_dispatch_mode() is not None:
            return 0.0
        started = time.perf_counter()
        if num_rounds == 0:
            with torch.no_grad():
                for forward in self._forwards:
                    forward.use_copy(may_make=False)
        elif num_rounds == FIRST_ROUNDS:
            self._forwards = [forward for forward in self._forwards if forward.has_run]
            if LEAST_BYTES <= sum(forward.weight.nbytes for forward in self._forwards) <= MOST_BYTES:
                new = [forward for forward in self._forwards if forward.packed is None]
                self._pack(new, lambda trial: trial.pays(tokens_left))
            self._forwards = [forward for forward in self._forwards if forward.packed is not None]
        else:
            return 0.0
        return time.perf_counter() - started

    def pack_all(self) -> None:
        """At once: makes and uses copies of all weights of shapes for which a copy is faster. For comparisons."""
        self._pack(self._forwards, lambda trial: trial.saved_s > 0)

    def _pack(self, forwards: Sequence[_Forward], pays: Callable[[Trial], bool]) -> None:
        with torch.inference_mode(False), torch.no_grad():  # copies outlive the call
            groups = defaultdict(list)
            for forward in forwards:
                groups[forward.weight.shape, forward.weight.dtype].append(forward)
            for group in groups.values():
                may_make = pays(trial_of([forward.weight for forward in group]))
                for forward in group:
                    forward.use_copy(may_make)


def _plain_linears(model: nn.Module) -> Iterator[nn.Linear]:
    """Layers of a model that may be packed."""
    if nn.Linear.forward is not _LINEAR_FORWARD or torch.is_autocast_enabled("cpu"):
        return
    left: list[nn.Module | None] = [model]
    while left:
        part = left.pop()
        if part is None or _is_compiled(part):
            continue
        if type(part) is nn.Linear and _is_plain(part):
            yield part
        left += part._modules.values()


def can_pack(model: nn.Module) -> bool:
    """Whether a layer of a model may be packed: its type, number type and device, and this processor, allow it."""
    return next(_plain_linears(model), None) is not None


def _is_compiled(module: nn.Module) -> bool:
    """Whether the user has compiled a module: its forward must not be traced with replaced forwards inside."""
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")


def _is_plain(layer: nn.Linear) -> bool:
    # Pruning and weight norm remove the parameter `weight` and compute it in a hook; quantisation replaces its class.
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and weight.layout is torch.strided
        and not weight.is_inference()
        and (layer.bias is None or (type(bias) is nn.Parameter and bias.dtype == weight.dtype))
        and isinstance(layer.__dict__.get("forward"), (_Forward, type(None)))
        and _works(weight.dtype)
    )
