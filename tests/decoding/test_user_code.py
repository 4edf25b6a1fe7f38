"""Code of the user with state: each object sees the calls of plain decoding, in their order, and no others.

Processors, criteria and streamers write to one log. It must be equal with and without drafts, whatever was accepted.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from hf_specdec.decoding.upstream import CACHE
from hf_specdec.drafting.drafter import Drafter
from tests.chains import assisted_loop
from tests.decoding.test_outputs import assert_same_cache
from tests.method_table import METHODS
from tests.scripted import right_for
from tests.targets import PAD, PROMPTS, VOCAB, fresh_target, make_target, tiny_tokenizer

NEW = 14
START = 9  # the prompts' length
Log = list[tuple[Any, ...]]


class CountsPerRow(LogitsProcessor):
    """A running count per row, advanced by the last token of each call: a penalty for what was written."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.counts: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.counts is None:
            self.counts = torch.zeros_like(scores)
        else:
            self.counts[torch.arange(len(scores)), input_ids[:, -1]] += 1
        self.log.append(("processor", input_ids.tolist(), scores.shape, scores.argmax(-1).tolist()))
        return scores - 3 * self.counts


class CountsCalls(LogitsProcessor):
    """About all rows: favours a token that depends on the number of calls and on the last tokens of all rows."""

    def __init__(self, log: Log) -> None:
        self.log, self.calls = log, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(("processor", input_ids.tolist(), scores.shape, scores.argmax(-1).tolist()))
        scores[:, (7 * self.calls + int(input_ids[:, -1].sum())) % scores.shape[1]] += 4.0  # in place
        return scores


class FlagPerRow(StoppingCriteria):
    """Each row stops once it has as many tokens as its place says; a flag remembers it."""

    def __init__(self, log: Log, stops: bool) -> None:
        self.log, self.stops = log, stops
        self.seen: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        self.log.append(("criterion", input_ids.tolist(), None if scores is None else [each.shape for each in scores]))
        written = input_ids.shape[1] - START
        ends = torch.tensor([self.stops and written == 4 + 3 * row for row in range(len(input_ids))])
        self.seen = ends if self.seen is None else self.seen | ends
        return self.seen


class AllTogether(StoppingCriteria):
    """All rows stop with the tenth token, as a number, as evaluation harnesses do; counts its calls."""

    def __init__(self, log: Log, stops: bool) -> None:
        self.log, self.stops, self.calls = log, stops, 0

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> bool:  # type: ignore[override]
        self.calls += 1
        self.log.append(("criterion", input_ids.tolist(), None if scores is None else [each.shape for each in scores]))
        return self.stops and self.calls >= 10


class Streams(BaseStreamer):
    def __init__(self, log: Log) -> None:
        self.log = log

    def put(self, value: Tensor) -> None:
        self.log.append(("put", value.tolist()))

    def end(self) -> None:
        self.log.append(("end",))


KINDS: dict[str, tuple[type, type]] = {"per row": (CountsPerRow, FlagPerRow), "all rows": (CountsCalls, AllTogether)}
ENDINGS = ["end of text", "length", "stop string", "criterion"]


