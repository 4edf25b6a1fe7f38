"""Where a run ends and what is heard of it on the way: stopping criteria, streamers, stateful processors."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tests.method_table import METHODS
from tests.scripted import right_for
from tests.targets import PAD, PROMPTS, make_target, tiny_tokenizer

NEW = 20
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa")


def script_of(target: PreTrainedModel, prompts: dict[str, Tensor]) -> Tensor:
    return target.generate(**prompts, max_new_tokens=NEW + 12, do_sample=False)


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("at", range(1, 9))
def test_end_of_text_inside_an_accepted_path_ends_the_row_there(target: PreTrainedModel, at: int, batch: str) -> None:
    prompts = PROMPTS[batch]()
    script = script_of(target, prompts)
    eos = int(script[0, prompts["input_ids"].shape[1] + at - 1])
    settings = {**GREEDY, "eos_token_id": eos}
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=right_for(6, script))
    assert assisted.tolist() == alone.tolist()


def test_rows_that_end_at_different_lengths_are_padded(target: PreTrainedModel) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    script = script_of(target, prompts)
    settings = {**GREEDY, "eos_token_id": [int(script[row, 9 + at]) for row, at in enumerate((1, 7, 13))]}
    alone = target.generate(**prompts, **settings)
    for num_right in range(7):
        assisted = target.generate(**prompts, **settings, assistant_model=right_for(num_right, script))
        assert assisted.tolist() == alone.tolist()
    assert (alone == PAD).any()


class Counted(StoppingCriteria):
    """Never stops a row; counts its calls, which change no answer."""

    keeps_no_state = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_rows_of_one_length_share_the_calls_of_a_criterion(target: PreTrainedModel) -> None:
    prompts = {name: each.repeat(3, 1) for name, each in PROMPTS["batch of one"]().items()}
    criterion, script = Counted(), script_of(target, prompts)
    settings = {**GREEDY, "stopping_criteria": StoppingCriteriaList([criterion])}
    alone = target.generate(**prompts, **settings)
    calls, criterion.calls = criterion.calls, 0
    drafter = right_for(2, script)
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_accepted_draft_tokens > 0
    assert criterion.calls == calls == NEW


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("new", range(1, 10))
def test_length_limit_inside_an_accepted_path_is_kept(target: PreTrainedModel, new: int, batch: str) -> None:
    prompts = PROMPTS[batch]()
    script = script_of(target, prompts)
    length = prompts["input_ids"].shape[1]
    for limit in ({"max_new_tokens": new}, {"max_length": length + new}):
        assisted = target.generate(**prompts, **limit, do_sample=False, assistant_model=right_for(6, script))
        assert assisted.tolist() == script[:, : length + new].tolist()


def test_one_new_token_needs_no_draft(target: PreTrainedModel) -> None:
    prompts = PROMPTS["batch of one"]()
    drafter = right_for(3, script_of(target, prompts))
    target.generate(**prompts, max_new_tokens=1, do_sample=False, assistant_model=drafter)
    assert drafter.trees == []
    assert drafter.stats.num_spec_steps == 0
    assert drafter.stats.mean_acceptance_length == 0.0


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("eos", [None, "third token"])
def test_stop_strings_end_rows_at_the_right_token(target: PreTrainedModel, eos: str | None, batch: str) -> None:
    prompts = PROMPTS[batch]()
    script = script_of(target, prompts)
    text = [tiny_tokenizer().decode(row[9:]) for row in script]
    settings = {
        **GREEDY,
        "stop_strings": [text[0][9:12], text[-1][15:17]],
        "tokenizer": tiny_tokenizer(),
        # With an end of text finished rows are padded, without one they go on until the last has finished.
        "eos_token_id": None if eos is None else int(script[-1, 9 + 2]),
    }
    alone = target.generate(**prompts, **settings)
    assert alone.shape[1] < 9 + NEW or eos is None
    for num_right in (0, 3, 6):
        assisted = target.generate(**prompts, **settings, assistant_model=right_for(num_right, script))
        assert assisted.tolist() == alone.tolist()


class StopsRowAt(StoppingCriteria):
    """Stops each row at a length of its own, and notes the lengths it was asked about."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.asked: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked.append(input_ids.shape[1])
        return input_ids.shape[1] >= self.lengths


