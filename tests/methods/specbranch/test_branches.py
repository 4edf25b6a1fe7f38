"""What is drafted beside the target: against the draft model alone, in every way of working, and its cost in memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel

from hf_specdec.decoding.exchange import GREEDY, ChoiceRule
from hf_specdec.decoding.policies import AutoBudget
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.methods.specbranch import SpecBranchDrafter
from hf_specdec.methods.specbranch.drafting import (
    ALL_ACCEPT,
    ALL_REJECT,
    CONFIDENCE,
    BranchDrafting,
    DraftingPlan,
    Node,
    Row,
    Signals,
    num_branches,
)
from tests.decoding.test_sampling import DEPTH, PROMPT, SAMPLING, count, enumerate_law, sampled_target
from tests.laws import BOUND_SIGMA, assert_follows, deviation_sigma
from tests.method_table import make_causal_lm, make_causal_lm_chain, make_specbranch
from tests.targets import PROMPTS, make_target

WAYS: dict[str, dict[str, Any]] = {
    "branches": {"lengths": "confidence", "hedge": False},
    "hedged branches": {"lengths": "fixed"},
    "predicted": {"lengths": "h_rad"},
    "predicted a priori": {"lengths": "h_rad", "selection": "a_priori"},
    "single sequence": {"lengths": "fixed", "k_max": 1},
    "in turn": {"lengths": "fixed", "parallel": False},
    "in turn, predicted": {"lengths": "h_rad", "parallel": False},
}
ROWS = 1000
TEXT = [5, 9, 14, 3, 22, 8]


def sample(target: PreTrainedModel, drafter: SpecBranchDrafter, temperature: float) -> torch.Tensor:
    """[ROWS, DEPTH] continuations of `PROMPT`."""
    output = target.generate(
        torch.tensor([PROMPT]),
        assistant_model=drafter,
        max_new_tokens=DEPTH,
        num_return_sequences=ROWS,
        do_sample=True,
        top_k=0,
        temperature=temperature,
    )
    return output[:, len(PROMPT) :]


def stats_of(drafter: SpecBranchDrafter) -> SpeculationStats:
    assert drafter.stats is not None
    return drafter.stats


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_drafting_gives_the_targets_tokens(way: str, batch: str, noise: float) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    drafter = make_specbranch(target, noise=noise, **WAYS[way])
    assisted = target.generate(**prompts, **settings, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**prompts, **settings).tolist()
    assert stats_of(drafter).num_path_kept > 0


@pytest.mark.parametrize("batch", PROMPTS)
def test_in_turn_it_is_plain_speculative_sampling(batch: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    chain = make_causal_lm_chain(target, noise=0.01, depth=4)
    target.generate(**prompts, **settings, assistant_model=chain)
    drafter = make_specbranch(target, noise=0.01, **WAYS["in turn"])
    target.generate(**prompts, **settings, assistant_model=drafter)
    assert chain.stats is not None
    assert stats_of(drafter).per_step_accepted == chain.stats.per_step_accepted
    assert stats_of(drafter).overlap_efficiency == 0
    assert stats_of(drafter).continuous_acceptance_length == chain.stats.mean_acceptance_length


def test_a_draft_model_that_is_always_right_never_waits() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, noise=0.0, **WAYS["single sequence"])
    target.generate(**prompts, max_new_tokens=26, do_sample=False, assistant_model=drafter)
    # The first chain is verified from its root on; behind each that follows lies one token drafted ahead.
    assert stats_of(drafter).per_step_accepted == [[0, *[3] * 6]]
    assert stats_of(drafter).rollback_rate < 0.3
    assert stats_of(drafter).num_foreseen == 6
    assert stats_of(drafter).continuous_acceptance_length == 25  # no rollback: all tokens but the prefill's


def drafting(model: PreTrainedModel, **changes: Any) -> BranchDrafting:
    plan: dict[str, Any] = {
        "most_tokens": 4,
        "most_branches": 3,
        "most_hedges": 0,
        "min_confidence": 0.0,
        "draw_candidates": False,
        "choice": GREEDY,
        "vocab_size": model.config.vocab_size,
    }
    made = BranchDrafting(model, DraftingPlan(**(plan | changes)))
    made.start([TEXT], None, 0)
    return made


def greedy(model: PreTrainedModel, text: list[int], tokens: int) -> list[int]:
    with torch.no_grad():
        return model.generate(torch.tensor([text]), max_new_tokens=tokens, do_sample=False)[0, len(text) :].tolist()


def branch_tokens(made: BranchDrafting, branch: int) -> list[int]:
    row, tokens = made.rows[0], []
    while branch >= 0:
        tokens.append(row.nodes[branch].token)
        branch = row.nodes[branch].next
    return tokens


def test_branches_are_what_the_draft_model_says_after_each_candidate() -> None:
    model = make_causal_lm(make_target("llama", "sdpa")).model
    made = drafting(model)
    signals = [Signals(kept_branch=ALL_ACCEPT, fresh=ALL_ACCEPT)]
    (chain,) = made.draft([[]], [True], signals).tokens
    assert chain == greedy(model, TEXT, 4)
    (candidates,) = made.draft_ahead(signals).candidates
    with torch.no_grad():
        probs = model(torch.tensor([TEXT + chain])).logits[0, -1].softmax(-1)
    assert candidates == probs.topk(num_branches(3, float(probs.max()))).indices.tolist()
    for branch, token in zip(made.rows[0].branches, candidates, strict=True):
        expected = [token, *greedy(model, [*TEXT, *chain, token], 3)]
        assert branch_tokens(made, branch) == expected


@pytest.mark.parametrize(("signal", "length"), [(ALL_REJECT, 0), (ALL_ACCEPT, 3)])
def test_a_chosen_branch_is_kept_with_its_entries_and_the_others_are_forgotten(signal: int, length: int) -> None:
    model = make_causal_lm(make_target("llama", "sdpa")).model
    made, whole = drafting(model), [Signals(kept_branch=signal, fresh=ALL_ACCEPT)]
    (chain,) = made.draft([[]], [True], whole).tokens
    (candidates,) = made.draft_ahead(whole).candidates
    token = candidates[-1]
    branch = branch_tokens(made, made.rows[0].branches[-1])
    (kept,) = made.draft([[*chain, token]], [True], whole).tokens
    assert kept == branch[1 : 1 + length]
    text = [*TEXT, *chain, token]
    made._update_cache()
    assert made.drafter.cache.row_lengths == [len(text) - 1]
    assert made.num_entries == len(branch) - 1  # all of it but its last token, which was not run
    (after,) = made.draft_ahead(whole).candidates
    with torch.no_grad():
        probs = model(torch.tensor([text + kept])).logits[0, -1].softmax(-1)
    assert after == probs.topk(num_branches(3, float(probs.max()))).indices.tolist()
    for place, one in zip(made.rows[0].branches, after, strict=True):
        tokens = branch_tokens(made, place)
        assert tokens == [one, *greedy(model, [*text, *kept, one], len(tokens) - 1)] if len(tokens) > 1 else [one]


def test_a_rejected_chain_leaves_the_cache_as_if_it_had_not_been_drafted() -> None:
    model = make_causal_lm(make_target("llama", "sdpa")).model
    made, signals = drafting(model), [Signals(ALL_ACCEPT, ALL_ACCEPT)]
    (chain,) = made.draft([[]], [True], signals).tokens
    made.draft_ahead(signals)
    wrong = (chain[1] + 1) % 60
    (again,) = made.draft([[chain[0], wrong]], [True], signals).tokens
    assert again == greedy(model, [*TEXT, chain[0], wrong], 4)


def always_says(drafter: SpecBranchDrafter, kind: int) -> None:
    """Makes the drafter's H-RAD predict one class, whatever it reads."""
    assert drafter.h_rad is not None
    last: Any = drafter.h_rad.layers[-1]
    torch.nn.init.zeros_(last.weight)
    last.bias.data = torch.nn.functional.one_hot(torch.tensor(kind), len(last.bias)).to(last.bias)


