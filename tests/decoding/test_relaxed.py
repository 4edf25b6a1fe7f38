"""Acceptance that is not lossless: it follows its paper, says that it is not lossless, and is never a default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec import load_drafter, verify_lossless
from hf_specdec.decoding.relaxed import Judge, Relaxed, Typical
from hf_specdec.decoding.tree import DraftTree
from tests.decoding.test_sampling import DRAWS, PROMPT, TREES, count, draw, enumerate_law, sampled_target
from tests.laws import BOUND_SIGMA, deviation_sigma
from tests.method_table import METHODS, make_eagle3, make_medusa, make_ngram, make_specbound
from tests.scripted import fixed_tree, right_for
from tests.targets import make_target, one_prompt

NOT_OWN = pytest.mark.filterwarnings("ignore:acceptance=.* this output is NOT the target's own")


def judge_of(target: PreTrainedModel, bias: float = 0.0, **settings: Any) -> Judge:
    generator = torch.Generator().manual_seed(0)
    return Judge(torch.randn(target.config.hidden_size, generator=generator), bias, **settings)


def rules(target: PreTrainedModel) -> dict[str, Relaxed]:
    return {"typical": Typical(), "judge": judge_of(target)}


@NOT_OWN
@pytest.mark.parametrize("rule", [None, "typical", "judge"])
def test_the_chi_square_test_fails_for_rules_that_are_not_lossless_and_passes_for_the_lossless_one(
    rule: str | None,
) -> None:
    target, drafter = sampled_target(), fixed_tree(*TREES["chain"])
    drafter.acceptance = None if rule is None else rules(target)[rule]
    drawn = draw(target, torch.tensor([PROMPT]), "plain", drafter, DRAWS)
    deviation = deviation_sigma(count(drawn), enumerate_law(target, PROMPT, "plain"))
    assert (deviation < BOUND_SIGMA) == (rule is None), f"{deviation} sigma"
    assert drafter.stats.lossless == (rule is None)
    assert ("NOT LOSSLESS" in str(drafter.stats)) == (rule is not None)


def by_hand(target: PreTrainedModel, prompt: torch.Tensor, drafts: list[int], rule: Typical, new: int) -> list[int]:
    """Greedy decoding with a fixed chain after every root, one plain forward per token."""
    text = prompt[0].tolist()

    def probs() -> torch.Tensor:
        return target(torch.tensor([text]), use_cache=False).logits[0, -1].softmax(-1)

    text.append(int(probs().argmax()))
    while len(text) < prompt.shape[1] + new:
        for token in drafts:
            after = probs()
            threshold = min(rule.epsilon, rule.delta * float((after * after.log()).sum().exp()))
            if float(after[token]) <= threshold and token != int(after.argmax()):
                break
            text.append(token)
        text.append(int(probs().argmax()))
    return text[: prompt.shape[1] + new]


@NOT_OWN
@torch.no_grad()
@pytest.mark.parametrize("rule", [Typical(), Typical(epsilon=1.0, delta=1.0), Typical(epsilon=1e-9, delta=1e-9)])
def test_typical_acceptance_follows_its_definition(rule: Typical) -> None:
    target = make_target("llama", "sdpa", torch.float64, vocab_size=16, initializer_range=0.1)
    prompt = torch.tensor([[3, 5, 4, 1, 5]])
    drafts = [7, 2, 11]
    drafter = fixed_tree(drafts, [0, 1, 2])
    drafter.acceptance = rule
    text = target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter)
    expected = by_hand(target, prompt, drafts, rule, 24)
    assert text[0].tolist() == expected
    if rule.epsilon < 1e-6:  # everything is accepted
        assert expected[6:9] == drafts


def test_the_longest_path_is_accepted_and_the_likeliest_of_those() -> None:
    tree = DraftTree.from_lists([[0, 1, 2, 3, 4, 5]], [[-1, 0, 0, 2, 2, 0]])
    probs = torch.full((1, 6, 6), 0.01)
    probs[0, 0] = torch.tensor([0.0, 0.6, 0.2, 0.0, 0.0, 0.2])
    probs[0, 2] = torch.tensor([0.5, 0.0, 0.0, 0.2, 0.3, 0.0])
    choices = probs.argmax(-1)
    changed = Typical().choices(tree, probs.log(), choices, None)
    assert changed[0, 0] == 2  # not 1, which is likelier, but has no child
    assert changed[0, 2] == 4
    others = [1, 3, 4, 5]
    assert torch.equal(changed[0, others], choices[0, others])


@NOT_OWN
def test_a_judge_accepts_what_its_head_likes_in_batches() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    prompts = {"input_ids": torch.tensor([[3, 5, 4, 1, 5], [9, 8, 7, 6, 5]])}
    arguments = {**prompts, "max_new_tokens": 16, "do_sample": False}
    alone = target.generate(**arguments)
    drafter = right_for(2, alone)
    drafter.acceptance = judge_of(target, -1e9)  # it likes nothing, so the rest is as the target chooses
    assert torch.equal(target.generate(**arguments, assistant_model=drafter), alone)
    drafter.acceptance = judge_of(target, 1e9)
    assert not torch.equal(target.generate(**arguments, assistant_model=drafter), alone)
    rows = drafter.stats.per_step_accepted
    assert {accepted for row in rows for accepted in row[:-1]} == {3}  # every path to its end
    # What the head reads is the state of the plain forward at that token.
    judge = drafter.acceptance = judge_of(target, 0.0)
    text = target.generate(**arguments, assistant_model=drafter)
    verdicts = judge.probs(target.model(text).last_hidden_state) > judge.threshold
    logits = target(text).logits
    for row in range(2):
        place = 6
        for outcome in drafter.outcomes[1:]:
            accepted = len(outcome.tokens[row]) - 1
            for at in range(place, min(place + accepted, text.shape[1])):
                assert verdicts[row, at] or logits[row, at - 1].argmax() == text[row, at]
            place += accepted + 1


@NOT_OWN
@pytest.mark.parametrize("make", [make_eagle3, make_medusa, make_ngram])
def test_a_judge_does_not_change_what_a_drafter_reads(make: Any) -> None:
    target = make_target("llama", "sdpa", torch.float64)
    prompt = one_prompt()
    drafter = make(target)
    alone = target.generate(**prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter)
    before = drafter.stats.per_step_accepted
    drafter.acceptance = judge_of(target, -1e9)
    assert torch.equal(target.generate(**prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter), alone)
    assert drafter.stats.per_step_accepted == before


@NOT_OWN
@pytest.mark.parametrize("rule", ["typical", "judge"])
def test_verify_lossless_does_not_call_it_lossless_and_gives_the_distance(rule: str) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    drafter = fixed_tree([3, 4, 5], [0, 1, 2])
    prompt = [torch.tensor([PROMPT])]
    drafter.acceptance = Typical(1e-6, 1e-6) if rule == "typical" else judge_of(target, 1e9)
    report = verify_lossless(target, drafter, prompt, max_new_tokens=12, verbose=False)
    assert not report
    assert report.exact_match == 0.0
    assert report.first_tokens_distance > 0.3 > 1.1 * report.distance_of_plain
    assert str(report).startswith("NOT LOSSLESS: StubDrafter")
    assert f"distribution (total variation): {report.first_tokens_distance:.3f}" in str(report)
    # Not even where it changed nothing.
    drafter.acceptance = Typical(1.0, 1.0) if rule == "typical" else judge_of(target, -1e9)
    report = verify_lossless(target, drafter, prompt, max_new_tokens=12, verbose=False)
    assert not report.lossless
    if rule == "judge":
        assert report.exact_match == 1.0


def test_every_call_warns() -> None:
    target = make_target("llama", "sdpa", torch.float32)
    drafter = load_drafter("ngram", acceptance="typical")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"Typical\(epsilon=0.09, delta=0.3\) accepts .* NOT the target's own"):
            target.generate(**one_prompt(), max_new_tokens=4, do_sample=False, assistant_model=drafter)


def test_it_is_neither_a_default_nor_saved_nor_read_from_a_file(tmp_path: Path) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    assert all(make(target).acceptance is None for make in METHODS.values())
    drafter = make_eagle3(target)
    drafter.acceptance = "typical"
    drafter.save_pretrained(tmp_path)
    assert "acceptance" not in (tmp_path / "config.json").read_text()
    assert load_drafter(tmp_path).acceptance is None
    assert load_drafter(tmp_path, acceptance="typical").acceptance == "typical"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"drafting_options": {"acceptance": "typical"}}))
    with pytest.raises(ValueError, match="acceptance='typical' is no drafting option, .* no file can set it"):
        load_drafter(tmp_path)
    with pytest.raises(ValueError, match="acceptance='typical' is no drafting option"):
        drafter.set_options(acceptance="typical")


def test_calls_in_which_it_cannot_work_raise_before_the_first_token() -> None:
    target = make_target("llama", "sdpa", torch.float32)
    drafter = make_ngram(target)
    arguments = {**one_prompt(), "max_new_tokens": 4, "do_sample": False}
    drafter.acceptance = "lenient"
    with pytest.raises(ValueError, match="acceptance='lenient' must be 'exact', which is lossless, or one that is not"):
        target.generate(**arguments, assistant_model=drafter)
    drafter.acceptance = Judge(torch.zeros(16), target="owner/other")
    with pytest.raises(ValueError, match="reads states of size 16, but target .* 'owner/other'"):
        target.generate(**arguments, assistant_model=drafter)
    drafter.acceptance = "typical"
    with (
        pytest.warns(UserWarning, match="NOT the target's own"),
        pytest.raises(ValueError, match=r"reads the text token by token \(RepetitionPenaltyLogitsProcessor\)"),
    ):
        target.generate(**arguments, assistant_model=drafter, repetition_penalty=1.2)
    exits = make_specbound(target)
    exits.acceptance = judge_of(target)
    with pytest.raises(ValueError, match="SpecBoundDrafter verifies without them"):
        target.generate(**arguments, assistant_model=exits)


@pytest.mark.parametrize("value", [0, 1.5, "high"])
def test_thresholds_out_of_range_raise(value: Any) -> None:
    with pytest.raises(ValueError, match=f"epsilon={value!r} of Typical must be a number above 0 and at most 1"):
        Typical(epsilon=value)


def test_a_judge_is_saved_and_loaded(tmp_path: Path) -> None:
    judge = Judge(torch.arange(4.0), 0.25, 0.7, "owner/target")
    judge.save(tmp_path / "judge.safetensors")
    loaded = Judge.load(tmp_path / "judge.safetensors")
    assert torch.equal(loaded.weight, judge.weight)
    assert (loaded.bias, loaded.threshold, loaded.target) == (0.25, 0.7, "owner/target")
    (tmp_path / "other").write_text("{}")
    with pytest.raises(ValueError, match="was not written by Judge.save"):
        Judge.load(tmp_path / "other")
    with pytest.raises(OSError, match="missing"):
        Judge.load(tmp_path / "missing")