@pytest.mark.parametrize("stops", [(12, 15, 19), (19, 12, 15), (13, 13, 28), (10, 10, 10)])
@pytest.mark.parametrize("with_eos", [False, True])
def test_custom_criteria_stop_each_row_where_plain_decoding_stops_it(
    target: PreTrainedModel, with_eos: bool, stops: tuple[int, ...]
) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    script = script_of(target, prompts)
    settings = {**GREEDY, "eos_token_id": 2 if with_eos else None}
    alone = target.generate(**prompts, **settings, stopping_criteria=StoppingCriteriaList([StopsRowAt(*stops)]))
    for drafter in (right_for(0, script), right_for(2, script), right_for([5, 0, 3], script)):
        criteria = StoppingCriteriaList([StopsRowAt(*stops)])
        assisted = target.generate(**prompts, **settings, stopping_criteria=criteria, assistant_model=drafter)
        assert assisted.tolist() == alone.tolist()


class Listens(StoppingCriteria):
    """Keeps a copy of all it is told, and stops after `limit` calls."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.heard: list[tuple[list[list[int]], int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.heard.append((input_ids.tolist(), 0 if scores is None else len(scores)))
        return torch.full((len(input_ids),), len(self.heard) >= self.limit)


@pytest.mark.parametrize("output_scores", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "scripted"])
def test_stateful_criterion_with_one_row_gets_the_calls_of_plain_decoding(
    target: PreTrainedModel, method: str, output_scores: bool
) -> None:
    prompts = PROMPTS["batch of one"]()
    settings = {**GREEDY, "return_dict_in_generate": True, "output_scores": output_scores}
    plain, ours = Listens(limit=11), Listens(limit=11)
    alone = target.generate(**prompts, **settings, stopping_criteria=StoppingCriteriaList([plain]))
    script = script_of(target, prompts)
    drafter = right_for([4, 1, 6], script) if method == "scripted" else METHODS[method](target)
    assisted = target.generate(
        **prompts, **settings, stopping_criteria=StoppingCriteriaList([ours]), assistant_model=drafter
    )
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert ours.heard == plain.heard


class PenalisesByCount(LogitsProcessor):
    """Depends on how often it was called: exact only if it is called as plain decoding calls it."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, (7 * len(self.seen)) % scores.shape[1]] += 3.0
        scores[:, input_ids[0, -1]] -= 5.0
        return scores


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_stateful_processor_with_one_row_gets_the_calls_of_plain_decoding(
    target: PreTrainedModel, num_right: int
) -> None:
    prompts = PROMPTS["batch of one"]()
    plain, ours = PenalisesByCount(), PenalisesByCount()
    alone = target.generate(**prompts, **GREEDY, logits_processor=LogitsProcessorList([plain]))
    drafter = right_for(num_right, alone)
    assisted = target.generate(
        **prompts, **GREEDY, logits_processor=LogitsProcessorList([ours]), assistant_model=drafter
    )
    assert assisted.tolist() == alone.tolist()
    assert ours.seen == plain.seen


