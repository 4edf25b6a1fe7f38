"""Packed copies of linear weights, in the layout in which a CPU multiplies a few rows fastest.

A matrix product over the nodes of a tree has few rows. On many processors torch's product converts the whole weight to
another layout in each forward, which takes longer than the product itself. oneDNN can store a weight in that layout,
and products with the stored copy are equal within rounding. On other processors torch's product of a few rows is
faster: a trial for each shape of weight, once per process, decides.

A copy takes as long as some twenty products save. Therefore it is made

- between two rounds, only of a weight that rounds have run often enough to have saved that time, and only while all
  packing takes at most `MOST_SHARE` of the time of all rounds of the process;
- once: it is kept for later calls, as long as the weight itself exists, at most `MOST_BYTES` per call.

Weights may change between calls without notice. Therefore a call first compares the weight's product with a fixed
vector with the one at the time of the copy, which takes as long as one token; calls that end soon do not use copies.

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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

LEAST_BYTES, MOST_BYTES = 8 << 20, 2 << 30  # of the weights that rounds of a call run
MOST_SHARE = 0.1  # of the time of rounds
LEAST_TOKENS = 16  # that a call may still write; otherwise looking at its weights takes longer than copies save
FIRST_ROUNDS = 2  # of a call, which run on the weights
ROWS = 16  # number of rows for which the layout is chosen; other numbers work too
TRIAL_AFTER = 16  # products
TRIAL_ROWS = 1, 9  # a skipped round, and one with a small tree
TRIAL_LAYERS, TRIAL_REPEATS, TRIAL_BYTES = 4, 3, 16 << 20
DTYPES = (torch.float32, torch.bfloat16)
_LINEAR_FORWARD = nn.Linear.forward


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operators on this processor, with the same results as a linear layer."""
    weight = torch.linspace(-1, 1, 96 * 64).view(96, 64).to(dtype)
    rows = torch.linspace(-2, 2, 128).view(1, 2, 64).to(dtype)
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
    index = torch.arange(weight.shape[1])
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

    def has_paid(self, num_products: int) -> bool:
        """Whether so many products would have saved the time of the copy."""
        return self.saved_s * num_products > self.packing_s


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
        tried = [weight.detach()[:part] for weight in weights[:TRIAL_LAYERS]]
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


@dataclass
class _Copy:
    """What is known of one weight, in all calls.

    Attributes:
        num_products: that rounds have computed without a copy.
        packed: the copy; None as long as there is none.
        contents: of the weight when it was packed.
    """

    num_products: int = 0
    packed: Tensor | None = None
    contents: Tensor | None = None

    def is_current(self, weight: Tensor) -> bool:
        """Whether there is a copy of the weight's present values; otherwise it has to pay anew."""
        if self.packed is None or self.contents is None:
            return False
        if self.contents.dtype == weight.dtype and torch.equal(self.contents, _contents(weight)):
            return True
        self.num_products, self.packed, self.contents = 0, None, None
        return False

    def make(self, weight: Tensor) -> None:
        """Copies the weight."""
        self.packed, self.contents = _pack(weight), _contents(weight)


_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> `_Copy`; freed with the weight


@dataclass
class _Spent:
    """The time of rounds and of packing in this process."""

    rounds_s: float = 0.0
    packing_s: float = 0.0

    @property
    def left_s(self) -> float:
        """What packing may take now."""
        return MOST_SHARE * self.rounds_s - self.packing_s


_spent = _Spent()


class _Forward:
    """The forward of a layer during rounds of one call: counts products, or computes them with the copy."""

    __slots__ = ("before", "copy", "layer", "packed", "version", "weight")

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.weight = layer, layer.weight
        self.copy: _Copy = _COPIES.setdefault(layer.weight, _Copy())
        self.before = self.copy.num_products
        self.packed: Tensor | None = None
        self.version = 0

    def __call__(self, rows: Tensor) -> Tensor:
        layer, weight = self.layer, self.weight
        if self.packed is None:
            self.copy.num_products += 1
        elif not (
            torch.compiler.is_compiling()
            or torch.is_grad_enabled()  # in another thread, which trains the model
            or layer._parameters.get("weight") is not weight
            or weight._version != self.version
            or rows.dtype != weight.dtype
            or torch.is_autocast_enabled("cpu")
        ):
            return _multiply(self.packed, layer.bias, rows)
        return nn.Linear.forward(layer, rows)

    @property
    def has_run(self) -> bool:
        """Whether a round of this call has run the layer."""
        return self.copy.num_products > self.before

    def use(self) -> None:
        """Uses the copy from now on."""
        self.packed, self.version = self.copy.packed, self.weight._version


