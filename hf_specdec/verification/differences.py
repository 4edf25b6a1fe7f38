"""Where an assisted greedy run leaves the plain one, and whether rounding explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Difference:
    """Where an assisted greedy run left the plain one.

    Attributes:
        position: generated tokens before it, equal in both runs.
        plain_token: id that plain `generate` chose.
        assisted_token: id that came with the drafter.
        gap: the target's logit of its best token minus that of `assisted_token`, by a forward over the whole prefix.
        rounding: how far logits of this target move by rounding alone, there: one `ulp`, or more where two plain
            forwards of the target (over the whole prefix; over its last token, after a cache of the others) give logits
            that differ by more.
        top2_gap: between the target's two best logits there.
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
        """Whether rounding explains it: both logits may have moved, each by `rounding`."""
        return abs(self.gap) <= 2 * self.rounding


def first_difference(model: PreTrainedModel, prompt: Tensor, plain: list[int], assisted: list[int]) -> Difference:
    """Where two continuations part, and how the target sees it.

    Args:
        model: the target.
        prompt: [1, seq] int64.
        plain: tokens of plain decoding.
        assisted: other ones.
    """
    pairs = zip(plain, assisted, strict=False)
    position = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(plain), len(assisted)))
    if position == min(len(plain), len(assisted)):  # one ends where the other goes on: no choice of tokens explains it
        ends = -1
        tokens = [row[position] if position < len(row) else ends for row in (plain, assisted)]
        return Difference(position, tokens[0], tokens[1], math.inf, 0.0)
    prefix = torch.cat([prompt, torch.tensor([plain[:position]], dtype=torch.int64, device=prompt.device)], dim=1)
    logits = last_logits(model, prefix)[0]
    # Of the best: those of tokens that are never to come are -inf in some targets, or as low as the dtype goes.
    rounding = ulp = unit_in_the_last_place(float(logits.max()), model.dtype)
    if prefix.shape[1] > 1:
        rounding = max(rounding, largest_difference(last_logits_after_cache(model, prefix)[0], logits))
    gap = float(logits.max() - logits[assisted[position]])
    best, second = logits.topk(2).values.tolist()
    return Difference(position, plain[position], assisted[position], gap, rounding, best - second, ulp)


def unit_in_the_last_place(value: float, dtype: torch.dtype) -> float:
    """From `value` to the next larger number of a floating `dtype`; NaN where it is not finite.

    Example:
        >>> unit_in_the_last_place(20.0, torch.bfloat16)
        0.125
    """
    if not math.isfinite(value):
        return math.nan
    known = torch.finfo(dtype)
    return known.eps * 2.0 ** math.floor(math.log2(max(abs(value), known.smallest_normal)))


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Between two tensors of logits of one shape; two that are -inf do not differ."""
    return float((one - other).where(one != other, 0.0).abs().max())


def last_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """[rows, vocab] float32: what the target alone says after each row of [rows, seq] ids."""
    return model(token_ids, use_cache=False).logits[:, -1].float()


def last_logits_after_cache(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """The same logits on another way: the last token alone, after a cache of the others; [rows, seq] of at least 2."""
    cache = model(token_ids[:, :-1], use_cache=True).past_key_values
    return model(token_ids[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1].float()