def test_processor_that_refuses_another_batch_size_sees_the_whole_batch(target: PreTrainedModel) -> None:
    class WantsThree(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            assert len(input_ids) == len(scores) == 3
            return scores - scores.gather(1, input_ids[:, -1:]).abs()

    prompts = PROMPTS["ragged batch of three"]()
    processors = LogitsProcessorList([WantsThree()])
    alone = target.generate(**prompts, **GREEDY, logits_processor=processors)
    wrong = alone.clone()
    wrong[1, 14:] = 3
    for drafter in (right_for([4, 0, 2], alone), right_for(3, wrong)):
        assisted = target.generate(**prompts, **GREEDY, logits_processor=processors, assistant_model=drafter)
        assert assisted.tolist() == alone.tolist()


def test_processor_that_writes_in_place_changes_no_token(target: PreTrainedModel) -> None:
    class WritesInPlace(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, input_ids[:, -1] % 7] = -torch.inf
            return scores

    prompts = PROMPTS["batch of one"]()
    processors = LogitsProcessorList([WritesInPlace()])
    alone = target.generate(**prompts, **GREEDY, logits_processor=processors)
    drafter = right_for([4, 0, 2], alone)
    assisted = target.generate(**prompts, **GREEDY, logits_processor=processors, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()


def test_time_limit_ends_the_run_at_a_prefix_of_plain_decoding(target: PreTrainedModel) -> None:
    prompts = PROMPTS["batch of one"]()
    script = script_of(target, prompts)

    def slow(context: Any) -> Any:
        time.sleep(0.05)
        return inner.draft(context)

    inner = right_for(2, script)
    drafter = right_for(2, script)
    drafter.draft = slow
    output = target.generate(**prompts, **GREEDY, max_time=0.02, assistant_model=drafter)
    assert 9 < output.shape[1] < 9 + NEW
    assert output.tolist() == script[:, : output.shape[1]].tolist()


class Recorder(BaseStreamer):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("method", [*METHODS, "scripted"])
def test_streamer_gets_the_prompt_then_each_token_then_the_end(target: PreTrainedModel, method: str) -> None:
    prompts = PROMPTS["batch of one"]()
    script = script_of(target, prompts)
    settings = {**GREEDY, "eos_token_id": int(script[0, 9 + 12])}
    plain, ours = Recorder(), Recorder()
    target.generate(**prompts, **settings, streamer=plain)
    drafter = right_for(4, script) if method == "scripted" else METHODS[method](target)
    target.generate(**prompts, **settings, streamer=ours, assistant_model=drafter)
    assert ours.calls == plain.calls


@pytest.mark.parametrize("with_eos", [False, True])
def test_streamer_of_a_batch_gets_whole_columns_in_order(target: PreTrainedModel, with_eos: bool) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    script = script_of(target, prompts)
    eos = [int(script[0, 9 + 4]), int(script[1, 9 + 9])] if with_eos else None
    wrong = script.clone()
    wrong[1, 12:] = 3
    stops = StoppingCriteriaList([StopsRowAt(14, 22, 17)])
    plain, ours = Recorder(), Recorder()
    target.generate(**prompts, **GREEDY, eos_token_id=eos, stopping_criteria=stops, streamer=plain)
    target.generate(
        **prompts, **GREEDY, eos_token_id=eos, stopping_criteria=stops, streamer=ours,
        assistant_model=right_for([5, 1], wrong),
    )  # fmt: skip
    assert ours.calls == plain.calls


def test_streamer_gets_tokens_before_the_run_ends(target: PreTrainedModel) -> None:
    prompts = PROMPTS["batch of one"]()
    script = script_of(target, prompts)
    recorder, heard = Recorder(), []
    inner = right_for(2, script)
    drafter = right_for(2, script)

    def watching(context: Any) -> Any:
        heard.append(len(recorder.calls))
        return inner.draft(context)

    drafter.draft = watching
    target.generate(**prompts, **GREEDY, streamer=recorder, assistant_model=drafter)
    # The prompt and the first token before the first round, three more per round after it.
    assert heard == [2 + 3 * index for index in range(len(heard))]


def test_a_round_is_counted_before_its_tokens_are_streamed(target: PreTrainedModel) -> None:
    prompts = PROMPTS["batch of one"]()
    drafter = right_for([3, 0, 1], script_of(target, prompts))
    counted: list[list[int]] = []

    class Counts(BaseStreamer):
        def put(self, value: Tensor) -> None:
            counted.append(list(drafter.stats.per_step_accepted[0]) if drafter.stats else [])

        def end(self) -> None:
            pass

    target.generate(**prompts, **GREEDY, streamer=Counts(), assistant_model=drafter)
    # The prompt, the first token, then drafted tokens and a bonus token of each round.
    assert counted[2:10] == [[3]] * 4 + [[3, 0]] + [[3, 0, 1]] * 2 + [[3, 0, 1, 3]]


@pytest.mark.parametrize("method", METHODS)
def test_several_sequences_per_prompt_are_returned(target: PreTrainedModel, method: str) -> None:
    prompts = PROMPTS["ragged batch of three"]()
    output = target.generate(
        **prompts, do_sample=True, max_new_tokens=8, num_return_sequences=3, assistant_model=METHODS[method](target)
    )
    assert output.shape == (9, 17)
    assert output[:, :9].tolist() == prompts["input_ids"].repeat_interleave(3, 0).tolist()
    assert len({tuple(row) for row in output.tolist()}) > 3
