"""verify_lossless: lossless pairs pass; several faults that change the output are detected."""

from __future__ import annotations

import copy
import functools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import verify_lossless
from hf_specdec.decoding import loop
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.methods.lookup import NGramDrafter
from hf_specdec.methods.merged import MergedDrafter
from hf_specdec.verification import Difference, LosslessReport, first_difference
from hf_specdec.verification.precision import Raised
from hf_specdec.verification.replay import FrozenRound, TreeReplay, acceptance_p_values, drawn_p_value
from tests.faults import FAULTS, SOUND, Relaxed, Warmer, drafting_best_last, drafting_likeliest, seeing_siblings
from tests.method_table import METHODS
from tests.scripted import StubDrafter
from tests.support_table import tiny_model
from tests.targets import fresh_target, make_target, one_prompt, tiny_tokenizer

PROMPT = one_prompt()["input_ids"]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32, initializer_range=0.15)


def check(target: PreTrainedModel, drafter: Drafter, **settings: Any) -> LosslessReport:
    return verify_lossless(target, drafter, [PROMPT], max_new_tokens=16, verbose=False, **settings)


def share_of_bound(report: LosslessReport) -> list[float]:
    """Differences between logits of trees and of plain forwards, relative to the bound of rounding."""
    return [replay.logit_error / replay.bound for replay in report.replays if replay.logit_error is not None]


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
    assert not report.left_out
    assert max(share_of_bound(report)) < 1e-2


def test_verdict_is_printed(target: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify_lossless(target, METHODS["ddtree"](target), [PROMPT], max_new_tokens=4, max_time_s=0.0)
    assert report
    printed = capsys.readouterr().out
    assert printed.startswith("LOSSLESS: DFlashDrafter (ddtree) drafting for LlamaForCausalLM")
    assert "1 prompts, 4 tokens" in printed
    assert f"smallest p-value {report.smallest_p_value:.2g} of {len(report.p_values)} tests" in printed
    assert f"threshold {report.threshold:.2g} = 1e-06 / {len(report.p_values)} (Bonferroni): pass" in printed
    for index, replay in enumerate(report.replays):
        shown = " ".join(f"{value:.2g}" for value in replay.p_values)
        assert f"    tree {index}, {replay.num_nodes} drafted nodes: p-value {shown}\n" in printed


def test_a_text_is_one_prompt(target: PreTrainedModel) -> None:
    report = verify_lossless(
        target, NGramDrafter(), "hello", tokenizer=tiny_tokenizer(), max_new_tokens=4, verbose=False
    )
    assert report.num_prompts == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty, so there is nothing to compare"),
        ([[5, 6, 7]], r"A prompt is the list \[5, 6, 7\]; prompts must be texts or ids of shape \[1, seq\]"),
        ([5, 6], "A prompt is the int 5; prompts must be texts or ids"),
        (
            {"input_ids": PROMPT},
            r"prompts is a dict; it must be a list of texts or of ids .* such as \[it\['input_ids'\]\]",
        ),
        ([PROMPT[0]], "A prompt has shape"),
    ],
)
def test_invalid_prompts_raise(target: PreTrainedModel, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify_lossless(target, NGramDrafter(), prompts, tokenizer=tiny_tokenizer(), verbose=False)


def test_arguments_that_are_not_a_target_and_a_drafter_raise(target: PreTrainedModel) -> None:
    drafter: Any = NGramDrafter()
    any_target: Any = target
    with pytest.raises(TypeError, match="drafter='owner/drafter' is a str; it must be what load_drafter"):
        verify_lossless(target, "owner/drafter")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="drafter is a LlamaForCausalLM; .* The target comes first"):
        verify_lossless(drafter, any_target)
    with pytest.raises(TypeError, match="model='target' is a str; it must be the loaded target model"):
        verify_lossless("target", drafter)  # type: ignore[arg-type]


def test_the_random_state_is_restored(target: PreTrainedModel) -> None:
    before = torch.random.get_rng_state()
    check(target, METHODS["ngram"](target))
    assert torch.equal(torch.random.get_rng_state(), before)


def drafts_near_misses(target: PreTrainedModel) -> StubDrafter:
    """A chain of the target's second best token."""

    def draft(context: DraftContext) -> DraftTree:
        prefix = context.sequences[:, : context.lengths[0]]
        second = target(prefix, use_cache=False).logits[:, -1].topk(2).indices[:, 1]
        return DraftTree.chain(torch.stack([context.root_ids, second], dim=1))

    return StubDrafter(draft)


