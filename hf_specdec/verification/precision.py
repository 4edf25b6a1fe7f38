"""Forwards of a target in a higher precision than its own, on the same weights.

A wrong mask or position changes logits by the same amount in every dtype; rounding depends on the dtype. In bfloat16
the two may be of one size; in float64 they differ by orders of magnitude on every processor. The model is not copied:
`Raised` converts the floating inputs of each operation, so that one converted weight at a time is in memory.
`replay.py` and `differences.py` compare logits in this precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.decoding import upstream
from hf_specdec.decoding.once import undisturbed

TOP = 16  # best tokens whose logits are compared: models may mask others with any low number


class Raised(TorchDispatchMode):
    """In this context, operations on floating tensors compute in `dtype` and return it.

    Tensors made before it, such as weights, keep their dtype, also if they are written to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        floats = [value for value in args if isinstance(value, Tensor) and value.is_floating_point()]
        # A view of a weight and rows of an embedding are converted where they are used.
        keeps = len(floats) == 1 and (func.is_view or func is torch.ops.aten.embedding.default)

        def raised(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(self.dtype) if self._is_lower(value.dtype) and not keeps else value
            if isinstance(value, torch.dtype):
                return self.dtype if self._is_lower(value) else value
            return [raised(part) for part in value] if isinstance(value, (list, tuple)) else value

        return func(*map(raised, args), **{name: raised(value) for name, value in (kwargs or {}).items()})

    def _is_lower(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize


@dataclass(frozen=True)
class Precision:
    """A precision in which a target runs.

    Attributes:
        dtype: of the computation.
        share: the largest difference of two logits, relative to the best one, that rounding may explain.
    """

    dtype: torch.dtype
    share: float

    def __call__(self) -> AbstractContextManager[object]:
        """A context in which the target computes in `dtype`."""
        return Raised(self.dtype)

    def bound(self, logits: Tensor) -> float:
        """The largest difference from these logits that rounding may explain."""
        return self.share * max(1.0, float(logits.amax(-1).abs().max()))


def precision_of(model: PreTrainedModel, prompt: Tensor) -> tuple[Precision | None, str, float | None]:
    """The highest precision that this target and device support, by two plain forwards of `prompt` [1, seq] int64.

    `share` is half of the digits: 1.5e-8 in float64, 3.5e-4 in float32; or, if that is more, a thousand times the
    relative difference of the two forwards, with and without a cache.

    Returns:
        The precision and an empty text; or None and the reason. Then how much the target's own logits depend on what
        else is in a forward; None if that is no more than rounding, or not known.
    """
    token_ids = prompt if prompt.shape[1] > 1 else prompt.repeat(1, 2)
    reasons, mask, own_difference = [], torch.ones_like(token_ids), None
    for dtype in (torch.float64, torch.float32):
        try:
            with Raised(dtype), undisturbed(model):  # with transformers' positions, because some models remember others
                whole = model(**upstream.whole_text_inputs(model, token_ids, {}), return_dict=True).logits[0, -1]
                arguments = upstream.arguments_of_prompt(model, token_ids[:, :-1], mask[:, :-1])
                outputs = upstream.prefill(model, token_ids[:, :-1], GenerationConfig(), dict(arguments))
                inputs = upstream.next_inputs(model, outputs, token_ids, arguments)
                stepped = model(**inputs, return_dict=True).logits[0, -1]
        except (RuntimeError, TypeError, ValueError) as error:  # unsupported dtype, too little memory, custom kernels
            reasons.append(f"{dtype}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error)}")
            continue
        apart = top_difference(stepped, whole) / max(1.0, float(whole.max().abs()))
        share = max(torch.finfo(whole.dtype).eps ** 0.5, 1000 * apart)
        if whole.dtype.itemsize >= dtype.itemsize and share < 0.01:
            return Precision(dtype, share), "", None
        if whole.dtype.itemsize >= dtype.itemsize:
            own_difference = top_difference(stepped, whole)
        reasons.append(f"{dtype}: two plain forwards of the target differ by {apart:.1g} of the best logit")
    return None, "; ".join(reasons), own_difference


def top_difference(one: Tensor, other: Tensor) -> float:
    """Largest difference of the logits [..., vocab] of tokens that are among the best in either."""
    best = torch.cat([logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices for logits in (one, other)], dim=-1)
    one, other = one.gather(-1, best).cpu().double(), other.gather(-1, best).cpu().double()
    return float((one - other).where(one != other, 0.0).abs().max())  # both may be -inf
