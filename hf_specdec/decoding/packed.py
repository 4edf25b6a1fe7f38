"""Packed copies of linear weights, in the layout in which a CPU multiplies a few rows fastest.

A matrix product over the nodes of a tree has few rows. On many processors torch's product converts the whole weight to
another layout in each forward, which takes longer than the product itself. oneDNN can store a weight in that layout.
So weights are copied to it once per `generate` call, and rounds use the copies; the products are equal within rounding.
On other processors torch's product of a few rows is faster. A trial for each shape of weight, once per process, decides
whether copying saves time.

Copies are made in each call, because weights may change between calls without notice. They are made only of models that
are small enough for a second copy.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hf_specdec.decoding.once import once_per_model

LEAST_BYTES, MOST_BYTES = 8 << 20, 2 << 30  # of all copies
ROWS = 16  # number of rows for which the layout is chosen; other numbers work too
TOKENS_PER_ROUND = 2  # to estimate the number of rounds of a call
TRIAL_ROWS = 1, 9  # a skipped round, and one with a small tree
TRIAL_LAYERS, TRIAL_REPEATS = 4, 3


@functools.cache
def _works() -> bool:
    """Whether this build of torch has the operators, with the same results as a linear layer."""
    weight, rows = torch.linspace(-1, 1, 96 * 64).view(96, 64), torch.linspace(-2, 2, 128).view(1, 2, 64)
    try:
        found = _multiply(_pack(weight), None, rows)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.allclose(found, nn.functional.linear(rows, weight), rtol=1e-4, atol=1e-4)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return packed


def _multiply(packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product


@once_per_model
def _linears(model: nn.Module) -> list[nn.Linear]:
    """Linear layers of a model at the first call; layers added later are not packed."""
    return [layer for layer in model.modules() if type(layer) is nn.Linear]


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
        """Whether a call that generates this many tokens is faster with the copy."""
        return self.saved_s * num_tokens / TOKENS_PER_ROUND > self.packing_s


_trials: dict[tuple[int, ...], Trial] = {}


def trial_of(layers: Sequence[nn.Linear]) -> Trial:
    """The trial for the shape of these layers, run on the first of them and cached.

    Several layers are used in turn, because a single weight would stay in the processor's cache, unlike the weights of
    a model.
    """
    key = (*layers[0].weight.shape, torch.get_num_threads())
    if key not in _trials:
        weights = [layer.weight.detach() for layer in layers[:TRIAL_LAYERS]]
        started = time.perf_counter()
        copies = [_pack(weight) for weight in weights]
        packing_s = time.perf_counter() - started
        saved_s = 0.0
        for num_rows in TRIAL_ROWS:
            rows = weights[0].new_ones(1, num_rows, weights[0].shape[1])
            own_s = _seconds(lambda: [nn.functional.linear(rows, weight) for weight in weights])  # noqa: B023
            packed_s = _seconds(lambda: [_multiply(copy, None, rows) for copy in copies])  # noqa: B023
            saved_s += (own_s - packed_s) / len(TRIAL_ROWS)
        _trials[key] = Trial(packing_s / len(weights), saved_s / len(weights))
    return _trials[key]


def _seconds(multiply: Callable[[], list[Tensor]]) -> float:
    """The shortest time of several runs."""
    least = float("inf")
    for _ in range(TRIAL_REPEATS):
        started = time.perf_counter()
        multiply()
        least = min(least, time.perf_counter() - started)
    return least


def packed_linears(model: nn.Module, num_tokens: int) -> AbstractContextManager[None]:
    """A context in which linear layers of `model` run on packed copies; without effect if that saves no time.

    Args:
        model: its linear layers in float32 on a CPU are packed if a trial shows a gain, if the model has at least
            `LEAST_BYTES` and the copies fit into `MOST_BYTES`. Layers of other classes, or with a replaced forward, are
            not changed.
        num_tokens: that the call may still generate.
    """
    layers = [
        layer
        for layer in _linears(model)
        if (weight := layer._parameters["weight"]) is not None  # reading the attribute takes longer than this loop
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and "forward" not in layer.__dict__
    ]
    num_bytes = sum(layer.weight.numel() * 4 for layer in layers)
    if not LEAST_BYTES <= num_bytes <= MOST_BYTES or not _works():
        return nullcontext()
    if _get_current_dispatch_mode() is not None:  # for example, verify_lossless runs every operation in float64
        return nullcontext()
    by_shape: dict[torch.Size, list[nn.Linear]] = defaultdict(list)
    for layer in layers:
        by_shape[layer.weight.shape].append(layer)
    with torch.no_grad():
        packed = [layer for group in by_shape.values() if trial_of(group).pays(num_tokens) for layer in group]
    return _PackedForwards({layer: functools.partial(_multiply, _pack(layer.weight), layer.bias) for layer in packed})


class _PackedForwards(AbstractContextManager[None]):
    """Replaces the forwards of layers while it is active; reusable.

    Another thread that runs the same model at that time may use either the copies or the weights: the products are
    equal within rounding.
    """

    def __init__(self, forwards: dict[nn.Linear, Any]) -> None:
        # Entered in every round, for hundreds of layers: the instances' dicts are faster than setattr.
        self.forwards = [(layer.__dict__, forward) for layer, forward in forwards.items()]

    def __enter__(self) -> None:
        for attributes, forward in self.forwards:
            attributes["forward"] = forward

    def __exit__(self, *raised: Any) -> None:
        for attributes, _ in self.forwards:
            attributes.pop("forward", None)
