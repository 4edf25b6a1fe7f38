"""The first difference between an assisted and a plain greedy run, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from hf_specdec.decoding.upstream import cache_name
from hf_specdec.verification.precision import top_difference
from hf_specdec.verification.replay import ForcedText, Prompt, settings

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
    prompt: Tensor | Prompt,
    plain: list[int],
    assisted: list[int],
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Difference:
    """Finds where two continuations differ, and measures the target's logits there.

    Args:
        model: the target.
        prompt: of both runs, [1, seq] int64 or with pictures.
        plain: tokens of plain decoding.
        assisted: tokens with a drafter; different from `plain`.
        precision: makes a context in which the target computes in a higher precision; its own by default.
    """
    prompt = Prompt(prompt) if isinstance(prompt, Tensor) else prompt
    pairs = zip(plain, assisted, strict=False)
    position = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(plain), len(assisted)))
    if position == min(len(plain), len(assisted)):  # one run is longer: no near tie explains it
        ends = -1
        tokens = [row[position] if position < len(row) else ends for row in (plain, assisted)]
        return Difference(position, tokens[0], tokens[1], math.inf, 0.0)
    new = torch.tensor([plain[:position]], dtype=torch.int64, device=prompt.ids.device)
    text = torch.cat([prompt.ids, new], dim=1)
    pictures = prompt.has_pictures(model)
    # With pictures only the continuation can be run token by token.
    steps = min(STEPS, position + 1 if pictures else text.shape[1])
    with precision():
        logits = prompt.whole_logits(model, text)[0, -steps:].cpu().double()
    stepped = _continuation(model, prompt, text)[-steps:] if pictures else _stepped(model, text, steps)
    best, second = logits[-1].topk(2).values.tolist()
    ulp = unit_in_the_last_place(best, model.dtype)
    rounding = max(ulp, top_difference(torch.stack(stepped), logits))
    gap = best - float(logits[-1, assisted[position]])
    return Difference(position, plain[position], assisted[position], gap, rounding, best - second, ulp)


def _stepped(model: PreTrainedModel, text: Tensor, steps: int) -> list[Tensor]:
    """Logits [vocab] after each of the last tokens of a text, run one at a time."""
    cache, stepped, name = None, [], cache_name(model)
    for end in range(text.shape[1] - steps + 1, text.shape[1] + 1):
        output = model(text[:, 0 if cache is None else end - 1 : end], use_cache=True, **{name: cache})
        cache = output[name]
        stepped.append(output.logits[0, -1].cpu().double())
    return stepped


def _continuation(model: PreTrainedModel, prompt: Prompt, text: Tensor) -> list[Tensor]:
    """Logits [vocab] of plain `generate` at each step of a text that continues the prompt, and after it."""
    new = text.shape[1] - prompt.ids.shape[1] + 1
    config = settings(model, do_sample=False, max_new_tokens=new, return_dict_in_generate=True, output_logits=True)
    forced: Any = LogitsProcessorList([ForcedText(text[0])])
    given = {"attention_mask": torch.ones_like(prompt.ids), **prompt.more}
    output: Any = model.generate(prompt.ids, generation_config=config, logits_processor=forced, **given)
    return [logits[0].cpu().double() for logits in output.logits]


def unit_in_the_last_place(value: float, dtype: torch.dtype) -> float:
    """The distance from `value` to the next larger number of a floating `dtype`; NaN if it is not finite.

    Examples:
        >>> unit_in_the_last_place(20.0, torch.bfloat16)
        0.125
    """
    if not math.isfinite(value):
        return math.nan
    known = torch.finfo(dtype)
    return known.eps * 2.0 ** math.floor(math.log2(max(abs(value), known.smallest_normal)))
