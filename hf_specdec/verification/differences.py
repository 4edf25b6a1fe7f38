"""The first difference between an assisted and a plain greedy run, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.verification.precision import top_difference

STEPS = 32  # positions at which rounding is measured


@dataclass(frozen=True)
class Difference:
    """The first difference between an assisted and a plain greedy run.

    Attributes:
        position: generated tokens before it, equal in both runs.
        plain_token: id that plain `generate` chose.
        assisted_token: id that `generate` with the drafter chose.
        gap: the best logit there minus that of `assisted_token`, by one plain forward over the whole text, in the
            `precision` given to `first_difference`.
        rounding: how much rounding alone changes logits of this target: the largest difference between the logits of
            that forward and those of plain decoding, one token at a time, at up to 32 positions and over the best
            tokens of each; at least one `ulp`.
        top2_gap: between the two best logits there.
        ulp: unit in the last place, in the target's dtype, of its best logit there.
    """

    position: int
    plain_token: int
    assisted_token: int
    gap: float
    rounding: float
    top2_gap: float = math.inf
    ulp: float = 1.0

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it: both logits may have changed, each by `rounding`."""
        return abs(self.gap) <= 2 * self.rounding


def first_difference(
    model: PreTrainedModel,
    prompt: Tensor,
    plain: list[int],
    assisted: list[int],
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Difference:
    """Finds where two continuations differ, and measures the target's logits there.

    Args:
        model: the target.
        prompt: [1, seq] int64.
        plain: tokens of plain decoding.
        assisted: tokens with a drafter; different from `plain`.
        precision: makes a context in which the target computes in a higher precision; its own by default.
    """
    pairs = zip(plain, assisted, strict=False)
    position = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(plain), len(assisted)))
    if position == min(len(plain), len(assisted)):  # one run is longer: no near tie explains it
        ends = -1
        tokens = [row[position] if position < len(row) else ends for row in (plain, assisted)]
        return Difference(position, tokens[0], tokens[1], math.inf, 0.0)
    text = torch.cat([prompt, torch.tensor([plain[:position]], dtype=torch.int64, device=prompt.device)], dim=1)
    steps = min(STEPS, text.shape[1])
    with precision():
        logits = model(text, use_cache=False).logits[0, -steps:].cpu().double()
    cache, stepped = None, []
    for end in range(text.shape[1] - steps + 1, text.shape[1] + 1):
        output = model(text[:, 0 if cache is None else end - 1 : end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        stepped.append(output.logits[0, -1].cpu().double())
    best, second = logits[-1].topk(2).values.tolist()
    ulp = unit_in_the_last_place(best, model.dtype)
    rounding = max(ulp, top_difference(torch.stack(stepped), logits))
    gap = best - float(logits[-1, assisted[position]])
    return Difference(position, plain[position], assisted[position], gap, rounding, best - second, ulp)


def unit_in_the_last_place(value: float, dtype: torch.dtype) -> float:
    """The distance from `value` to the next larger number of a floating `dtype`; NaN if it is not finite.

    Example:
        >>> unit_in_the_last_place(20.0, torch.bfloat16)
        0.125
    """
    if not math.isfinite(value):
        return math.nan
    known = torch.finfo(dtype)
    return known.eps * 2.0 ** math.floor(math.log2(max(abs(value), known.smallest_normal)))