@pytest.mark.parametrize(("hedge", "accepted"), [(False, [[0] * 13]), (True, [[0, 3, 3, 3]])])
def test_only_without_hedges_is_a_chosen_branch_verified_in_part(hedge: bool, accepted: list[list[int]]) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, noise=0.0, hedge=hedge)
    always_says(drafter, ALL_REJECT)
    target.generate(**prompts, max_new_tokens=14, do_sample=False, assistant_model=drafter)
    assert stats_of(drafter).per_step_accepted == accepted


@pytest.mark.parametrize("draft_model", ["always right", "often right", "always wrong"])
@pytest.mark.parametrize("batch", PROMPTS)
def test_with_hedges_h_rad_is_asked_only_where_no_branch_was_chosen(batch: str, draft_model: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    drafter = make_specbranch(target, noise=0.01 if draft_model == "often right" else 0.0)
    assert drafter.draft_model is not None
    assert drafter.h_rad is not None
    if draft_model == "always wrong":
        drafter.draft_model.get_output_embeddings().weight.data.neg_()
    always_says(drafter, ALL_ACCEPT)
    asked: list[int] = []
    drafter.h_rad.register_forward_pre_hook(lambda _, inputs: asked.append(len(inputs[0])))
    assisted = target.generate(**prompts, **settings, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**prompts, **settings).tolist()
    rows, rounds = len(assisted), max(map(len, stats_of(drafter).per_step_accepted))
    if draft_model == "often right":
        assert rows < sum(asked) < rows * rounds
    else:
        assert asked == [rows] * (1 if draft_model == "always right" else rounds)


@pytest.mark.parametrize(("kind", "asked"), [(ALL_ACCEPT, 3), (ALL_REJECT, 0)])
def test_with_hedges_h_rad_says_how_much_is_drafted_after_a_miss(kind: int, asked: int) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, noise=0.0, depth=3)
    always_says(drafter, kind)
    target.generate(**prompts, max_new_tokens=14, do_sample=False, assistant_model=drafter)
    first, *others = stats_of(drafter).per_step_accepted[0]
    assert first == asked
    assert 0 not in others  # chosen branches, of which all is verified


