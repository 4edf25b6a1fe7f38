"""Targets whose rotary frequencies depend on the length of the text: longrope and dynamic NTK."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specdec import attach
from hf_specdec.decoding.targets.rotary import RotaryLimit, rotary_limits
from hf_specdec.decoding.upstream import CACHE
from tests.method_table import METHODS
from tests.scripted import random_trees, right_for
from tests.targets import fresh_target, one_prompt, ragged_prompts

LIMIT = 20
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 8.0],
    "original_max_position_embeddings": LIMIT,
    "factor": 6.4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
PHI3 = {"sliding_window": None, "original_max_position_embeddings": LIMIT}
BY_TYPE = {"full_attention": DYNAMIC, "sliding_attention": PLAIN}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
    "by layer type": ("gemma3", {"rope_parameters": BY_TYPE, "max_position_embeddings": LIMIT}),
    # Computes its whole cache anew where the text grows past the limit.
    "Phi3": ("phi3-sliding", {"rope_parameters": LONGROPE} | PHI3),
    "Phi3, plain rope": ("phi3-sliding", PHI3),
}


def limited(kind: str) -> PreTrainedModel:
    """A target whose frequencies change at position `LIMIT`."""
    family, settings = TARGETS[kind]
    return fresh_target(family, "sdpa", **settings)


def skip_where_the_host_loses_the_text(kind: str) -> None:
    """Phi3 of transformers 5.17 drops its cache at the limit, and then runs the last token alone."""
    if kind.startswith("Phi3"):
        target, cache, ids = limited(kind), DynamicCache(), torch.ones(1, LIMIT + 1, dtype=torch.int64)
        target(ids[:, :LIMIT], **{CACHE: cache})
        inputs = target.prepare_inputs_for_generation(
            ids, next_sequence_length=1, **{CACHE: cache}, attention_mask=torch.ones_like(ids)
        )
        if inputs["input_ids"].shape[1] == 1:
            pytest.skip("this transformers drops Phi3's cache at the limit and forgets the text")


def ragged_and_long() -> dict[str, Tensor]:
    """Three prompts of 30, 22 and 26 tokens, left-padded: all beyond the limit."""
    ids = torch.randint(3, 64, (3, 30), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :8] = mask[2, :4] = 0
    return {"input_ids": ids.where(mask.bool(), 0), "attention_mask": mask}


def assert_same_as_plain(target: PreTrainedModel, prompts: dict[str, Tensor], new_tokens: int) -> None:
    settings = {
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    # A copy each: dynamic frequencies depend on what the model has run before.
    alone = copy.deepcopy(target).generate(**prompts, **settings)
    for drafter in (right_for([3, 0, 5, 1, 2], alone.sequences), random_trees(alone.sequences)):
        assisted = copy.deepcopy(target).generate(**prompts, **settings, assistant_model=drafter)
        assert assisted.sequences.tolist() == alone.sequences.tolist()
        torch.testing.assert_close(assisted.logits, alone.logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [9, LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 10])
@pytest.mark.parametrize("kind", TARGETS)
def test_text_beyond_the_limit_equals_plain_decoding(kind: str, length: int) -> None:
    if length <= LIMIT:
        skip_where_the_host_loses_the_text(kind)
    assert_same_as_plain(limited(kind), one_prompt(length=length), 24)


@pytest.mark.parametrize("new_tokens", [10, 11, 12])
@pytest.mark.parametrize("kind", TARGETS)
def test_nodes_beyond_the_limit_do_not_change_texts_that_stay_below(kind: str, new_tokens: int) -> None:
    assert_same_as_plain(limited(kind), one_prompt(length=9), new_tokens)
    assert_same_as_plain(limited(kind), ragged_prompts(), new_tokens)


@pytest.mark.parametrize("kind", ["longrope", "Phi3"])
def test_rows_that_are_all_beyond_the_limit_are_exact(kind: str) -> None:
    assert_same_as_plain(limited(kind), ragged_and_long(), 16)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "by layer type", "Phi3"])
def test_rows_that_pass_the_limit_in_different_rounds_are_decoded_plainly(kind: str) -> None:
    target, prompts = limited(kind), {**ragged_prompts(), "max_new_tokens": 13, "do_sample": False}
    alone = copy.deepcopy(target).generate(**prompts)
    drafter = right_for(2, torch.zeros(3, 60, dtype=torch.int64))
    with pytest.warns(UserWarning, match=r"from position 20 on .*\[9, 4, 7\].* at most 12 new tokens.*Nothing is dra"):
        assisted = copy.deepcopy(target).generate(**prompts, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    with attach(target, drafter), pytest.warns(UserWarning, match="from position 20 on"):
        assert target.generate(**prompts).tolist() == alone.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_drafts_beyond_the_limit(method: str) -> None:
    target, prompts = limited("longrope"), one_prompt()
    settings = {"max_new_tokens": 24, "do_sample": False}
    alone = target.generate(**prompts, **settings)
    drafter = METHODS[method](target)
    if isinstance(drafter, torch.nn.Module):
        drafter.to(torch.float64)
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()


@pytest.mark.parametrize("method", ["causal_lm_chain", "causal_lm_tree", "specbranch"])
def test_a_draft_model_may_pass_a_limit_of_its_own(method: str) -> None:
    target, prompts = fresh_target("llama", "sdpa"), one_prompt(length=LIMIT + 2)
    settings = {"max_new_tokens": 12, "do_sample": False}
    alone = target.generate(**prompts, **settings)
    drafter = METHODS[method](limited("Phi3"))
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()


@pytest.mark.parametrize("kind", ["Phi3", "Phi3, plain rope"])
def test_a_cache_that_is_continued_over_the_limit(kind: str) -> None:
    skip_where_the_host_loses_the_text(kind)
    target, settings = limited(kind), {"max_new_tokens": 12, "do_sample": False}

    def two_turns(drafter: Any = None) -> Tensor:
        cache = DynamicCache(config=target.config)
        first = target.generate(**one_prompt(), max_new_tokens=6, do_sample=False, **{CACHE: cache})
        ids = torch.cat([first, torch.arange(5, 16)[None]], 1)
        mask = torch.ones_like(ids)
        both = {CACHE: cache, "assistant_model": drafter}
        second = target.generate(ids, attention_mask=mask, **settings, **both)
        third = torch.cat([second, torch.arange(5, 9)[None]], 1)  # and plainly on from the cache that was handed back
        return target.generate(third, attention_mask=torch.ones_like(third), **{CACHE: cache}, **settings)

    alone = two_turns()
    for drafter in (right_for([3, 0, 5], alone), random_trees(alone)):
        assert two_turns(drafter).tolist() == alone.tolist()


def test_limits_are_read_by_layer_type_and_of_other_types_there_are_none() -> None:
    assert rotary_limits(limited("by layer type").config) == [RotaryLimit("dynamic", LIMIT)]
    assert rotary_limits(limited("Phi3").config) == [RotaryLimit("longrope", LIMIT)]
    for family in ("llama", "gpt2", "gemma3"):
        assert rotary_limits(fresh_target(family, "eager").config) == []
