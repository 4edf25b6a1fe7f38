"""Linear layers of a target or drafter in the layout that a CPU multiplies a few rows with fastest.

A matrix product over the nodes of a tree has few rows. torch's own brings the whole weight into another layout first,
in each forward anew, which takes longer than the product; oneDNN can keep it in that layout. So the weights are copied
into it once per `generate` call, and rounds run on the copies. Within rounding the products are the same.

Copies are made anew in each call, since weights may change in between in ways that nobody is told of, and only of
models that are small enough for a second copy.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hf_specdec.decoding.once import once_per_model

LEAST_BYTES, MOST_BYTES = 8 << 20, 2 << 30  # of all copies
LEAST_WEIGHT_BYTES = 400 << 10  # smaller weights lie in a core's cache, where torch's own product is as fast
ROWS = 16  # that the layout is chosen for; others run on it too
LEAST_TOKENS = 24  # copying takes about as long as it saves in a few rounds


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


def packed_linears(model: nn.Module, num_tokens: int) -> AbstractContextManager[None]:
    """A context in which linear layers of `model` run on packed copies; one that does nothing where that is no use.

    Args:
        model: its larger linear layers in float32 on a CPU are packed, if that is worth it and fits into `MOST_BYTES`.
            Layers whose forward something else has replaced are left alone, as are those of other classes.
        num_tokens: that the call may still write.
    """
    if num_tokens < LEAST_TOKENS:
        return nullcontext()
    layers = [
        layer
        for layer in _linears(model)
        if (weight := layer._parameters["weight"]) is not None  # a look-up of the attribute takes longer than the walk
        and weight.numel() * 4 >= LEAST_WEIGHT_BYTES
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and "forward" not in layer.__dict__
    ]
    num_bytes = sum(layer.weight.numel() * 4 for layer in layers)
    if not LEAST_BYTES <= num_bytes <= MOST_BYTES or not _works():
        return nullcontext()
    if _get_current_dispatch_mode() is not None:  # the self-test, for one, has every operation run in float64
        return nullcontext()
    forwards = {layer: functools.partial(_multiply, _pack(layer.weight), layer.bias) for layer in layers}
    return _Running(forwards)


class _Running(AbstractContextManager[None]):
    """May be opened again and again.

    Another thread that runs the same model meanwhile multiplies with the copies too, or does so no longer: either way
    it gets the same product, within rounding.
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
