"""One seed gives one text, whatever was drafted; and the noise that this rests on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.decoding.noise import PositionNoise
from hf_specdec.decoding.policies import AutoBudget, BudgetKnowledge
from hf_specdec.drafting.drafter import Drafter
from tests.decoding.test_finished_rows import prompts as five_prompts
from tests.decoding.test_finished_rows import settings_of
from tests.laws import assert_follows
from tests.method_table import METHODS
from tests.scripted import fixed_tree, right_for
from tests.targets import PROMPTS, make_target

SAMPLED = {"max_new_tokens": 20, "do_sample": True, "top_k": 0, "temperature": 2.0}
# They draw their drafts in a call that samples. The target's choice is coupled with a draw, so it depends on it.
DRAWS = {"causal_lm_chain", "dflash2_chain", "dspark_chain", "specbound", "specbranch"}


class Unchanged(LogitsProcessor):
    """Of an unknown class, so that it is called column by column."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def text(target: Any, drafter: Drafter, inputs: dict[str, Tensor], seed: int = 7, **settings: Any) -> list[list[int]]:
    torch.manual_seed(seed)
    output: Tensor = target.generate(**inputs, **(SAMPLED | settings), assistant_model=drafter)
    return output.tolist()


def without_drafts() -> Drafter:
    return fixed_tree([], [])


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", [method for method in METHODS if method not in DRAWS])
def test_a_seed_gives_one_text_with_any_drafter(method: str, batch: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    drafter = METHODS[method](target)
    expected = text(target, without_drafts(), prompts)
    assert text(target, drafter, prompts) == expected
    assert text(target, drafter, prompts, seed=8) != expected  # look-ups remember it
    assert text(target, drafter, prompts) == expected


class Irregular(AutoBudget):
    """Drafts in some rounds, as times may have it."""

    rounds = 0

    @property
    def drafting(self) -> bool:
        self.rounds += 1
        return self.rounds % 3 != self.knowledge.recent[-1] % 3  # another one in another call


@pytest.mark.parametrize("method", sorted(DRAWS))
def test_a_seed_gives_one_text_wherever_times_decide_what_is_drafted(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    expected = text(target, without_drafts(), prompts)
    for skipped in range(3):
        knowledge = BudgetKnowledge()
        knowledge.recent.append(skipped)
        monkeypatch.setattr(
            type(drafter), "drafting_policy", lambda self, model, rows, stats, of=knowledge: Irregular(of, stats)
        )
        assert text(target, drafter, prompts) == expected
        assert drafter.stats is not None
        assert drafter.stats.num_draft_tokens


@pytest.mark.parametrize("method", ["ddtree", "suffix", "merged"])
def test_a_seed_gives_one_text_with_an_automatic_budget(method: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    drafter.set_options(tree_budget="auto")
    expected = text(target, without_drafts(), prompts)
    for _ in range(3):
        assert text(target, drafter, prompts) == expected


@pytest.mark.parametrize("reads_prefix", [False, True])
@pytest.mark.parametrize("num_right", [0, 3, [5, 0, 2]], ids=str)
def test_a_seed_gives_one_text_however_many_drafts_are_accepted(num_right: Any, reads_prefix: bool) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    settings = {"repetition_penalty": 1.3} if reads_prefix else {}
    expected = text(target, without_drafts(), prompts, **settings)
    drafter = right_for(num_right, torch.tensor(expected))
    assert text(target, drafter, prompts, **settings) == expected
    assert drafter.stats is not None
    assert (drafter.stats.num_accepted_draft_tokens > 0) == (num_right != 0)


def test_code_of_the_user_and_rows_that_leave_change_no_text() -> None:
    target = make_target("llama", "sdpa")
    ends = settings_of(target)["eos_token_id"]
    expected = text(target, without_drafts(), five_prompts(), eos_token_id=ends)
    assert len({row.index(0, 9) if 0 in row[9:] else len(row) for row in expected}) > 2, "rows end at different tokens"
    drafter = METHODS["ddtree"](target)
    assert text(target, drafter, five_prompts(), eos_token_id=ends) == expected
    processors = LogitsProcessorList([Unchanged()])
    assert text(target, drafter, five_prompts(), eos_token_id=ends, logits_processor=processors) == expected


@pytest.mark.parametrize("batch", PROMPTS)
def test_a_call_takes_one_number_from_the_default_generator(batch: str) -> None:
    # So the second of two calls has one text too.
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    states = []
    for drafter in (without_drafts(), METHODS["ddtree"](target), METHODS["ngram"](target)):
        text(target, drafter, prompts)
        states.append(torch.get_rng_state())
    torch.manual_seed(7)
    torch.empty(1, dtype=torch.int64).random_()
    assert all(torch.equal(state, torch.get_rng_state()) for state in states)
    assert (
        text(target, without_drafts(), prompts)
        != target.generate(**prompts, **SAMPLED, assistant_model=without_drafts()).tolist()
    ), "each call has other noise"


@pytest.mark.parametrize("method", sorted(DRAWS - {"specbranch"}))
def test_drawn_drafts_repeat_a_text_with_the_same_drafts(method: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    assert text(target, drafter, prompts) == text(target, drafter, prompts)


def test_noise_is_the_same_for_a_place_and_other_for_others() -> None:
    torch.manual_seed(0)
    noise = PositionNoise(3, torch.device("cpu"))
    rows, positions = torch.tensor([0, 2]), torch.tensor([5, 9])
    pair = noise.at(rows, positions, 100)
    grid = noise.at(torch.arange(3)[:, None], torch.arange(12), 100)
    assert torch.equal(pair, grid[rows, positions])
    assert grid.flatten().unique().numel() > 0.999 * grid.numel()
    noise.keep_rows([2, 0])
    assert torch.equal(noise.at(torch.tensor([1, 0]), positions, 100), pair)


@pytest.mark.parametrize("apart", ["rows", "positions", "seeds"])
def test_choices_by_noise_are_independent_and_follow_the_distribution(apart: str) -> None:
    # 40,000 pairs of choices among 6 tokens; chi-square, false alarm with a chance of 1e-6.
    torch.manual_seed(1)
    law, draws = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.0499, 0.0001]), 40_000
    noise = PositionNoise(draws, torch.device("cpu"))
    rows = torch.arange(draws)
    first = noise.at(rows, rows * 0 + 3, len(law))
    other = {
        "rows": lambda: first.roll(1, 0),
        "positions": lambda: noise.at(rows, rows * 0 + 4, len(law)),
        "seeds": lambda: PositionNoise(draws, torch.device("cpu")).at(rows, rows * 0 + 3, len(law)),
    }[apart]()
    chosen = torch.stack([(law.log() + first).argmax(-1), (law.log() + other).argmax(-1)], 1)
    if apart == "rows":
        chosen = chosen[::2]  # each row in one pair
    seen = Counter(map(tuple, chosen.tolist()))
    assert_follows(seen, {(a, b): float(law[a] * law[b]) for a in range(len(law)) for b in range(len(law))})


def test_noise_reaches_unlikely_tokens() -> None:
    # Uniform numbers with 24 digits have none below 6e-8: such a token would then win far too often, or never.
    torch.manual_seed(2)
    noise = PositionNoise(1, torch.device("cpu"))
    values = noise.at(torch.zeros(200, dtype=torch.int64), torch.arange(200), 50_000).flatten().double()
    for level in (2.0, 8.0, 12.0):
        expected = -torch.expm1(-torch.exp(torch.tensor(-level, dtype=torch.float64)))
        share, spread = (values > level).double().mean(), (expected / values.numel()).sqrt()
        assert abs(float(share - expected)) < 4.9 * float(spread), f"P(noise > {level})"
