"""Several threads that generate with one target: each gets the tokens of plain decoding, and none leaves a trace."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.attention import own_implementation, tree_attention, usable
from hf_specdec.decoding.targets.support import check_supported
from tests.method_table import METHODS
from tests.targets import PROMPTS, fresh_target


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target("llama", "sdpa")


def test_attention_is_restored_when_the_last_user_leaves(target: PreTrainedModel) -> None:
    first, second = tree_attention(target.config), tree_attention(target.config)
    first.__enter__()
    second.__enter__()
    assert own_implementation(target.config) == "sdpa"
    check_supported(target)  # a third call begins meanwhile
    assert usable(target)
    first.__exit__()
    assert target.config._attn_implementation != "sdpa"  # the second still needs it
    second.__exit__()
    assert target.config._attn_implementation == "sdpa"


def test_taps_read_the_forwards_of_their_own_call_only(target: PreTrainedModel) -> None:
    model, ids = TargetModel(target, (0, 2)), PROMPTS["batch of one"]()["input_ids"]
    with model.tapping(), ThreadPoolExecutor(1) as elsewhere, torch.no_grad():
        elsewhere.submit(target, ids[:, :5]).result()
        target(ids)
        features = model.read_taps()
    assert features is not None
    assert features.shape[1] == ids.shape[1]


@pytest.mark.parametrize(
    "methods", [("ddtree", "ddtree"), ("specblock", "eagle3"), ("dflash", None), ("ngram", "ngram")]
)
def test_threads_with_a_shared_target_get_the_tokens_of_plain_decoding(
    target: PreTrainedModel, methods: tuple[str | None, ...]
) -> None:
    settings = {"max_new_tokens": 40, "do_sample": False}
    drafters: list[Any] = [None if method is None else METHODS[method](target) for method in methods]
    for drafter in drafters:
        if isinstance(drafter, torch.nn.Module):
            drafter.to(torch.float64)
    prompts = [PROMPTS["batch of one"](), PROMPTS["ragged batch of three"]()]
    alone = [target.generate(**inputs, **settings).tolist() for inputs in prompts]

    def generate(index: int) -> list[Any]:
        drafter = drafters[index]
        return [target.generate(**prompts[index], **settings, assistant_model=drafter).tolist() for _ in range(3)]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(generate, range(2)))
    for index, texts in enumerate(found):
        assert texts == [alone[index]] * 3
    assert target.config._attn_implementation == "sdpa"
