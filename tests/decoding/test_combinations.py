"""Settings drawn at random, many at once: whatever they are together, speculation gives plain `generate`'s tokens.

The other files hold one thing at a time. Here seeds draw the target, the batch, the way of drafting and what is asked
of `generate`, so that things meet that nobody has thought of together.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_specdec.drafting.drafter import Drafter
from tests.method_table import METHODS
from tests.scripted import random_trees, right_for
from tests.targets import FAMILIES, PAD, VOCAB, fresh_target, tiny_tokenizer

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "dflash": {"block_size": [2, 3, 5]},
    "ddtree": {"block_size": [2, 5], "tree_budget": [1, 3, 17, "auto"]},
    "ngram": {"tree_budget": [1, 5, 17, "auto"]},
    "causal_lm_chain": {"depth": [1, 2, 6]},
    "causal_lm_tree": {"depth": [1, 2, 6], "tree_budget": [1, 8, "auto"]},
    "eagle3": {"depth": [1, 2, 5], "top_k": [1, 4], "tree_budget": [1, 8, "auto"]},
    "medusa": {"tree_budget": [1, 8, "auto"]},
    "specblock": {"num_blocks": [1, 2, 4], "tree_budget": [1, 8, "auto"]},
    "specbound": {"w_max": [1, 2, 7], "threshold": [0.05, 0.5]},
    "specbranch": {"k_max": [1, 2, 4], "min_confidence": [0.0, 0.5]},
}


class DislikesTheLastToken(LogitsProcessor):
    """A processor that looks at each row's own prefix and at its length."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[torch.arange(len(scores)), input_ids[:, -1]] -= 3.0
        scores[:, 5] += float(input_ids.shape[1] % 3 == 0)
        return scores


class StopsAtMultiples(StoppingCriteria):
    """Stops rows at some token ids, once they are long enough."""

    def __init__(self, divisor: int, after: int) -> None:
        self.divisor, self.after = divisor, after

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        return (input_ids[:, -1] % self.divisor == 0) & (input_ids.shape[1] > self.after)


def drawn_prompts(draw: random.Random, batch: int) -> dict[str, Tensor]:
    lengths = [draw.randint(1, 14) for _ in range(batch)]
    mask = torch.zeros(batch, max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    ids = torch.randint(3, VOCAB, mask.shape, generator=torch.Generator().manual_seed(draw.randrange(1000)))
    return {"input_ids": ids.where(mask.bool(), PAD), "attention_mask": mask}


def drawn_settings(draw: random.Random, target: PreTrainedModel, prompts: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments of `generate`; what bans, favours or ends tokens is taken from what the target would say."""
    length = prompts["input_ids"].shape[1]
    said = target.generate(**prompts, max_new_tokens=24, do_sample=False)[:, length:]

    def some_said() -> int:
        token = int(said[draw.randrange(len(said)), draw.randrange(said.shape[1])])
        return max(1, token)  # transformers 5.17 takes no bias on token 0

    possible: list[tuple[float, dict[str, Any]]] = [
        (0.25, {"repetition_penalty": draw.choice([0.8, 1.7])}),
        (0.2, {"no_repeat_ngram_size": draw.choice([1, 2, 3])}),
        (0.2, {"suppress_tokens": [some_said(), some_said()]}),
        (0.15, {"bad_words_ids": [[some_said()], [some_said(), some_said()]]}),
        (0.15, {"sequence_bias": [[[some_said()], -2.0], [[some_said(), some_said()], 4.0]]}),
        (0.3, {"eos_token_id": [some_said(), some_said()]}),
        (0.15, {"stop_strings": [tiny_tokenizer().decode(said[0, 2:5])[:-1]], "tokenizer": tiny_tokenizer()}),
        (0.15, {"prefill_chunk_size": draw.choice([1, 3, 5])}),
        (0.1, {"max_time": 1000.0}),
        (0.2, {"logits_processor": LogitsProcessorList([DislikesTheLastToken()])}),
        (0.2, {"stopping_criteria": StoppingCriteriaList([StopsAtMultiples(draw.choice([3, 7]), length + 2)])}),
        # One token is left to draw from, so that what sampling does must be what greedy decoding does.
        (0.2, {"do_sample": True, "top_k": 1, "num_return_sequences": draw.choice([1, 3])}),
        (0.2, {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}),
    ]
    settings: dict[str, Any] = {"max_new_tokens": draw.choice([1, 2, 5, 13, 40]), "do_sample": False}
    for probability, setting in possible:
        if draw.random() < probability:
            settings |= setting
    return settings


def drawn_drafter(draw: random.Random, target: PreTrainedModel, script: Tensor) -> Drafter:
    """A random drafter of any method, or one that knows part of `script`, what the target says if nothing is asked."""
    method = draw.choice([*METHODS, "partly right", "random trees"])
    if method == "partly right":
        return right_for([draw.choice([0, 1, 3, 9]) for _ in script], script)
    if method == "random trees":
        return random_trees(script, nodes=draw.choice([3, 12, 30]))
    drafter = METHODS[method](target)
    drafter.set_options(**{name: draw.choice(values) for name, values in OPTIONS.get(method, {}).items()})
    return drafter


@pytest.mark.parametrize("seed", range(120))
def test_settings_drawn_together_change_no_token(seed: int) -> None:
    draw = random.Random(seed)
    family = draw.choice([name for name in FAMILIES if "sdpa" in FAMILIES[name][2]])
    batch = draw.choice([1, 1, 2, 3, 5])
    target = fresh_target(family, "sdpa", seed=seed)
    prompts = drawn_prompts(draw, batch)
    settings = drawn_settings(draw, target, prompts)
    script = target.generate(**prompts, max_new_tokens=settings["max_new_tokens"], do_sample=False)
    drafter = drawn_drafter(draw, target, script.repeat_interleave(settings.get("num_return_sequences", 1), 0))
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter)
    if "output_logits" not in settings:
        assert assisted.tolist() == alone.tolist()
        return
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    may_end = settings.keys() & {"eos_token_id", "stop_strings", "stopping_criteria"}
    for name in ("logits", "scores"):
        assert len(assisted[name]) == len(alone[name])
        before = torch.ones(len(alone.sequences), dtype=torch.bool)
        for ours, plain in zip(assisted[name], alone[name], strict=True):
            # Rows that have ended are zeros here; plain decoding runs their padding through the target.
            going = ours.any(-1)
            assert torch.allclose(ours[going], plain[going], atol=1e-9)
            assert going.all() or (may_end and going.any() and not (going & ~before).any())
            before = going
