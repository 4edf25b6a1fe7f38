"""Transformers' own logits processors, one by one: those that read the prefix, the row, the length, or keep state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, SynthIDTextWatermarkingConfig, WatermarkingConfig

from tests.method_table import make_ddtree
from tests.scripted import right_for
from tests.targets import PROMPTS, VOCAB, make_target

GREEDY = {"max_new_tokens": 14, "do_sample": False}


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa")


def allowed(row: int, prefix: Tensor) -> list[int]:
    """Depends on the row, on the length and on the last token."""
    return [(int(prefix[-1]) * 7 + 5 * row + len(prefix) + step) % VOCAB for step in range(6)]


PROCESSORS: dict[str, dict[str, Any]] = {
    "forced end": {"forced_eos_token_id": 9},
    "suppressed tokens": {"suppress_tokens": list(range(3, 30)), "begin_suppress_tokens": list(range(30, 50))},
    "bad words": {"bad_words_ids": [*([token] for token in range(3, 24)), [40, 41], [51, 12, 7]]},
    "biased sequences": {"sequence_bias": {(40,): -5.0, (51, 12): 8.0, (12,): 2.0}},
    "tokens allowed per row and prefix": {"prefix_allowed_tokens_fn": allowed},
    "decaying length": {"exponential_decay_length_penalty": (3, 1.4), "eos_token_id": 17},
    "repetition penalty and temperature": {"repetition_penalty": 1.6, "do_sample": True, "top_k": 1},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")},
    "renormalised": {"renormalize_logits": True, "remove_invalid_values": True},
}
KEEPS_STATE: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.6},
    "text watermark": {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7, 11])},
}


def run(target: PreTrainedModel, batch: str, settings: dict[str, Any], drafter: Any = None) -> list[list[int]]:
    arguments = {**PROMPTS[batch](), **GREEDY, **settings}
    return target.generate(**arguments, assistant_model=drafter).tolist()


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processor_returns_the_same_as_in_plain_decoding(target: PreTrainedModel, name: str, batch: str) -> None:
    settings = PROCESSORS[name]
    alone = run(target, batch, settings)
    if name != "renormalised":
        assert alone != run(target, batch, {}), "the processor does nothing here"
    script = torch.tensor(alone)
    diverging = script.clone()
    diverging[-1, 14:] = 3
    for drafter in (right_for([3, 0, 5], script), right_for(4, diverging), make_ddtree(target)):
        assert run(target, batch, settings, drafter) == alone


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("name", KEEPS_STATE)
def test_processor_with_state_works_as_in_plain_decoding(
    target: PreTrainedModel, name: str, batch: str, ends: bool
) -> None:
    settings = KEEPS_STATE[name]
    script = torch.tensor(run(target, batch, settings))
    assert script.tolist() != run(target, batch, {})
    if ends:  # the first row does, so that it shows padding from then on
        settings = settings | {"eos_token_id": int(script[0, 9 + 4])}
    alone = run(target, batch, settings)
    # Guidance runs the target itself between rounds, which must not be taken for features.
    for drafter in (right_for([3, 0, 5], script), make_ddtree(target)):
        assert run(target, batch, settings, drafter) == alone


@pytest.mark.parametrize("nodes", [0, 3])
def test_prefix_function_is_called_only_with_the_rows_own_text(target: PreTrainedModel, nodes: int) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    length = prompts["input_ids"].shape[1]
    asked = []

    def allowed(row: int, sent: Tensor) -> list[int]:
        """Row r writes tokens with id % 3 == r."""
        asked.append((row, sent.tolist()))
        assert all(token % 3 == row for token in sent[length:].tolist()), f"row {row} was asked about {sent.tolist()}"
        return [token for token in range(3, 64) if token % 3 == row]

    settings = {**prompts, "max_new_tokens": 16, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    alone = target.generate(**settings)
    by_plain_decoding = list(asked)
    drafter = right_for([nodes, 0, 1], alone)
    asked.clear()
    assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist()
    assert asked == by_plain_decoding


@pytest.mark.parametrize("ended", ["by a token", "by length"])
def test_processor_is_not_called_after_the_end_of_the_text(target: PreTrainedModel, ended: str) -> None:
    prompt, longest = PROMPTS["batch of one"](), 0

    def allowed(row: int, sent: Tensor) -> list[int]:
        nonlocal longest
        longest = max(longest, len(sent))
        return list(range(3, VOCAB))

    settings = {**prompt, **GREEDY, "prefix_allowed_tokens_fn": allowed}
    drafter = right_for(5, target.generate(**settings))
    first = int(target.generate(**settings)[0, prompt["input_ids"].shape[1] + 3])
    settings |= {"eos_token_id": first} if ended == "by a token" else {"max_new_tokens": 4}
    alone = target.generate(**settings)
    longest = 0
    assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist()
    assert longest == alone.shape[1] - 1
