"""transformers' own settings for assistants, passed with a drafter: used, or reported by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_specdec.decoding.trace import Trace
from tests.chains import assisted_loop
from tests.decoding.test_finished_rows import drafter_of, prompts
from tests.decoding.test_sampling import PROMPT, count, draw, enumerate_law, sampled_target
from tests.laws import assert_follows
from tests.method_table import METHODS
from tests.targets import make_target

GREEDY = {"max_new_tokens": 16, "do_sample": False}
# Drafters that state no probabilities of their tokens when they do not sample.
UNSURE = ("specbound", "specbranch", "lookahead")


def most_drafted(drafter: Any) -> int:
    return max(len(each.token_ids) - 1 for each in drafter.trace.rounds)


@pytest.mark.parametrize("method", METHODS)
def test_num_assistant_tokens_is_the_most_tokens_of_a_draft(method: str) -> None:
    target = make_target("llama", "sdpa")
    pair = {name: values[:2] for name, values in prompts().items()}
    plain = target.generate(**pair, **GREEDY)
    drafter = drafter_of(method, target)
    for most in (1, 2):
        drafter.trace = Trace()
        found = target.generate(**pair, **GREEDY, assistant_model=drafter, num_assistant_tokens=most)
        assert found.tolist() == plain.tolist()
        assert most_drafted(drafter) == most


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_ends_after_a_token_below_the_confidence_threshold(method: str) -> None:
    target = make_target("llama", "sdpa")
    one = {name: values[:1] for name, values in prompts().items()}
    plain = target.generate(**one, **GREEDY)
    drafter = drafter_of(method, target)
    drafter.trace = Trace()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = target.generate(**one, **GREEDY, assistant_model=drafter, assistant_confidence_threshold=0.9)
    assert found.tolist() == plain.tolist()
    said = [str(each.message) for each in caught]
    if method in UNSURE:
        assert len(said) == 1
        assert "assistant_confidence_threshold=0.9 was passed, but this drafter states no probability" in said[0]
        return
    assert not said
    parents = [(each, parent) for each in drafter.trace.rounds for parent in each.parents[1:] if parent > 0]
    assert all(each.probs[parent] >= 0.9 for each, parent in parents)
    # The first token is drafted in any case.
    assert most_drafted(drafter) >= 1


def test_a_threshold_of_zero_is_none() -> None:
    target = make_target("llama", "sdpa")
    drafters = drafter_of("dflash", target), drafter_of("dflash", target)
    target.generate(**prompts(), **GREEDY, assistant_model=drafters[0])
    target.generate(**prompts(), **GREEDY, assistant_model=drafters[1], assistant_confidence_threshold=0.0)
    assert drafters[0].stats.num_draft_tokens == drafters[1].stats.num_draft_tokens


@pytest.mark.parametrize("method", ["causal_lm_chain", "causal_lm_tree"])
def test_a_draft_model_runs_no_further_than_the_settings_allow(method: str) -> None:
    target = make_target("llama", "sdpa")
    drafter = drafter_of(method, target, depth=6)
    forwards = []
    drafter.model.register_forward_hook(lambda *each: forwards.append(1))
    one = {name: values[:1] for name, values in prompts().items()}

    def forwards_of(**settings: Any) -> float:
        forwards.clear()
        target.generate(**one, **GREEDY, assistant_model=drafter, **settings)
        return len(forwards) / drafter.stats.num_target_forwards

    usual = forwards_of()
    assert forwards_of(num_assistant_tokens=1) < usual
    assert forwards_of(assistant_confidence_threshold=0.99) < usual


@pytest.mark.parametrize("method", ["dflash", "causal_lm_chain", "ngram"])
def test_settings_restrict_chains_in_the_assisted_loop_too(method: str) -> None:
    target = make_target("llama", "sdpa")
    one = {name: values[:1] for name, values in prompts().items()}
    plain = target.generate(**one, **GREEDY)
    drafter = drafter_of(method, target)
    with assisted_loop(), pytest.warns(UserWarning, match="drafts chains"):
        found = target.generate(**one, **GREEDY, assistant_model=drafter, num_assistant_tokens=1)
    assert found.tolist() == plain.tolist()
    assert 0 < drafter.stats.num_draft_tokens <= len(drafter.stats.per_step_accepted[0])


@pytest.mark.parametrize("tree_budget", [9, "auto"])
def test_settings_of_the_generation_config_count_too(tree_budget: Any) -> None:
    target = make_target("llama", "sdpa")
    drafter = drafter_of("ddtree", target, tree_budget=tree_budget)
    drafter.trace = Trace()
    config = GenerationConfig(**GREEDY, num_assistant_tokens=3, assistant_confidence_threshold=0.01)
    plain = target.generate(**prompts(), **GREEDY)
    assert target.generate(**prompts(), generation_config=config, assistant_model=drafter).tolist() == plain.tolist()
    assert most_drafted(drafter) == 3


@pytest.mark.parametrize(
    "setting",
    [
        {"num_assistant_tokens_schedule": "heuristic"},
        {"prompt_lookup_num_tokens": 5},
        {"max_matching_ngram_size": 3},
        {"assistant_early_exit": 2},
        {"assistant_lookbehind": 4},
        {"target_lookbehind": 4},
        {"speculation_type": "dflash"},
    ],
    ids=str,
)
def test_a_setting_without_a_meaning_is_reported(setting: dict[str, Any]) -> None:
    target = make_target("llama", "sdpa")
    plain = target.generate(**prompts(), **GREEDY)
    drafter = drafter_of("dflash", target)
    ((name, value),) = setting.items()
    with pytest.warns(UserWarning, match=f"{name}={value!r} has no effect with assistant_model=DFlashDrafter"):
        found = target.generate(**prompts(), **GREEDY, assistant_model=drafter, **setting)
    assert found.tolist() == plain.tolist()


def test_more_tokens_than_the_drafters_own_limit_are_reported() -> None:
    target = make_target("llama", "sdpa")
    with pytest.warns(UserWarning, match=r"does not raise the drafter's own limit, tree_budget=9"):
        target.generate(**prompts(), **GREEDY, assistant_model=drafter_of("ddtree", target), num_assistant_tokens=30)


@pytest.mark.parametrize("setting", [{"num_assistant_tokens": 0}, {"assistant_confidence_threshold": 1.5}], ids=str)
def test_a_setting_out_of_range_raises(setting: dict[str, Any]) -> None:
    target = make_target("llama", "sdpa")
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        target.generate(**prompts(), **GREEDY, assistant_model=drafter_of("dflash", target), **setting)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("causal_lm_chain", {}),
        ("causal_lm_tree", {}),
        ("dspark_chain", {}),
        ("specbound", {}),
        # Drawn candidates belong to the end of a chain, which the call may cut off.
        ("specbranch", {"candidates": "drawn"}),
    ],
)
def test_sampled_tokens_follow_the_target_under_both_settings(method: str, options: dict[str, Any]) -> None:
    target = sampled_target()
    drafter = METHODS[method](target, **options)
    settings = {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.25}
    drawn = draw(target, torch.tensor([PROMPT]), "plain", drafter, 2000, **settings)
    assert_follows(count(drawn), enumerate_law(target, PROMPT, "plain"))
    assert drafter.stats.num_accepted_draft_tokens > 100