def settings_of(target: PreTrainedModel, kind: str, ending: str, prompts: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments with which the rows end at different tokens, where the ending allows that."""
    settings: dict[str, Any] = {**prompts, "max_new_tokens": NEW, "do_sample": False}
    script, _ = run(target, kind, settings)
    if ending == "end of text":
        ends = [int(script[row, START + 3 + 3 * row]) for row in range(len(script))]
        return settings | {"eos_token_id": ends}
    if ending == "stop string":
        texts = tiny_tokenizer().batch_decode(script[:, START:])
        return settings | {"stop_strings": [text[7:10] for text in texts], "tokenizer": tiny_tokenizer()}
    # 63 does not come by itself; with an end of text, finished rows are padded.
    return settings | {"eos_token_id": 63} if ending == "criterion" else settings


def run(
    target: PreTrainedModel,
    kind: str,
    settings: dict[str, Any],
    drafter: Drafter | None = None,
    *,
    processor: bool = True,
    criterion: bool = True,
    stops: bool = False,
) -> tuple[Tensor, Log]:
    """The output of a call, and what its objects saw."""
    log: Log = []
    make_processor, make_criterion = KINDS[kind]
    output = target.generate(
        **settings,
        logits_processor=LogitsProcessorList([make_processor(log)] if processor else []),
        stopping_criteria=StoppingCriteriaList([make_criterion(log, stops)] if criterion else []),
        streamer=Streams(log),
        assistant_model=drafter,
    )
    return output, log


def assert_same_calls(ours: Log, plain: Log, output: Tensor, padded: bool) -> None:
    """Equal call for call. Of a finished row, whose logits mean nothing, only ids and shapes are compared."""
    assert [call[:3] for call in ours] == [call[:3] for call in plain]
    for own, other in zip(ours, plain, strict=True):
        if own[0] == "processor":
            column = len(own[1][0])
            for row, (best, expected) in enumerate(zip(own[3], other[3], strict=True)):
                assert best == expected or (padded and output[row, column] == PAD), f"row {row}, column {column}"


@pytest.mark.combinations(96)
@pytest.mark.parametrize("objects", ["processor", "criterion", "both"])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("chains", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_user_code_sees_the_calls_of_plain_decoding(
    kind: str, batch: str, chains: bool, ending: str, objects: str
) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    which = {
        "processor": objects in ("processor", "both"),
        "criterion": objects in ("criterion", "both") or ending == "criterion",
        "stops": ending == "criterion",
    }
    settings = settings_of(target, kind, ending, prompts)
    alone, plain = run(target, kind, settings, **which)
    script = torch.nn.functional.pad(alone, (0, 8), value=3)
    diverging = script.clone()
    diverging[-1, START + 5 :] = 3
    drafters: list[Drafter] = [right_for([4, 0, 2, 6], script), right_for(3, diverging), METHODS["ddtree"](target)]
    for drafter in drafters[: 1 if chains else 3]:
        with assisted_loop() if chains else nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(In this call|decodes it plainly)")
            output, ours = run(target, kind, settings, drafter, **which)
        assert output.tolist() == alone.tolist()
        assert_same_calls(ours, plain, alone, padded="eos_token_id" in settings)
        assert drafter.stats is not None
        assert chains == (drafter.stats.num_draft_tokens == 0)


@pytest.mark.parametrize("method", METHODS)
def test_rounds_that_end_before_their_accepted_path_change_nothing(method: str) -> None:
    # One row's path ends first, so that the bonus token of another one may be a token that was drafted.
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    settings = settings_of(target, "per row", "end of text", prompts)
    alone, plain = run(target, "per row", settings)
    drafter: Any = METHODS[method](target)
    if isinstance(drafter, torch.nn.Module):
        drafter.to(torch.float64)
    output, ours = run(target, "per row", settings, drafter)
    assert output.tolist() == alone.tolist()
    assert_same_calls(ours, plain, alone, padded=True)
    sampled = {**settings, "do_sample": True, "temperature": 0.7}
    run(target, "all rows", sampled, drafter)


@pytest.mark.parametrize("family", ["qwen3-mixed", "qwen3.5"])
@pytest.mark.parametrize("ending", ["end of text", "length", "criterion"])
def test_the_cache_is_that_of_plain_decoding(ending: str, family: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS["ragged batch of three"]()
    settings = settings_of(target, "per row", ending, prompts)

    def call(drafter: Drafter | None = None) -> Any:
        return target.generate(
            **settings,
            logits_processor=LogitsProcessorList([CountsPerRow([])]),
            stopping_criteria=StoppingCriteriaList([FlagPerRow([], ending == "criterion")]),
            return_dict_in_generate=True,
            output_scores=True,
            assistant_model=drafter,
        )

    alone = call()
    assisted = call(right_for([4, 0, 2], torch.nn.functional.pad(alone.sequences, (0, 8), value=3)))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert_same_cache(assisted[CACHE], alone[CACHE])
    for column, (own, other) in enumerate(zip(assisted.scores, alone.scores, strict=True), START):
        for row in range(3):
            if alone.sequences[row, column] != PAD:
                torch.testing.assert_close(own[row], other[row].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_eos", [False, True])
def test_a_criterion_sees_the_scores_of_all_columns(with_eos: bool) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()

    class SumsScores(StoppingCriteria):
        def __init__(self) -> None:
            self.sums: list[list[float]] = []

        def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
            best = torch.stack(scores, 1).amax(-1)  # [batch, columns]
            self.sums.append(best[1].tolist())  # of a row that goes on to the end
            return best[:, -1] < -100

    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    script = target.generate(**prompts, **settings)
    if with_eos:
        settings["eos_token_id"] = int(script[0, START + 4])
        assert settings["eos_token_id"] not in script[1, START:]
    settings |= {"return_dict_in_generate": True, "output_scores": True}
    plain, ours = SumsScores(), SumsScores()
    target.generate(**prompts, **settings, stopping_criteria=StoppingCriteriaList([plain]))
    target.generate(
        **prompts, **settings, stopping_criteria=StoppingCriteriaList([ours]), assistant_model=right_for([3, 0], script)
    )
    assert len(ours.sums) == len(plain.sums) > 5
    for own, other in zip(ours.sums, plain.sums, strict=True):
        assert own == pytest.approx(other, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
def test_user_code_sees_nothing_of_a_round_whose_logits_are_nan() -> None:
    # Such a round is verified again without drafts. The token with NaN is drafted and refused.
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    settings = {**prompts, "max_new_tokens": NEW, "do_sample": False}
    alone, plain = run(target, "per row", settings)
    unseen = min(set(range(3, 64)) - set(alone.flatten().tolist()))
    wrong = torch.nn.functional.pad(alone, (0, 8), value=3)
    wrong[:, START + 4] = unseen
    target.get_input_embeddings().weight.data[unseen] = torch.nan
    drafter = right_for(3, wrong, siblings=0)
    output, ours = run(target, "per row", settings, drafter)
    assert output.tolist() == alone.tolist()
    assert_same_calls(ours, plain, alone, padded=False)
    assert drafter.stats is not None
    assert drafter.stats.num_plain_steps > 0


def test_rows_that_have_finished_leave_the_batch_of_a_criterion() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    settings = settings_of(target, "per row", "end of text", prompts)
    which = {"processor": False}
    alone, plain = run(target, "per row", settings, **which)
    drafter = METHODS["ddtree"](target)
    output, ours = run(target, "per row", settings, drafter, **which)
    assert output.tolist() == alone.tolist()
    assert_same_calls(ours, plain, alone, padded=True)


@pytest.mark.filterwarnings("ignore:.*transformers' own loop verifies")
def test_a_streamer_gets_one_token_per_call_from_chains() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    settings = {**prompts, "max_new_tokens": NEW, "do_sample": False}
    plain: Log = []
    script = target.generate(**settings, streamer=Streams(plain))
    ours: Log = []
    drafter = right_for([3, 0, 5], script, siblings=0)
    with assisted_loop():
        output = target.generate(**settings, streamer=Streams(ours), assistant_model=drafter)
    assert output.tolist() == script.tolist()
    assert ours == plain
    assert drafter.stats is not None
    assert drafter.stats.num_accepted_draft_tokens > 0


@pytest.mark.filterwarnings("ignore:.*transformers' own loop verifies")
def test_transformers_text_streamer_prints_the_same_text_from_chains(capsys: pytest.CaptureFixture[str]) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    settings = {**prompts, "max_new_tokens": NEW, "do_sample": False}
    script = target.generate(**settings, streamer=TextStreamer(tiny_tokenizer()))
    plain = capsys.readouterr().out
    with assisted_loop():
        drafter = right_for([3, 0, 5], script, siblings=0)
        target.generate(**settings, streamer=TextStreamer(tiny_tokenizer()), assistant_model=drafter)
    assert capsys.readouterr().out == plain != ""


def test_the_warning_of_a_chain_target_names_what_keeps_it_from_drafting() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    settings = {**prompts, "max_new_tokens": 4, "do_sample": False}
    with (
        assisted_loop(),
        pytest.warns(
            UserWarning, match="nothing is drafted.*: CountsPerRow, FlagPerRow: the target decodes it plainly"
        ),
    ):
        run(target, "per row", settings, METHODS["ngram"](target))
    with assisted_loop(), pytest.warns(UserWarning, match="'ngram' drafts chains"):
        target.generate(**settings, repetition_penalty=1.2, assistant_model=METHODS["ngram"](target))


def test_a_processor_that_says_it_keeps_no_state_is_called_for_rows_of_one_length() -> None:
    """Code of the user would see each length once, for all rows together; the output is the same."""

    class Lowered(LogitsProcessor):
        keeps_no_state = True

        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.lengths.append(input_ids.shape[1])
            return scores - 0.5 * torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[-1])

    target = make_target("llama", "sdpa")
    settings: dict[str, Any] = {**PROMPTS["ragged batch of three"](), "max_new_tokens": 16, "do_sample": False}
    alone = target.generate(**settings, logits_processor=[Lowered()])
    seen = Lowered()
    script = alone.clone()
    script[0, -16:] = (script[0, -16:] + 1) % VOCAB  # no draft of the first row is right
    drafter = right_for(4, script, siblings=0, vocab=VOCAB)
    assert target.generate(**settings, logits_processor=[seen], assistant_model=drafter).equal(alone)
    assert len(seen.lengths) > len(set(seen.lengths)), "rows that are behind are processed by themselves"
