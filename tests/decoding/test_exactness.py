"""Greedy speculation gives plain `generate`'s tokens: families x attention x batches x settings x ways of drafting."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXJapaneseConfig, GPTNeoXJapaneseForCausalLM, PreTrainedModel

from tests.method_table import METHODS
from tests.scripted import random_trees, right_for
from tests.targets import FAMILIES, HYBRIDS, PROMPTS, fresh_target, make_target, tiny_tokenizer

NEW = 16
REPEATING = ("falcon-alibi", "bart")  # of these, logits are compared in `test_states.py`


def settings_for(setting: str, continuation: Tensor) -> dict[str, Any]:
    """Arguments of `generate`; what stops a run is taken from the greedy `continuation` [batch, new] of the target."""
    if setting == "greedy":
        return {}
    if setting == "repetition penalty and no repeated n-gram":
        return {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    if setting == "stop string":
        # The first row's seventh to ninth token without the last letter, so that it may end inside a token.
        text = tiny_tokenizer().decode(continuation[0, 6:9])
        return {"stop_strings": [text[:-1]], "tokenizer": tiny_tokenizer()}
    assert setting == "minimum length"
    # These would end each row at its third token, were it not for the minimum.
    return {"min_new_tokens": 11, "eos_token_id": continuation[:, 2].tolist()}


SETTINGS = ["greedy", "repetition penalty and no repeated n-gram", "stop string", "minimum length"]


def family_target(family: str, attention: str, batch: str) -> PreTrainedModel:
    # In float64 transformers' eager attention turns rows of left padding into NaN, see the test of its own below.
    padded_eager = attention == "eager" and batch != "batch of one"
    return make_target(family, attention, torch.float32 if padded_eager else torch.float64)


@functools.cache
def plain(family: str, attention: str, batch: str, setting: str) -> tuple[dict[str, Any], Tensor]:
    """The settings as arguments, and what the target alone gives."""
    target, prompts = family_target(family, attention, batch), PROMPTS[batch]()
    greedy = {"max_new_tokens": NEW, "do_sample": False}
    alone = target.generate(**prompts, **greedy)
    continuation = alone[:, prompts["input_ids"].shape[1] :]
    # A target that repeats one token would agree with any wrong mask.
    assert family in REPEATING or all(len(set(row)) >= 4 for row in continuation.tolist())
    if setting == "greedy":
        return greedy, alone
    arguments = {**greedy, **settings_for(setting, continuation)}
    return arguments, target.generate(**prompts, **arguments)


def test_attention_that_a_family_writes_itself_takes_batches() -> None:
    # It views keys as one block of memory, which entries in a buffer of more rows than one are not.
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(3)
    target = GPTNeoXJapaneseForCausalLM(GPTNeoXJapaneseConfig(**shape, initializer_range=0.3)).eval()
    target.generation_config.update(pad_token_id=0, eos_token_id=None)
    for prompts in (make() for make in PROMPTS.values()):
        alone = target.generate(**prompts, max_new_tokens=NEW, do_sample=False)
        for method in ("causal_lm_tree", "ngram"):
            drafter = METHODS[method](target)
            assisted = target.generate(**prompts, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
            torch.testing.assert_close(assisted, alone, rtol=0, atol=0)
            assert drafter.stats is not None
            assert drafter.stats.num_accepted_draft_tokens > 0


TARGETS = [
    (family, each) for family, (_, _, implementations) in (FAMILIES | HYBRIDS).items() for each in implementations
]


def drafters_for(family: str, attention: str) -> list[str]:
    """Each family meets both: one with each of its implementations, or both with the only one."""
    names = {"eager": "scripted", "sdpa": "random trees"}
    return [names[attention]] if len((FAMILIES | HYBRIDS)[family][2]) > 1 else [*names.values()]


@pytest.mark.combinations(60)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("kind", TARGETS, ids="-".join)
def test_drafts_that_are_partly_right_change_no_token(kind: tuple[str, str], batch: str, setting: str) -> None:
    family, attention = kind
    target, prompts = family_target(family, attention, batch), PROMPTS[batch]()
    arguments, alone = plain(family, attention, batch, setting)
    drafters = {"scripted": right_for([3, 0, 5, 1, 2], alone), "random trees": random_trees(alone)}
    for name in drafters_for(family, attention):
        drafter = drafters[name]
        assisted = target.generate(**prompts, **arguments, assistant_model=drafter)
        assert assisted.tolist() == alone.tolist(), name
        assert drafter.stats.num_accepted_draft_tokens > 0, f"{name}: no draft was right, so nothing was tested"


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("setting", SETTINGS[:2])
@pytest.mark.parametrize("family", ["qwen3-mixed", "gemma3"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_generate_equals_target_alone(method: str, family: str, batch: str, setting: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS[batch]()
    arguments, alone = plain(family, "sdpa", batch, setting)
    drafter = METHODS[method](target)
    assisted = target.generate(**prompts, **arguments, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    # A look-up finds nothing in a text that repeats nothing.
    assert drafter.stats.num_draft_tokens > 0 or method in ("ngram", "suffix", "token-recycling")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("softmax_in_its_type")
def test_left_padding_changes_no_token_in_float64_with_eager_attention(family: str) -> None:
    target, prompts = make_target(family, "eager", torch.float64), PROMPTS["ragged batch of three"]()
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    alone = target.generate(**prompts, **arguments)
    assisted = target.generate(**prompts, **arguments, assistant_model=right_for([2, 0, 3], alone))
    assert assisted.tolist() == alone.tolist()


def test_padding_does_not_count_among_the_tokens_of_an_attention_chunk() -> None:
    target, prompts = make_target("llama4", "sdpa"), PROMPTS["ragged batch of three"]()
    settings = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    alone = target.generate(**prompts, **settings)
    drafter = right_for([2, 0, 3], alone.sequences)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter)
    torch.testing.assert_close(torch.stack(assisted.logits), torch.stack(alone.logits), rtol=1e-6, atol=1e-6)
    assert drafter.stats.num_accepted_draft_tokens > 0


def test_text_up_to_the_last_learned_position_can_be_generated() -> None:
    # Learned positions end somewhere; drafts beyond the longest text that is allowed must not be looked up there.
    target = fresh_target("gpt2", "sdpa", max_position_embeddings=24)
    prompts = PROMPTS["batch of one"]()
    arguments = {"max_length": 24, "do_sample": False}
    alone = target.generate(**prompts, **arguments)
    for num_right in (1, 4, 7):
        assisted = target.generate(**prompts, **arguments, assistant_model=right_for(num_right, alone))
        assert assisted.tolist() == alone.tolist()


def test_prompt_of_one_token_works() -> None:
    target = make_target("llama", "sdpa")
    prompt = torch.tensor([[5]])
    arguments = {"max_new_tokens": 10, "do_sample": False}
    alone = target.generate(prompt, **arguments)
    assert target.generate(prompt, **arguments, assistant_model=right_for(3, alone)).tolist() == alone.tolist()


def test_long_text_outgrows_the_first_buffers_without_a_change() -> None:
    target = fresh_target("qwen3-mixed", "sdpa", max_position_embeddings=2048)
    prompts = PROMPTS["ragged batch of three"]()
    arguments = {"max_new_tokens": 700, "do_sample": False}
    alone = target.generate(**prompts, **arguments)
    drafter = right_for([60, 3, 150], alone, siblings=0)  # rounds wider than the room kept for them
    assert target.generate(**prompts, **arguments, assistant_model=drafter).tolist() == alone.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_targets_run(dtype: torch.dtype) -> None:
    """Near-ties may fall either way in half precision: no token is further from the best one than rounding explains."""
    target, prompts = make_target("llama", "sdpa", dtype), PROMPTS["ragged batch of three"]()
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=right_for(2, alone))
    assert assisted.shape == alone.shape
    assert assisted[:, :10].tolist() == alone[:, :10].tolist()
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, 8), value=1)
    whole = {"input_ids": assisted, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        exact = copy.deepcopy(target).double()(**whole).logits[:, -9:-1]
        rounded = target(**whole).logits[:, -9:-1].double()
    behind = exact.amax(-1) - exact.gather(-1, assisted[:, -8:].unsqueeze(-1)).squeeze(-1)
    assert behind.max() <= 4 * (rounded - exact).abs().max()
    assert behind.max() < (exact.amax(-1) - exact.mean(-1)).min()
