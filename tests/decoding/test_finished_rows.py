"""Rows that have finished leave the batch: nothing changes but what a round costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_specdec.decoding import loop
from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.drafting.drafter import Drafter
from tests.decoding.test_outputs import assert_same_cache
from tests.method_table import METHODS
from tests.targets import make_target, tiny_tokenizer

NEW = 24


def prompts() -> dict[str, Tensor]:
    """Five rows, left-padded by 0 to 4 tokens."""
    ids = torch.randint(3, 60, (5, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(5):
        mask[row, :row] = 0
        ids[row, :row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def settings_of(target: Any) -> dict[str, Any]:
    """Rows end after 3, 6, 9, ... tokens: each one's own token there is an end of text."""
    script = target.generate(**prompts(), max_new_tokens=NEW, do_sample=False)[:, 9:]
    ends = [int(script[row, 2 + 3 * row]) for row in range(4)]
    return {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": ends, "return_dict_in_generate": True}


def drafter_of(method: str, target: Any, **options: Any) -> Drafter:
    drafter = METHODS[method](target)
    if isinstance(drafter, torch.nn.Module):
        drafter.to(torch.float64)
    drafter.set_options(**options)
    return drafter


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each round has had."""
    seen: list[int] = []
    commit = loop.SpeculativeDecoding.commit

    def watched(self: loop.SpeculativeDecoding, verified: loop.VerifiedRound) -> None:
        seen.append(len(verified.tree.token_ids))
        commit(self, verified)

    monkeypatch.setattr(loop.SpeculativeDecoding, "commit", watched)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3-mixed"])
@pytest.mark.parametrize("method", METHODS)
def test_finished_rows_leave_the_batch_and_change_nothing(method: str, family: str, batches: list[int]) -> None:
    target = make_target(family, "sdpa")
    settings = settings_of(target)
    alone = target.generate(**prompts(), **settings)
    drafter = drafter_of(method, target)
    assisted = target.generate(**prompts(), **settings, assistant_model=drafter)
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert_same_cache(assisted[CACHE], alone[CACHE])
    assert batches[0] == 5
    assert min(batches) < 5 or method == "specbranch"  # which has a worker of its own, and keeps all rows
    assert [len(row) for row in drafter.stats.per_step_accepted] != [len(drafter.stats.per_step_accepted[0])] * 5


# Which of four rows end, and after how many tokens: the first one is the prefill's, before anything is drafted.
ENDINGS = {
    "one at once": {3: 1},
    "two at once": {0: 1, 2: 1},
    "all but one at once": {0: 1, 2: 1, 3: 1},
    "all at once": {0: 1, 1: 1, 2: 1, 3: 1},
    "one after the other": {3: 1, 1: 2, 2: 3, 0: 4},
}


@pytest.mark.parametrize("method", METHODS)
def test_rows_may_leave_before_the_first_draft(method: str, batches: list[int]) -> None:
    target = make_target("llama", "sdpa")
    four = {name: values[:4] for name, values in prompts().items()}
    script = target.generate(**four, max_new_tokens=6, do_sample=False)[:, 9:]
    drafter = drafter_of(method, target)
    for name, ends in ENDINGS.items():
        batches.clear()
        tokens = sorted({int(script[row, count - 1]) for row, count in ends.items()})
        settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": tokens}
        alone = target.generate(**four, **settings)
        assisted = target.generate(**four, **settings, assistant_model=drafter)
        assert assisted.tolist() == alone.tolist(), name
        left = 4 - sum(int(token) in tokens for token in script[:, 0])
        assert left < 4, "no row ends at once"
        expected = 4 if method == "specbranch" else left  # which keeps all rows
        assert batches[:1] == ([expected] if left else []), name


@pytest.mark.parametrize("method", ["ddtree", "causal_lm_tree", "specblock", "eagle3", "medusa", "ngram"])
def test_rows_leave_under_an_automatic_budget_too(method: str, batches: list[int]) -> None:
    target = make_target("llama", "sdpa")
    settings = settings_of(target)
    alone = target.generate(**prompts(), **settings)
    drafter = drafter_of(method, target, tree_budget="auto")
    for _ in range(2):
        assisted = target.generate(**prompts(), **settings, assistant_model=drafter)
        assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert min(batches) < 5


@pytest.mark.parametrize("extra", [{"output_scores": True}, {"repetition_penalty": 1.2}], ids=str)
def test_rows_stay_in_the_batch_if_an_observer_needs_all_rows(extra: dict[str, Any], batches: list[int]) -> None:
    target = make_target("llama", "sdpa")
    settings = settings_of(target) | extra
    alone = target.generate(**prompts(), **settings)
    assisted = target.generate(**prompts(), **settings, assistant_model=drafter_of("ddtree", target))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert set(batches) == {5}


@pytest.mark.parametrize("method", METHODS)
def test_inactive_row_can_continue_alone(method: str, batches: list[int]) -> None:
    # Without an end of text, a row that stops waits while another one goes on, and then says as much as that one.
    target = make_target("llama", "sdpa")
    pair = {name: values[:2] for name, values in prompts().items()}
    settings = {"max_new_tokens": 5, "do_sample": False}
    first, second = tiny_tokenizer().batch_decode(target.generate(**pair, **settings)[:, 9 : 9 + 4])
    assert first[-3:] not in first[:-1]
    assert first[-3:] not in second
    settings |= {"stop_strings": [first[-3:]], "tokenizer": tiny_tokenizer()}
    alone = target.generate(**pair, **settings)
    assisted = target.generate(**pair, **settings, assistant_model=drafter_of(method, target))
    assert assisted.tolist() == alone.tolist()
    # SpecBranch keeps all rows, and a tree of a noisy copy is right too often for a row to wait.
    assert batches[-1] == 1 or method in ("specbranch", "causal_lm_tree", "causal_lm_ssd")


def test_cache_drops_rows_and_restores_them() -> None:
    torch.manual_seed(0)
    cache = TreeCache.empty(2, 4, 2, 3, dtype=torch.float64, device=torch.device("cpu"), capacity=20)
    for layer in cache.layers:
        layer.update(torch.randn(4, 2, 6, 3).double(), torch.randn(4, 2, 6, 3).double())
    cache.commit_first(Counts.of([2, 6, 1, 4]))
    lengths = list(cache.row_lengths)
    before = [[layer.keys[row, :, :length].clone() for row, length in enumerate(lengths)] for layer in cache.layers]
    aside = {row: cache.take_row(row) for row in (1, 2)}
    cache.keep_rows([0, 3])
    assert cache.row_lengths == [2, 4]
    assert cache.longest == 4
    for layer in cache.layers:
        layer.update(torch.ones(2, 2, 5, 3).double(), torch.ones(2, 2, 5, 3).double())
    cache.commit_first(Counts.of([5, 1]))
    cache.put_rows(aside)
    assert cache.row_lengths == [7, 6, 1, 5]
    for layer, rows in zip(cache.layers, before, strict=True):
        for row, expected in enumerate(rows):
            assert torch.equal(layer.keys[row, :, : lengths[row]], expected)
        assert torch.equal(layer.keys[0, :, 2:7], torch.ones(2, 5, 3).double())


def test_inactive_rows_that_may_continue_stay(batches: list[int]) -> None:
    # Without an end-of-text token, a row that another criterion has stopped goes on when others get longer.
    class FirstRowStopsEarly(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            length = input_ids.shape[1]
            return torch.tensor([length >= (12 if row == 0 else 20) for row in range(len(input_ids))])

    target = make_target("llama", "sdpa")
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    stops = StoppingCriteriaList([FirstRowStopsEarly()])
    original = target.generation_config.eos_token_id
    target.generation_config.eos_token_id = None
    try:
        alone = target.generate(**prompts(), **settings, stopping_criteria=stops)
        assisted = target.generate(
            **prompts(), **settings, stopping_criteria=stops, assistant_model=drafter_of("ddtree", target)
        )
    finally:
        target.generation_config.eos_token_id = original
    assert assisted.tolist() == alone.tolist()
    assert set(batches) == {5}