def test_relaxed_acceptance_is_detected_in_both_modes(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(target, drafts_near_misses(target))
    monkeypatch.setattr(loop, "Acceptor", Relaxed)
    report = check(target, drafts_near_misses(target))
    assert not report.greedy
    assert not report.sampled
    assert str(report).startswith("NOT LOSSLESS: ")
    assert "NOT a near tie" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_detected_and_distinguished(fault: str, dtype: torch.dtype) -> None:
    make_wrong, during, verdict = FAULTS[fault]
    target = make_target("llama", "sdpa", dtype, initializer_range=0.15)
    with during():
        report = check(target, make_wrong(target))
    assert not report.lossless
    assert [name for name in ("sampled", "verified") if not getattr(report, name)] == [verdict], str(report)
    if verdict == "verified":  # far above the bound of rounding
        assert max(share_of_bound(report)) > 1e4
        assert "DIFFERENT" in str(report)
    else:
        assert max(share_of_bound(report)) < 1e-2


def test_correct_variants_of_the_faults_pass(target: PreTrainedModel) -> None:
    assert check(target, SOUND)
    assert check(target, drafting_best_last(target))


@pytest.mark.parametrize("method", ["ngram", "causal_lm_tree", "causal_lm_chain"])
def test_rounding_in_bfloat16_is_not_a_loss(method: str) -> None:
    # With these weights and AVX2 the own-dtype logits of tree and plain forwards are further apart than most.
    target = make_target("llama", "sdpa", torch.bfloat16, 0, initializer_range=0.15, vocab_size=512)
    report = check(target, METHODS[method](target))
    assert report.lossless, str(report)
    assert report.precision == torch.float64
    assert max(share_of_bound(report)) < 1e-2


PROBS = torch.tensor([[8, 4, 2, 1, 1], [1, 1, 8, 4, 2], [4, 8, 2, 1, 1], [2, 1, 4, 8, 1]]) / 16  # [nodes, vocab]
DRAFT_PROBS = torch.tensor([[[4, 8, 2, 1, 1], [2, 4, 1, 1, 8], [1, 1, 4, 8, 2]]]) / 16


def frozen_round(tree: DraftTree) -> FrozenRound:
    """A round whose verified logits are exact: no forward of a model, so the same on every processor."""
    return FrozenRound(torch.zeros(5, dtype=torch.int64), tree, PROBS.log())


CHOSEN = frozen_round(DraftTree.from_lists([[0, 1, 0, 2]], [[-1, 0, 0, 1]]))


def drawn_round(token_ids: Tensor) -> FrozenRound:
    return frozen_round(DraftTree.chain(torch.cat([torch.zeros(1, 1), token_ids], 1).long(), draft_probs=DRAFT_PROBS))


DRAWN = drawn_round(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize(("frozen", "num_tests"), [(CHOSEN, 1), (DRAWN, 3)], ids=["chosen drafts", "drawn drafts"])
def test_an_unbiased_rule_passes_and_a_biased_rule_has_a_tiny_p_value(
    frozen: FrozenRound, num_tests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    values = acceptance_p_values(frozen)
    assert len(values) == num_tests
    assert min(values) > 1e-6  # a false alarm with this probability, whatever random numbers a processor draws
    for biased in (Relaxed, Warmer):
        monkeypatch.setattr(loop, "Acceptor", biased)
        assert min(acceptance_p_values(frozen)) < 1e-15


def test_drafts_that_are_not_drawn_as_stated_have_a_tiny_p_value() -> None:
    generator = torch.Generator().manual_seed(0)
    honest = [drawn_round(torch.multinomial(DRAFT_PROBS[0], 1, generator=generator).T) for _ in range(40)]
    likeliest = [drawn_round(DRAFT_PROBS.argmax(-1)) for _ in range(40)]
    rarest = [drawn_round(DRAFT_PROBS.argmin(-1)) for _ in range(40)]
    values = [drawn_p_value(rounds) for rounds in (honest, likeliest, rarest, [CHOSEN])]
    assert values[0] is not None
    assert values[0] > 1e-6
    assert values[1] is not None
    assert values[1] < 1e-15
    assert values[2] is not None
    assert values[2] < 1e-15
    assert values[3] is None


def test_the_threshold_of_a_p_value_is_divided_by_the_number_of_tests() -> None:
    def report(*values: float, drawn: float | None = None) -> LosslessReport:
        replays = [TreeReplay(3, 2000, (value,), 0.1) for value in values]
        return LosslessReport("t", "d", replays=replays, drawn_p_value=drawn)

    several = report(0.5, 2e-6, 0.1, drawn=0.7)
    assert several.p_values == [0.5, 2e-6, 0.1, 0.7]
    assert several.smallest_p_value == 2e-6
    assert several.threshold == pytest.approx(2.5e-7)
    assert several.p_value == pytest.approx(8e-6)
    assert report(0.5, 6e-7).lossless
    assert not report(0.5, 4e-7).lossless
    assert "smallest p-value 4e-07 of 2 tests, threshold 5e-07 = 1e-06 / 2 (Bonferroni): FAIL" in str(report(0.5, 4e-7))
    assert not report(0.5, drawn=1e-7).sampled
    assert report().p_value == report().smallest_p_value == 1.0


def test_the_drafter_is_left_as_it_was(target: PreTrainedModel) -> None:
    drafter = drafting_likeliest(target)
    make = drafter.candidate_generator  # an attribute of the instance
    check(target, drafter)
    assert vars(drafter)["candidate_generator"] is make


def test_logits_are_compared_in_high_precision_only() -> None:
    def report(error: float | None) -> LosslessReport:
        return LosslessReport("t", "d", replays=[TreeReplay(3, 2000, (0.5,), 0.7, error, 1e-8)])

    assert report(1e-9).lossless
    assert not report(1e-7).lossless
    assert not report(math.nan).lossless
    assert "differ by at most 1e-07 (bound 1e-08): DIFFERENT" in str(report(1e-7))
    assert "differ by at most 0.7" in str(report(1e-7))


def test_a_target_that_supports_only_its_own_dtype_is_reported_as_not_compared(target: PreTrainedModel) -> None:
    def own_kernel(module: Any, args: Any) -> None:
        if args[0].dtype != torch.bfloat16:
            raise RuntimeError("this kernel needs bfloat16")

    target = make_target("llama", "sdpa", torch.bfloat16, initializer_range=0.15)
    handle = target.get_output_embeddings().register_forward_pre_hook(own_kernel)
    try:
        report = check(target, SOUND)
    finally:
        handle.remove()
    assert report.lossless
    assert report.precision is None
    assert str(report).startswith("LOSSLESS as far as checked: ")
    assert "left out logits of tree forwards: torch.float64: this kernel needs bfloat16" in str(report)


def test_float32_is_used_without_float64() -> None:
    target = make_target("llama", "sdpa", torch.bfloat16, initializer_range=0.15)

    def no_float64(module: Any, args: Any) -> None:
        if args[0].dtype == torch.float64:
            raise TypeError("this device has no float64")

    handle = target.get_output_embeddings().register_forward_pre_hook(no_float64)
    try:
        sound, wrong = check(target, SOUND), check(target, StubDrafter(seeing_siblings))
    finally:
        handle.remove()
    assert sound.precision == torch.float32
    assert sound.lossless, str(sound)
    assert not wrong.verified


def test_difference_within_rounding_is_a_near_tie() -> None:
    assert Difference(3, 1, 2, gap=1e-6, rounding=1e-6).is_near_tie
    assert not Difference(3, 1, 2, gap=1e-3, rounding=1e-6).is_near_tie
    assert not Difference(3, 1, 2, gap=math.inf, rounding=1e-6).is_near_tie
    report = LosslessReport("t", "d", differences={0: Difference(3, 1, 2, gap=1e-6, rounding=1e-6)})
    assert report.lossless
    assert "identical up to 1 near ties" in str(report)


@pytest.mark.parametrize("high", [False, True])
@torch.no_grad()
def test_gap_is_the_targets_own(high: bool, target: PreTrainedModel) -> None:
    plain = target.generate(PROMPT, max_new_tokens=4, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    other = [*plain[:2], (plain[2] + 1) % 64, 5]
    precision = functools.partial(Raised, torch.float64) if high else nullcontext
    difference = first_difference(target, PROMPT, plain, other, precision)
    logits = target(torch.cat([PROMPT, torch.tensor([plain[:2]])], 1)).logits[0, -1]
    assert difference.position == 2
    assert difference.gap == pytest.approx(float(logits[plain[2]] - logits[other[2]]), rel=1e-4)
    assert difference.top2_gap == pytest.approx(float(logits[plain[2]] - logits.topk(2).values[1]), rel=1e-4)
    assert 0 < difference.rounding < 1e-4
    assert not difference.is_near_tie
    assert math.isinf(first_difference(target, PROMPT, plain, plain[:3]).gap)


@torch.no_grad()
def test_rounding_is_measured_at_many_positions() -> None:
    # One position is not enough: two forwards may agree there and differ a token later.
    target = make_target("llama", "sdpa", torch.bfloat16, initializer_range=0.15)
    plain = target.generate(PROMPT, max_new_tokens=24, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    ends = [
        first_difference(target, PROMPT, plain, [*plain[:at], -1], functools.partial(Raised, torch.float64))
        for at in (20, 21, 22, 23)
    ]
    roundings = [each.rounding for each in ends]
    assert min(roundings) > 0.5 * max(roundings) > 0


@pytest.mark.parametrize("never", [-math.inf, torch.finfo(torch.float32).min])
@torch.no_grad()
def test_masked_tokens_do_not_make_every_difference_a_near_tie(target: PreTrainedModel, never: float) -> None:
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
    assert max(replay.rounding for replay in report.replays) < 1e-3
    assert all(replay.bound < 1e-3 for replay in report.replays)


def test_texts_are_messages_where_the_drafter_was_trained_on_chats(target: PreTrainedModel) -> None:
    drafter, tokenizer = METHODS["ddtree"](target), copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}u{{ m['content'] }}{% endfor %}a"
    given: dict[str, Any] = {"max_new_tokens": 8, "max_time_s": 0.0, "verbose": False}
    for record, text in (({"chat_template": True}, "uhelloa"), ({"chat_template": False}, "hello"), (None, "hello")):
        drafter.training_record = record
        report = verify_lossless(target, drafter, ["hello"], tokenizer=tokenizer, **given)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        plain = verify_lossless(target, drafter, [ids], **given)
        assert report.mean_acceptance_length == plain.mean_acceptance_length
        assert [tree.num_nodes for tree in report.replays] == [tree.num_nodes for tree in plain.replays]
        merged = verify_lossless(
            target, MergedDrafter(drafter, NGramDrafter()), ["hello"], tokenizer=tokenizer, **given
        )
        for each in (report, merged):
            assert each.chat == (text != "hello") == ("1 prompts in the chat template" in str(each))


def test_without_time_one_text_and_one_tree_are_checked(target: PreTrainedModel) -> None:
    prompts = [PROMPT, PROMPT.flip(1)]
    report = verify_lossless(target, METHODS["ddtree"](target), prompts, max_time_s=0.0, verbose=False)
    assert (report.num_prompts, len(report.replays)) == (1, 1)
    assert report.lossless
    assert not report.left_out


def test_texts_need_a_tokenizer(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="target '' has no tokenizer: pass tokenizer="):
        verify_lossless(target, METHODS["ngram"](target), ["hello"])
    with pytest.raises(ValueError, match=r"A prompt has shape \[3\]; prompts must be texts or ids of shape"):
        verify_lossless(target, METHODS["ngram"](target), [torch.tensor([1, 2, 3])])


@pytest.mark.filterwarnings("ignore:.*(In this call|decodes it plainly)")
def test_chains_in_the_assisted_loop_are_verified_too() -> None:
    report = verify_lossless(tiny_model("gpt_neo"), NGramDrafter(), [one_prompt()["input_ids"]], max_time_s=5)
    assert report.lossless
    assert report.replays
    assert not report.left_out, "the logits of the chains are compared in high precision"
    assert max(share_of_bound(report)) < 1e-2


class OneScale(torch.nn.Module):
    """Quantises the input of a linear layer in 4 bits, with one scale for everything in the forward."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        step = rows.abs().max().clamp(min=1e-6) / 7
        return self.linear((rows / step).round() * step)


def test_a_target_whose_own_forwards_differ_is_not_called_lossless() -> None:
    target = fresh_target("llama", "sdpa", torch.float32, initializer_range=0.15)
    for layer in target.model.layers:
        layer.mlp.down_proj = OneScale(layer.mlp.down_proj)
    report = check(target, METHODS["ddtree"](target))
    assert not report.lossless
    assert report.own_difference is not None
    assert report.own_difference > 1e-3
    text = str(report)
    assert text.startswith("CANNOT BE EXACT: ")
    assert f"two plain forwards of the target differ by {report.own_difference:.2g}" in text
    assert "LOSSLESS" not in text
    assert "near tie" not in text


def test_no_difference_is_a_near_tie_where_the_targets_own_forwards_differ() -> None:
    near = Difference(3, 1, 2, gap=1.0, rounding=1.0)
    report = LosslessReport("t", "d", differences={0: near}, own_difference=1.0)
    assert not report.greedy
    assert "not to be judged, as the target's own forwards differ" in str(report)
    assert "near tie" not in str(report)