class PackedLinears(AbstractContextManager[None]):
    """A context in which linear layers may run on packed copies; to be entered again in each round of a call.

    Args:
        models: the networks that rounds run. Layers of other classes, with weights that are not plain parameters, with
            a replaced forward, or in compiled modules stay as they are.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        forwards = {}
        if not torch.are_deterministic_algorithms_enabled():  # when a weight is packed depends on time
            forwards = {layer: _Forward(layer) for model in models for layer in _plain_linears(model)}
        # Entered in every round, for hundreds of layers: the instances' dicts are faster than setattr.
        self._layers = [(layer.__dict__, forward) for layer, forward in forwards.items()]
        self._undecided = list(forwards.values())
        self._depth = self._num_rounds = 0
        self._since = time.perf_counter()

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            for attributes, forward in self._layers:
                attributes["forward"] = forward

    def __exit__(self, *raised: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for attributes, _ in self._layers:
                attributes.pop("forward", None)

    def pack(self, tokens_left: int) -> float:
        """Between two rounds: makes and uses copies of the weights for which that has paid.

        Args:
            tokens_left: that the call may still write.

        Returns:
            The seconds that it took, if it looked at any weight; else 0.
        """
        if not self._undecided:
            return 0.0
        started = time.perf_counter()
        if self._num_rounds:  # the time since the construction includes that of the prompt
            _spent.rounds_s += started - self._since
        self._num_rounds += 1
        may_pack = self._num_rounds >= FIRST_ROUNDS and tokens_left >= LEAST_TOKENS and _spent.left_s > 0
        if may_pack:
            with torch.inference_mode(False), torch.no_grad():  # copies outlive the call
                self._pack(until=started + _spent.left_s)
        self._since = time.perf_counter()
        _spent.packing_s += self._since - started
        return self._since - started if may_pack else 0.0

    def pack_all(self) -> None:
        """At once: makes and uses copies of all weights of shapes for which a copy is faster. For comparisons."""
        with torch.inference_mode(False), torch.no_grad():
            for group in _by_shape(self._undecided):
                if trial_of([forward.weight for forward in group]).saved_s > 0:
                    for forward in group:
                        if not forward.copy.is_current(forward.weight):
                            forward.copy.make(forward.weight)
                        forward.use()

    def _pack(self, until: float) -> None:
        if _get_current_dispatch_mode() is not None:  # for example, verify_lossless runs every operation in float64
            return
        run = [forward for _, forward in self._layers if forward.has_run or forward.packed is not None]
        if not LEAST_BYTES <= sum(forward.weight.nbytes for forward in run) <= MOST_BYTES:
            return
        decided = set()
        for group in _by_shape([forward for forward in self._undecided if forward.has_run]):
            if all(forward.copy.num_products < TRIAL_AFTER and forward.copy.packed is None for forward in group):
                continue
            trial = trial_of([forward.weight for forward in group])
            if trial.saved_s <= 0:
                decided.update(group)
                continue
            for forward in group:
                if time.perf_counter() > until:
                    break
                if not forward.copy.is_current(forward.weight):
                    if not trial.has_paid(forward.copy.num_products):
                        continue
                    forward.copy.make(forward.weight)
                forward.use()
                decided.add(forward)
        self._undecided = [forward for forward in self._undecided if forward not in decided]


def _by_shape(forwards: Sequence[_Forward]) -> list[list[_Forward]]:
    groups = defaultdict(list)
    for forward in forwards:
        groups[forward.weight.shape, forward.weight.dtype].append(forward)
    return list(groups.values())


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
