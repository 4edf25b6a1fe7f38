"""Linear layers of a target or drafter in the layout in which a CPU multiplies a few rows fastest.

A matrix product over the nodes of a tree has few rows. On many processors torch's own product first brings the whole
weight into another layout, in each forward, which takes longer than the product itself. oneDNN can keep a weight in
that layout. So weights are copied into it once per `generate` call, and rounds run on the copies. Within rounding the
products are the same. On other processors torch's own product of a few rows is faster. A trial for each shape of
weight, once per process, decides whether a copy pays.

Copies are made in each call, because weights may change between calls in ways that cannot be observed, and only of
models that are small enough for a second copy.
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
ROWS = 16  # that the layout is chosen for; others run on it too
TOKENS_PER_ROUND = 2  # to estimate how many rounds a call has
TRIAL_ROWS = 1, 9  # a skipped round, and one with a small tree
TRIAL_LAYERS, TRIAL_REPEATS = 4, 3


@functools.cache
def _works() -> bool:
    """Whether this build of torch has what is needed, and gives with it what a linear layer gives."""
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
    """Linear layers of a model, as it was when it was first asked about; later ones run as they are."""
    return [layer for layer in model.modules() if type(layer) is nn.Linear]


@dataclass(frozen=True)
class Trial:
    """What packing a weight of one shape takes and saves, in seconds.

    Attributes:
        packing_s: to copy it once.
        saved_s: by each product, the mean over `TRIAL_ROWS`; below 0 where torch's own product is faster.
    """

    packing_s: float
    saved_s: float

    def pays(self, num_tokens: int) -> bool:
        """Whether a call that writes so many tokens takes less time with the copy."""
        return self.saved_s * num_tokens / TOKENS_PER_ROUND > self.packing_s


_trials: dict[tuple[int, ...], Trial] = {}


def trial_of(layers: Sequence[nn.Linear]) -> Trial:
    """The trial for the shape that these layers share, run on the first of them when it is first asked for.

    Several layers take turns, because a weight that is used repeatedly stays in the cache of the processor, unlike the
    weights of a model.
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
    """The least time of several runs."""
    least = float("inf")
    for _ in range(TRIAL_REPEATS):
        started = time.perf_counter()
        multiply()
        least = min(least, time.perf_counter() - started)
    return least


def packed_linears(model: nn.Module, num_tokens: int) -> AbstractContextManager[None]:
    """A context in which linear layers of `model` run on packed copies; one that does nothing where that does not pay.

    Args:
        model: its linear layers in float32 on a CPU are packed where a trial shows that it pays, if the model has at
            least `LEAST_BYTES` and the copies fit into `MOST_BYTES`. Layers whose forward was replaced by other code
            are left alone, as are those of other classes.
        num_tokens: that the call may still write.
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
    if _get_current_dispatch_mode() is not None:  # the self-test, for example, runs every operation in float64
        return nullcontext()
    by_shape: dict[torch.Size, list[nn.Linear]] = defaultdict(list)
    for layer in layers:
        by_shape[layer.weight.shape].append(layer)
    with torch.no_grad():
        paying = [layer for group in by_shape.values() if trial_of(group).pays(num_tokens) for layer in group]
    return _Running({layer: functools.partial(_multiply, _pack(layer.weight), layer.bias) for layer in paying})


class _Running(AbstractContextManager[None]):
    """May be opened repeatedly.

    Another thread that runs the same model at that time may multiply with the copies or with the weights: the product
    is the same, within rounding.
    """

    def __init__(self, forwards: dict[nn.Linear, Any]) -> None:
        # Opened in every round, for hundreds of layers.
        self.places = [(layer.__dict__, forward) for layer, forward in forwards.items()]

    def __enter__(self) -> None:
        for place, forward in self.places:
            place["forward"] = forward

    def __exit__(self, *raised: Any) -> None:
        for place, _ in self.places:
            place.pop("forward", None)
