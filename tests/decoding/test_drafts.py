"""Drafts of every quality: right for exactly j tokens, never right, or no tokens at all. Only speed may differ."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.methods.dflash.network import DFlashDrafter
from tests.method_table import METHODS, STEADY, make_ddtree, make_dflash
from tests.scripted import StubDrafter, fixed_tree, right_for
from tests.targets import PROMPTS, VOCAB, fresh_target, make_target

NEW = 20
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("qwen3-mixed", "sdpa")


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("siblings", [0, 2])
@pytest.mark.parametrize("num_right", range(8))
def test_drafts_right_for_exactly_j_tokens_are_accepted_for_exactly_j(
    target: PreTrainedModel, num_right: int, siblings: int, batch: str
) -> None:
    prompts = PROMPTS[batch]()
    script = target.generate(**prompts, max_new_tokens=NEW + 10, do_sample=False)
    drafter = right_for(num_right, script, siblings=siblings)
    output = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert output.tolist() == script[:, : output.shape[1]].tolist()
    stats = drafter.stats
    rows = len(script)
    # The prefill gives the first token; every round gives num_right + 1 more.
    rounds = -(-(NEW - 1) // (num_right + 1))
    assert stats.per_step_accepted == [[num_right] * rounds] * rows
    assert stats.mean_acceptance_length == num_right + 1
    assert stats.acceptance_histogram == [0] * num_right + [rounds * rows]
    assert stats.num_spec_steps == rounds * rows
    assert stats.num_target_forwards == rounds
    assert stats.num_accepted_draft_tokens == num_right * rounds * rows
    assert stats.num_draft_tokens == (num_right + 1) * (siblings + 1) * rounds * rows
    assert stats.draft_acceptance_rate == pytest.approx(num_right / ((num_right + 1) * (siblings + 1)))
    assert stats.num_plain_steps == 0
    assert 0 < stats.draft_time_s + stats.stage_time_s["verify"] < stats.total_time_s


def test_a_chain_that_is_right_to_its_end_is_kept_whole(target: PreTrainedModel) -> None:
    prompts = PROMPTS["batch of one"]()
    script = target.generate(**prompts, max_new_tokens=NEW + 10, do_sample=False)

    def draft(context: DraftContext) -> DraftTree:
        start = context.lengths[0]
        return DraftTree.chain(torch.cat([context.root_ids[:, None], script[:, start : start + 4]], dim=1))

    drafter = StubDrafter(draft)
    output = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert output.tolist() == script[:, : output.shape[1]].tolist()
    assert drafter.stats.per_step_accepted == [[4, 4, 4, 4]]


def test_rows_of_a_batch_accept_different_numbers(target: PreTrainedModel) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    script = target.generate(**prompts, max_new_tokens=NEW + 10, do_sample=False)
    wrong = script.clone()
    wrong[0, 12:] = (wrong[0, 12:] + 1) % VOCAB  # the first row's drafts stop being right at its fourth new token
    drafter = right_for(3, wrong)
    output = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert output.tolist() == script[:, : output.shape[1]].tolist()
    first, second, third = drafter.stats.per_step_accepted
    assert sum(first) < sum(second) == sum(third)
    assert len(first) > len(second)


# name: what is drafted below every root
GARBAGE: dict[str, Callable[[], StubDrafter]] = {
    "one token over and over": lambda: fixed_tree([5] * 6, [0, 1, 2, 3, 4, 5]),
    "no token at all": lambda: fixed_tree([], []),
    "ids below and above the vocabulary": lambda: fixed_tree([-1, VOCAB, 7, 10**12, -(2**40)], [0, 0, 1, 2, 4]),
    "siblings that repeat": lambda: fixed_tree([7, 7, 9, 9, 7, 3], [0, 0, 0, 1, 2, 4]),
    "the whole vocabulary": lambda: fixed_tree(list(range(VOCAB)), [0] * VOCAB),
}


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_changes_no_token(target: PreTrainedModel, garbage: str, batch: str) -> None:
    prompts = PROMPTS[batch]()
    alone = target.generate(**prompts, **GREEDY)
    for settings in ({}, {"repetition_penalty": 1.2}):
        drafter = GARBAGE[garbage]()
        assisted = target.generate(**prompts, **GREEDY, **settings, assistant_model=drafter)
        assert (
            assisted.tolist() == (alone if not settings else target.generate(**prompts, **GREEDY, **settings)).tolist()
        )


def test_of_siblings_that_repeat_one_is_accepted_with_its_own_children(target: PreTrainedModel) -> None:
    prompts = PROMPTS["batch of one"]()
    script = target.generate(**prompts, max_new_tokens=NEW + 10, do_sample=False)

    def draft(context: DraftContext) -> DraftTree:
        first, second = script[0, context.lengths[0] : context.lengths[0] + 2].tolist()
        tokens = torch.tensor([[int(context.root_ids[0]), first, first, second, second]])
        return DraftTree.from_parents(tokens, torch.tensor([[-1, 0, 0, 2, 1]]), 2)

    drafter = StubDrafter(draft)
    output = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert output.tolist() == script[:, : output.shape[1]].tolist()
    assert set(drafter.stats.per_step_accepted[0]) == {2}


def poisoned(target: PreTrainedModel, value: float, method: str, *, rounds: tuple[int, ...]) -> DFlashDrafter:
    """A DFlash drafter whose logits hold `value` in the given rounds, in the first row only."""
    drafter = make_dflash(target, method=method)
    forward, calls = drafter.forward, iter(range(10**6))

    def spoiled(*args: Tensor, **kwargs: object) -> Tensor:
        logits = forward(*args, **kwargs)
        if next(calls) in rounds:
            logits[0, -1, 3] = value
        return logits

    drafter.forward = spoiled
    return drafter


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_rounds_with_nan_or_infinite_logits_fall_back_and_are_counted_and_warned_about_once(
    target: PreTrainedModel, method: str, batch: str, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = PROMPTS[batch]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = poisoned(target, value, method, rounds=(0, 1, 4))
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    assert drafter.stats.num_plain_steps == 3
    assert [drafter.stats.per_step_accepted[0][index] for index in (0, 1, 4)] == [0, 0, 0]
    warnings = [record.getMessage() for record in caplog.records if "NaN or infinite" in record.getMessage()]
    assert len(warnings) == 1
    assert method in warnings[0]


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_a_drafter_that_is_all_nan_still_gives_the_right_tokens(target: PreTrainedModel, method: str) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    drafter = make_dflash(target, method=method)
    drafter.norm.weight.data.fill_(float("nan"))
    with pytest.warns(UserWarning, match=f"drafter \\({method}\\) gave NaN .* Check the drafter's weights") as caught:
        assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert len(caught) == 1, "said once per call"
    assert assisted.tolist() == target.generate(**prompts, **GREEDY).tolist()
    assert drafter.stats.num_plain_steps == drafter.stats.num_spec_steps
    assert drafter.stats.num_draft_tokens == 0


def test_nan_in_a_round_does_not_change_later_rounds(target: PreTrainedModel) -> None:
    # The drafter keeps its own cache; only the logits of its first round are spoiled here.
    prompts = PROMPTS["batch of one"]()
    drafter = poisoned(target, float("nan"), "ddtree", rounds=(0,))
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert drafter.stats.num_plain_steps == 1


@pytest.mark.parametrize("method", STEADY)
def test_state_of_one_call_does_not_reach_the_next(target: PreTrainedModel, method: str) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    runs = []
    for _ in range(2):
        drafter.forget()
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
        runs.append((drafter.stats.per_step_accepted, drafter.stats.num_draft_tokens))
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    assert runs[0] == runs[1]


def in_float64(drafter: Drafter) -> Drafter:
    """For drafts that must not change with the shape of a batch; a drafter without weights is as it is."""
    return drafter.to(torch.float64) if isinstance(drafter, torch.nn.Module) else drafter


@pytest.mark.parametrize("method", STEADY)
def test_a_row_drafts_the_same_alone_and_in_a_ragged_batch(target: PreTrainedModel, method: str) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    drafter = in_float64(METHODS[method](target))
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    together = drafter.stats.per_step_accepted
    for row, mask in enumerate(prompts["attention_mask"]):
        ids = prompts["input_ids"][row][mask.bool()][None]
        drafter.forget()
        target.generate(ids, **GREEDY, assistant_model=drafter)
        alone = drafter.stats.per_step_accepted[0]
        # Without an end of text a row goes on while another one is a few tokens ahead.
        assert alone == together[row][: len(alone)]


def test_generator_is_closed_after_an_error(target: PreTrainedModel) -> None:
    closed = []

    def draft(context: DraftContext) -> DraftTree:
        raise KeyboardInterrupt

    drafter = StubDrafter(draft)
    make = drafter.candidate_generator

    def watched(model: object) -> object:
        generator = make(model)
        generator.close = lambda: closed.append(True)
        return generator

    drafter.candidate_generator = watched
    with pytest.raises(KeyboardInterrupt):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    assert closed == [True]
    hooks = [module for module in target.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert not hooks


@pytest.mark.parametrize("method", METHODS)
def test_hooks_are_removed_from_the_target(target: PreTrainedModel, method: str) -> None:
    target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=METHODS[method](target))
    assert not [module for module in target.modules() if module._forward_hooks or module._forward_pre_hooks]


@pytest.mark.parametrize("budget", [1, 2, 30])
def test_any_budget_gives_the_same_tokens(target: PreTrainedModel, budget: int) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    drafter = make_ddtree(target, tree_budget=budget)
    assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**prompts, **GREEDY).tolist()
    assert drafter.stats.num_draft_tokens == budget * drafter.stats.num_spec_steps


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": False, "remove_invalid_values": True},  # which would make numbers of it
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "top_k": 1},
        {"do_sample": True, "top_k": 1, "repetition_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("batch", PROMPTS)
def test_token_with_nan_logits_does_not_change_other_tokens(
    batch: str, known: bool, settings: dict[str, Any], attention: str
) -> None:
    """Plain decoding never runs token 7, since it is suppressed; drafts of it may be run, but must not matter."""
    # transformers' own eager attention makes NaN of left padding in float64.
    target = fresh_target("llama", attention, torch.float32 if attention == "eager" else torch.float64)
    prompts = PROMPTS[batch]()
    prompts["input_ids"][prompts["input_ids"] == 7] = 8
    target.get_input_embeddings().weight.data[7] = torch.inf
    settings = {**prompts, **settings, "max_new_tokens": 8, "suppress_tokens": [7]}
    alone = target.generate(**settings)
    drafter = fixed_tree([20, 7], [0, 1])
    if known:  # to the host, as where trees grow in its memory
        drafter = StubDrafter(
            lambda context: DraftTree.from_lists(
                [[root, 20, 7] for root in context.root_ids.tolist()], [[-1, 0, 1]] * len(context.lengths)
            )
        )
    with pytest.warns(UserWarning, match="a drafted token for which the target.s logits are NaN"):
        assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats is not None
    assert drafter.stats.num_plain_steps == drafter.stats.num_spec_steps
    assert drafter.stats.num_target_forwards == 2 * len(drafter.stats.per_step_accepted[0])


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_methods_draft_with_a_token_with_nan_logits(method: str, sampling: dict[str, Any]) -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    settings = {**prompts, **sampling, "max_new_tokens": 30}
    alone = target.generate(**settings)
    target.generate(**settings, assistant_model=drafter)  # pairs are tried once, on whatever tokens
    unseen = sorted(set(range(64)) - set(alone.flatten().tolist()))
    target.get_input_embeddings().weight.data[unseen] = torch.nan  # of all but what plain decoding runs
    assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist()