def test_a_branch_is_hit_by_what_it_was_prepared_for() -> None:
    row = Row([7], nodes=[Node(7, -1), Node(1, 0), Node(2, 1), Node(3, 2), Node(4, 2), Node(1, 1), Node(9, 0)])
    row.chain, row.branches, row.hedges = [1, 2], [3, 4], [5, 6]
    assert row.prepared() == {(2, 3): 3, (2, 4): 4, (1, 1): 5, (0, 9): 6}
    chosen = [row.chosen_branch(emitted) for emitted in ([1, 2, 4], [1, 1], [9], [1, 9], [1, 2, 5])]
    assert chosen == [4, 5, 6, None, None]


@pytest.mark.parametrize("way", ["hedged branches", "single sequence", "in turn", "in turn, predicted"])
def test_a_forward_drafts_one_token_in_sequence(way: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_specbranch(target, noise=0.01, **WAYS[way])
    assert drafter.draft_model is not None
    forwards = counted_forwards(drafter.draft_model)
    target.generate(**prompts, max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert stats_of(drafter).num_path_drafts == len(forwards) - 1  # the prefill


def test_forwards_for_other_branches_only_are_no_drafts_in_sequence() -> None:
    model = make_causal_lm(make_target("llama", "sdpa")).model
    made = drafting(model, most_branches=12)
    forwards = counted_forwards(model)
    whole, nothing = [Signals(ALL_ACCEPT, ALL_ACCEPT)], [Signals(ALL_REJECT, ALL_ACCEPT)]
    (chain,) = made.draft([[]], [True], whole).tokens
    made.draft_ahead(whole)
    first = made.rows[0].branches[0]
    held = branch_tokens(made, first)
    # The target chooses the first branch, and H-RAD trusts none of what follows in it.
    assert made.draft([[*chain, held[0]]], [True], nothing).tokens == [[]]
    before, run = made.stats.num_path_drafts, len(forwards)
    assert before == run
    made.draft_ahead(nothing)
    assert len(made.rows[0].branches) > 1
    assert len(forwards) - run == 4  # the other branches begin anew
    stats = made.final_stats([[held[1]]])
    assert stats.num_path_drafts - before == len(branch_tokens(made, made.rows[0].branches[0])) + 1 - len(held)


def counted_forwards(model: PreTrainedModel) -> list[None]:
    """A list that grows with every forward of a model."""
    forwards: list[None] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(None))
    return forwards


def test_hedges_are_the_likeliest_other_tokens_along_the_chain() -> None:
    model = make_causal_lm(make_target("llama", "sdpa")).model
    made, whole = drafting(model, most_hedges=4), [Signals(ALL_ACCEPT, ALL_ACCEPT)]
    (chain,) = made.draft([[]], [True], whole).tokens
    made.draft_ahead(whole)
    with torch.no_grad():
        draft_probs = model(torch.tensor([TEXT + chain])).logits[0, len(TEXT) - 1 : -1].softmax(-1)
    likely, reached = [], 1.0
    for place, prediction in enumerate(draft_probs):
        top = prediction.topk(3)
        for token, prob in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            if token != chain[place]:
                likely.append((reached * prob, place, token))
        reached *= float(prediction[chain[place]])
    row = made.rows[0]
    path = [row.root, *row.chain]
    found = {(path.index(row.nodes[hedge].parent), row.nodes[hedge].token) for hedge in row.hedges}
    assert found == {(place, token) for _, place, token in sorted(likely)[-4:]}


def test_a_rejection_that_was_hedged_against_costs_no_forward() -> None:
    model = make_causal_lm(make_target("llama", "sdpa")).model
    made, whole = drafting(model, most_hedges=4), [Signals(ALL_ACCEPT, ALL_ACCEPT)]
    (chain,) = made.draft([[]], [True], whole).tokens
    made.draft_ahead(whole)
    row = made.rows[0]
    hedge = row.hedges[0]
    accepted = [row.root, *row.chain].index(row.nodes[hedge].parent)
    emitted = [*chain[:accepted], row.nodes[hedge].token]
    drafted = branch_tokens(made, hedge)
    forwards = counted_forwards(model)
    (kept,) = made.draft([emitted], [True], whole).tokens
    assert not forwards
    assert [emitted[-1], *kept] == drafted
    assert kept == greedy(model, TEXT + emitted, len(kept))
    assert len(kept) == 4
    (after,) = made.draft_ahead(whole).candidates
    with torch.no_grad():
        probs = model(torch.tensor([TEXT + emitted + kept])).logits[0, -1].softmax(-1)
    assert after == probs.topk(num_branches(3, float(probs.max()))).indices.tolist()


def test_drafting_stops_where_the_draft_model_is_not_sure() -> None:
    model = make_causal_lm(make_target("llama", "sdpa")).model
    made, signals = drafting(model, min_confidence=0.2), [Signals(CONFIDENCE, CONFIDENCE)]
    (chain,) = made.draft([[]], [True], signals).tokens
    for length in range(len(chain) + 1):
        with torch.no_grad():
            sure = float(model(torch.tensor([TEXT + chain[:length]])).logits[0, -1].softmax(-1).max())
        assert (sure >= 0.2) == (length < len(chain)) or len(chain) == 4


@pytest.mark.parametrize(("hedge", "more"), [(False, 5), (True, 5 + 5)])
def test_more_branches_cost_entries_and_no_copies_of_the_text(hedge: bool, more: int) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    peaks = []
    for k_max in (1, 2, 4, 6):
        drafter = make_specbranch(target, lengths="confidence", k_max=k_max, hedge=hedge)
        target.generate(**prompts, max_new_tokens=20, do_sample=False, assistant_model=drafter)
        peaks.append(stats_of(drafter).peak_draft_entries)
    assert peaks == sorted(peaks)
    assert peaks[-1] - peaks[0] <= more * 4  # so many branches more, of at most four entries


def test_each_drawn_candidate_carries_the_law_that_those_before_it_have_left() -> None:
    model = make_causal_lm(make_target("llama", "sdpa")).model
    choice = ChoiceRule(do_sample=True, warpers=LogitsProcessorList())
    made, signals = (
        drafting(model, most_branches=12, draw_candidates=True, choice=choice),
        [Signals(ALL_ACCEPT, ALL_ACCEPT)],
    )
    made.draft([[]], [True], signals)
    ahead = made.draft_ahead(signals)
    assert ahead.draft_probs is not None
    tokens, draft_probs = ahead.candidates[0], ahead.draft_probs[0]
    assert len(tokens) > 2
    left = draft_probs[0].clone()
    for token, prediction in zip(tokens, draft_probs, strict=True):
        torch.testing.assert_close(prediction, left / left.sum())
        left[token] = 0


@pytest.mark.parametrize("candidates", ["top_k", "drawn"])
@pytest.mark.parametrize("sampling", ["temperature", "plain"])
def test_sampled_tokens_follow_the_target_branch_points_included(
    sampling: str, candidates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = sampled_target()
    hit, hedged = Row.chosen_branch, []

    def noted(self: Row, tokens: list[int]) -> int | None:
        found = hit(self, tokens)
        hedged.extend(node for node in self.hedges if node == found)
        return found

    monkeypatch.setattr(Row, "chosen_branch", noted)
    drafter = make_specbranch(target, noise=0.1, lengths="confidence", min_confidence=0.3, candidates=candidates)
    temperature = SAMPLING[sampling].get("temperature", 1.0)
    assert_follows(count(sample(target, drafter, temperature)), enumerate_law(target, PROMPT, sampling))
    stats = stats_of(drafter)
    # Chains, branch points and hedges all took part.
    assert len(hedged) > ROWS / 20
    assert stats.num_accepted_draft_tokens > ROWS / 20
    assert stats.num_path_kept > stats.num_accepted_draft_tokens + ROWS / 20


def test_candidates_that_claim_to_be_drawn_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # The negative control: the likeliest tokens of the branch point, handed in as if they had been drawn.
    branch = BranchDrafting._add_candidates

    def claim(self: BranchDrafting, row: Any) -> list[torch.Tensor]:
        prediction = row.nodes[row.leaf].prediction
        if prediction is not None and prediction.draft_probs is not None:
            prediction.chosen = int(prediction.draft_probs.argmax())
        return branch(self, row)

    monkeypatch.setattr(BranchDrafting, "_add_candidates", claim)
    target = sampled_target()
    drafter = make_specbranch(target, noise=0.3, lengths="confidence", min_confidence=0.9, candidates="drawn", k_max=1)
    assert (
        deviation_sigma(count(sample(target, drafter, 1.0)), enumerate_law(target, PROMPT, "plain")) > 2 * BOUND_SIGMA
    )


def test_numbers_of_branches_are_those_of_the_paper() -> None:
    assert [num_branches(k, 0.3) for k in (1, 2, 4, 6, 12)] == [1, 1, 2, 4, 8]


def test_measuring_the_draft_model_leaves_nothing_behind() -> None:
    model = make_causal_lm(make_target("llama", "sdpa")).model
    measured, not_measured = drafting(model, most_hedges=2), drafting(model, most_hedges=2)
    assert measured.seconds_per_forward() > 0
    signals = [Signals(ALL_ACCEPT, ALL_ACCEPT)]
    for made in (measured, not_measured):
        made.draft([[]], [True], signals)
        made.draft_ahead(signals)
    assert measured.rows == not_measured.rows
    assert measured.stats == not_measured.stats
    assert measured.random.get_state().equal(not_measured.random.get_state())


def test_auto_tries_both_ways_and_keeps_the_faster_one() -> None:
    target = make_target("llama", "sdpa")
    drafter = make_specbranch(target, noise=0.01, parallel="auto")
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    alone = target.generate(**PROMPTS["batch of one"](), **settings)

    def runs_parallel() -> bool:
        output = target.generate(**PROMPTS["batch of one"](), **settings, assistant_model=drafter)
        assert output.tolist() == alone.tolist()
        return stats_of(drafter).ahead_wall_s > 0

    assert [runs_parallel(), runs_parallel()] == [True, False]
    drafter.keep_pace(target, False, 1e3)
    assert runs_parallel()
    drafter.keep_pace(target, False, 0.0)
    assert not runs_parallel()


@pytest.mark.by_the_clock
@pytest.mark.parametrize("way", WAYS)
def test_pauses_change_no_token_and_no_later_draft(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that skip drafting, the first ones too, leave the draft model with the text as it is."""
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    alone = target.generate(**prompts, **settings)
    drafter = make_specbranch(target, noise=0.0, **{**WAYS[way], "pauses": True})
    rounds = itertools.count()
    monkeypatch.setattr(AutoBudget, "note", lambda self, *arguments: None)
    monkeypatch.setattr(AutoBudget, "drafting", property(lambda self: next(rounds) % 5 > 1))
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()
    assert stats_of(drafter).num_undrafted_steps > 0
    # The draft model is the target: whatever it drafts is accepted.
    assert stats_of(drafter).num_accepted_draft_tokens == stats_of(drafter).num_draft_tokens > 0
