"""verify_lossless: sound pairs pass, and setups that bend the output in any of several ways are caught."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import verify_lossless
from hf_specdec.decoding import loop
from hf_specdec.decoding.acceptance import Acceptance, FollowTarget
from hf_specdec.decoding.candidates import DraftContext
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.ngram import NGramDrafter
from hf_specdec.verification import Difference, LosslessReport, first_difference
from hf_specdec.verification.replay import TreeReplay
from tests.methods import METHODS, make_causal_lm_chain
from tests.scripted import StubDrafter, fixed_tree
from tests.targets import make_target, one_prompt, tiny_tokenizer

PROMPT = one_prompt()["input_ids"]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32, initializer_range=0.15)


def check(target: PreTrainedModel, drafter: Drafter, **settings: Any) -> LosslessReport:
    return verify_lossless(target, drafter, [PROMPT], max_new_tokens=16, verbose=False, **settings)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_passes(method: str, target: PreTrainedModel) -> None:
    drafter = METHODS[method](target)
    if method == "specbranch":
        # With hedges it drafts only where H-RAD promises a whole draft, or for a branch that came true: here, seldom.
        drafter.set_options(hedge=False)
    report = check(target, drafter)
    assert report.lossless, str(report)
    assert report.num_tokens == 16
    assert report.replays
    assert all(replay.logit_error < 1e-3 for replay in report.replays)


def test_verdict_is_printed(target: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify_lossless(target, METHODS["ddtree"](target), [PROMPT], max_new_tokens=4, max_time_s=0.0)
    assert report
    printed = capsys.readouterr().out
    assert printed.startswith("LOSSLESS: DFlashDrafter (ddtree) drafting for LlamaForCausalLM")
    assert "1 prompts, 4 tokens" in printed
    assert "sigma (bound 4.75)" in printed


def test_a_text_is_one_prompt(target: PreTrainedModel) -> None:
    report = verify_lossless(
        target, NGramDrafter(), "hello", tokenizer=tiny_tokenizer(), max_new_tokens=4, verbose=False
    )
    assert report.num_prompts == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty, so there is nothing to compare"),
        ([[5, 6, 7]], r"A prompt is a list, \[5, 6, 7\]; prompts must be texts or ids of shape \[1, seq\]"),
        ([5, 6], "A prompt is a int, 5; prompts must be texts or ids"),
        (
            {"input_ids": PROMPT},
            r"prompts is a dict; it must be a list of texts or of ids .* such as \[it\['input_ids'\]\]",
        ),
        ([PROMPT[0]], "A prompt has shape"),
    ],
)
def test_prompts_that_cannot_be_compared_on_raise(target: PreTrainedModel, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_lossless(target, NGramDrafter(), prompts, tokenizer=tiny_tokenizer(), verbose=False)


def test_what_is_no_pair_of_target_and_drafter_raises(target: PreTrainedModel) -> None:
    drafter: Any = NGramDrafter()
    any_target: Any = target
    with pytest.raises(TypeError, match="drafter='owner/drafter' is a str; it must be what load_drafter"):
        verify_lossless(target, "owner/drafter")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="drafter is a LlamaForCausalLM; .* The target comes first"):
        verify_lossless(drafter, any_target)
    with pytest.raises(TypeError, match="model='target' is a str; it must be the loaded target model"):
        verify_lossless("target", drafter)  # type: ignore[arg-type]


def test_random_state_is_left_alone(target: PreTrainedModel) -> None:
    before = torch.random.get_rng_state()
    check(target, METHODS["ngram"](target))
    assert torch.equal(torch.random.get_rng_state(), before)


class Relaxed(FollowTarget):
    """Likes what was drafted: a drafted token counts for more than the target says."""

    def __call__(self, tree: DraftTree, logits: Tensor, sequences: Any, ahead: Any = None) -> Acceptance:
        bent = logits.clone()
        for node in range(1, tree.num_nodes):
            rows = torch.arange(len(bent))
            bent[rows, tree.parents[:, node], tree.token_ids[:, node]] += 1.0
        return super().__call__(tree, bent, sequences, ahead)


def drafts_near_misses(target: PreTrainedModel) -> StubDrafter:
    """A chain of what the target likes second best."""

    def draft(context: DraftContext) -> DraftTree:
        prefix = context.sequences[:, : context.lengths[0]]
        second = target(prefix, use_cache=False).logits[:, -1].topk(2).indices[:, 1]
        return DraftTree.chain(torch.stack([context.root_ids, second], dim=1))

    return StubDrafter(draft)


def test_relaxed_acceptance_is_caught_in_both_modes(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(target, drafts_near_misses(target))
    monkeypatch.setattr(loop, "FollowTarget", Relaxed)
    report = check(target, drafts_near_misses(target))
    assert not report.greedy
    assert not report.sampled
    assert str(report).startswith("NOT LOSSLESS: ")
    assert "NOT a near tie" in str(report)


class Warmer(FollowTarget):
    """Chooses by another law: that of twice the temperature."""

    def __call__(self, tree: DraftTree, logits: Tensor, sequences: Any, ahead: Any = None) -> Acceptance:
        return super().__call__(tree, logits / 2, sequences, ahead)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["causal_lm_tree", "causal_lm_chain"])
@pytest.mark.parametrize("wrong", [Relaxed, Warmer])
def test_wrong_rules_are_caught_on_fixed_and_on_drawn_drafts(
    wrong: type, method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target("llama", "sdpa", dtype, initializer_range=0.15)
    monkeypatch.setattr(loop, "FollowTarget", wrong)
    report = check(target, METHODS[method](target))
    assert report.verified  # the logits are sound
    assert not report.sampled
    assert not report.lossless


def test_drafts_that_were_not_drawn_from_their_law_are_caught(target: PreTrainedModel) -> None:
    honest = make_causal_lm_chain(target, seed=1)
    assert check(target, honest).drawn_sigma is not None

    make = honest.candidate_generator

    def lying(model: TargetModel) -> Any:
        generator: Any = make(model)
        draft = generator.draft

        def likeliest(context: DraftContext) -> DraftTree:
            tree = draft(context)
            if tree.draft_probs is None:
                return tree
            token_ids = torch.cat([tree.token_ids[:, :1], tree.draft_probs.argmax(-1)], dim=1)
            return replace(tree, token_ids=token_ids, children=None)

        generator.draft = likeliest
        return generator

    honest.candidate_generator = lying  # type: ignore[method-assign]
    report = check(target, honest)
    assert report.greedy
    assert not report.sampled
    assert report.drawn_sigma is not None
    assert report.drawn_sigma > 4.75


SOUND = fixed_tree([3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 2, 3])


def seeing_siblings(context: DraftContext) -> DraftTree:
    tree = SOUND.draft(context)
    return replace(tree, ancestor_mask=torch.ones_like(tree.ancestor_mask).tril())


def one_place_late(context: DraftContext) -> DraftTree:
    tree = SOUND.draft(context)
    return replace(tree, depths=tree.depths + (tree.depths > 0).to(tree.depths.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [seeing_siblings, one_place_late])
def test_wrong_masks_and_positions_are_caught_as_wrong_logits(wrong: Any, dtype: torch.dtype) -> None:
    target = make_target("llama", "sdpa", dtype, initializer_range=0.15)
    assert check(target, SOUND)
    report = check(target, StubDrafter(wrong))
    assert report.sampled  # the rule does as these logits say
    assert not report.verified
    assert not report.lossless
    assert max(replay.logit_error for replay in report.replays) > 0.1
    assert "MORE than rounding" in str(report)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", ["ngram", "causal_lm_tree", "causal_lm_chain"])
def test_rounding_in_bfloat16_is_no_loss(method: str, seed: int) -> None:
    target = make_target("llama", "sdpa", torch.bfloat16, seed, initializer_range=0.15, vocab_size=512)
    report = check(target, METHODS[method](target), seed=seed)
    assert report.lossless, str(report)
    assert report.replays
    assert max(replay.logit_error for replay in report.replays) > 1e-3


def test_the_bound_of_logits_is_rounding_measured_on_all_trees() -> None:
    def report(*errors: float) -> LosslessReport:
        return LosslessReport("t", "d", replays=[TreeReplay(3, 2000, 0.0, error, rounding=0.1) for error in errors])

    assert report(0.0, 0.2).lossless
    assert "differ by at most 0.2; rounding moves them by 0.1: rounding" in str(report(0.0, 0.2))
    assert not report(0.0, 0.21).lossless
    assert report(0.21).sampled
    assert not report(math.nan).lossless
    assert "MORE than rounding" in str(report(0.0, 0.21))


def test_difference_within_rounding_is_a_near_tie() -> None:
    assert Difference(3, 1, 2, gap=1e-6, rounding=1e-6).is_near_tie
    assert not Difference(3, 1, 2, gap=1e-3, rounding=1e-6).is_near_tie
    assert not Difference(3, 1, 2, gap=math.inf, rounding=1e-6).is_near_tie
    report = LosslessReport("t", "d", differences={0: Difference(3, 1, 2, gap=1e-6, rounding=1e-6)})
    assert report.lossless
    assert "identical up to 1 near ties" in str(report)


@torch.no_grad()
def test_gap_is_the_targets_own(target: PreTrainedModel) -> None:
    plain = target.generate(PROMPT, max_new_tokens=4, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    other = [*plain[:2], (plain[2] + 1) % 64, 5]
    difference = first_difference(target, PROMPT, plain, other)
    logits = target(torch.cat([PROMPT, torch.tensor([plain[:2]])], 1)).logits[0, -1]
    assert difference.position == 2
    assert difference.gap == pytest.approx(float(logits[plain[2]] - logits[other[2]]), rel=1e-4)
    assert difference.top2_gap == pytest.approx(float(logits[plain[2]] - logits.topk(2).values[1]), rel=1e-4)
    assert not difference.is_near_tie
    assert math.isinf(first_difference(target, PROMPT, plain, plain[:3]).gap)


@pytest.mark.parametrize("never", [-math.inf, torch.finfo(torch.float32).min])
@torch.no_grad()
def test_tokens_that_are_never_to_come_do_not_make_every_difference_a_near_tie(
    target: PreTrainedModel, never: float
) -> None:
    plain = target.generate(PROMPT, max_new_tokens=1, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    spoil = next(token for token in range(64) if token not in plain)

    def mask(module: Any, args: Any, output: Tensor) -> Tensor:
        return output.index_fill(-1, torch.tensor([spoil]), never)

    handle = target.get_output_embeddings().register_forward_hook(mask)
    try:
        difference = first_difference(target, PROMPT, plain, [(plain[0] + 1) % 64])
        report = check(target, METHODS["ngram"](target))
    finally:
        handle.remove()
    assert difference.rounding < 1e-3
    assert not difference.is_near_tie
    assert report.lossless
    assert report.rounding < 1e-3


def test_texts_need_a_tokenizer(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="no tokenizer of target '' is at hand: pass tokenizer="):
        verify_lossless(target, METHODS["ngram"](target), ["hello"])
    with pytest.raises(ValueError, match=r"A prompt has shape \[3\]; prompts must be texts or ids of shape"):
        verify_lossless(target, METHODS["ngram"](target), [torch.tensor([1, 2, 3])])
