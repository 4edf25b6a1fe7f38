"""generate_many: every prompt's output is that of its own call, whoever shares the batch and whenever it joined."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specdec import attach, generate_many
from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter, always_drafting
from hf_specdec.many_prompts import Batch
from tests.method_table import METHODS, STEADY
from tests.targets import FAMILIES, HYBRIDS, STATEFUL, make_target, tiny_tokenizer

ALONE = ("specbranch", "specbound", "gated_lora", "ssd", "causal_lm_ssd", "eagle3_ssd")  # they share no batch


def prompts(count: int = 11, *, seed: int = 5, least: int = 1) -> list[dict[str, Any]]:
    """Of 1 to 11 tokens, with 1 to 19 new ones."""
    generator = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(least, most, (), generator=generator))

    return [
        {"input_ids": torch.randint(3, 60, (number(12),), generator=generator), "max_new_tokens": number(20)}
        for _ in range(count)
    ]


def alone(target: PreTrainedModel, prompt: dict[str, Any], **settings: Any) -> Tensor:
    """The prompt's own call, without drafts."""
    ids = prompt["input_ids"].unsqueeze(0)
    return target.generate(**{**prompt, "input_ids": ids, "attention_mask": torch.ones_like(ids)}, **settings)


def drafter_of(method: str, target: PreTrainedModel) -> Drafter:
    drafter = METHODS[method](target)
    return drafter.to(torch.float64) if isinstance(drafter, torch.nn.Module) else drafter


def assert_same(found: dict[int, Any], expected: list[Tensor]) -> None:
    assert sorted(found) == list(range(len(expected)))
    for index, output in enumerate(expected):
        torch.testing.assert_close(found[index], output, rtol=0, atol=0, msg=f"prompt {index}: {found[index]}")


@pytest.mark.parametrize("method", METHODS)
def test_every_prompt_gets_the_output_of_its_own_call(method: str) -> None:
    target, asked = make_target(), prompts(5 if method in ALONE else 11)
    with warnings.catch_warnings():
        if method in ALONE:
            warnings.filterwarnings("ignore", message="Prompt 0 and others like it cannot share a batch")
        found = dict(generate_many(target, asked, assistant_model=drafter_of(method, target), batch_size=3))
    assert_same(found, [alone(target, prompt) for prompt in asked])


class Pausing(DraftingPolicy):
    """Drafts in two rounds of seven: rows join, leave and end while their drafter reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0

    def choose(self, generator: TreeCandidateGenerator, context: DraftContext) -> DraftTree:
        self.rounds += 1
        return generator.draft(context) if self.rounds % 7 < 2 else DraftTree.root_only(context.root_ids)


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ALONE])
def test_rows_join_while_drafting_pauses(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked, pausing = make_target(), prompts(), Pausing()
    monkeypatch.setattr(Drafter, "drafting_policy", lambda *_: pausing)
    found = dict(generate_many(target, asked, assistant_model=drafter_of(method, target), batch_size=3))
    assert_same(found, [alone(target, prompt) for prompt in asked])


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_rows_of_every_kind_of_layer_join_and_leave(family: str) -> None:
    target, asked = make_target(family, (FAMILIES | HYBRIDS)[family][2][-1]), prompts()
    found = dict(generate_many(target, asked, assistant_model=drafter_of("ngram", target), batch_size=3))
    assert_same(found, [alone(target, prompt) for prompt in asked])


@pytest.mark.parametrize("family", ["llama", *STATEFUL])
def test_without_a_drafter_it_decodes_plainly_in_the_same_batch(family: str) -> None:
    target, asked = make_target(family), prompts(7)
    found = dict(generate_many(target, asked, batch_size=3))
    assert_same(found, [alone(target, prompt) for prompt in asked])


@pytest.mark.parametrize("method", [name for name in STEADY if name not in (*ALONE, "suffix")])
def test_a_row_drafts_as_well_as_in_its_own_call(method: str) -> None:
    # The state of a drafter is complete for rows that joined: the same drafts, and as many of them accepted.
    target, asked = make_target(), prompts()
    drafter = drafter_of(method, target)
    expected = []
    with always_drafting():
        for prompt in asked:
            alone(target, prompt, assistant_model=drafter)
            assert drafter.stats is not None
            expected += drafter.stats.per_step_accepted
        list(generate_many(target, asked, assistant_model=drafter, batch_size=3))
    assert drafter.stats is not None
    assert sorted(drafter.stats.per_step_accepted) == sorted(expected)


@pytest.mark.parametrize("method", ["causal_lm_tree", "dspark_chain", "eagle3", "ngram"])
def test_with_a_seed_a_prompt_has_the_same_tokens_in_any_company(method: str) -> None:
    target = make_target()
    drafter, other = drafter_of(method, target), drafter_of("ngram", target)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 40}
    asked = [{**prompt, "seed": 100 + index} for index, prompt in enumerate(prompts(9))]
    expected = []
    for prompt in asked:
        own = dict(prompt)
        torch.manual_seed(own.pop("seed"))
        with torch.random.fork_rng():
            expected.append(alone(target, own, assistant_model=other, **settings))  # it draws no drafts
    for batch_size in (1, 4):
        torch.manual_seed(batch_size)
        assert_same(
            dict(generate_many(target, asked, assistant_model=drafter, batch_size=batch_size, **settings)), expected
        )
    plainly = dict(generate_many(target, asked[::-1], batch_size=3, **settings))
    assert_same({8 - index: output for index, output in plainly.items()}, expected)


def test_prompts_have_settings_of_their_own() -> None:
    target, tokenizer = make_target(), tiny_tokenizer()
    ids = torch.tensor([5, 9, 11, 7])
    script = alone(target, {"input_ids": ids, "max_new_tokens": 16})[0, 4:]
    stop = tokenizer.decode(script[5:7])
    asked = [
        {"input_ids": ids, "max_new_tokens": 3},
        {"input_ids": ids, "stop_strings": stop, "tokenizer": tokenizer},
        {"input_ids": ids, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"input_ids": ids, "eos_token_id": int(script[3])},
        {"input_ids": ids},
    ]
    found = dict(
        generate_many(
            target, asked, assistant_model=drafter_of("causal_lm_tree", target), batch_size=4, max_new_tokens=16
        )
    )
    assert_same(found, [alone(target, {"max_new_tokens": 16, **prompt}) for prompt in asked])


class Counting(LogitsProcessor):
    """Forbids another token in every call, by their number: user code with state, which must see its own row only."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == 1
        self.calls += 1
        scores[:, scores[0].argmax() if self.calls % 3 == 0 else 3] = -torch.inf
        return scores


class RaisingAt(StoppingCriteria):
    """Fails at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **settings: Any) -> Any:
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("this row fails")
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Tokens(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class Leaving(Tokens):
    """A reader that goes away after some tokens."""

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.tokens) > 10:
            raise ConnectionError("the reader has left")


def test_code_of_the_user_with_state_sees_its_own_row() -> None:
    target, asked = make_target(), prompts(6)
    drafter = drafter_of("causal_lm_tree", target)
    found = dict(
        generate_many(
            target,
            [{**prompt, "logits_processor": LogitsProcessorList([Counting()])} for prompt in asked],
            assistant_model=drafter,
            batch_size=3,
        )
    )
    assert_same(found, [alone(target, prompt, logits_processor=LogitsProcessorList([Counting()])) for prompt in asked])


def test_an_error_ends_its_own_row_only() -> None:
    target, asked = make_target(), prompts(9)
    bad: dict[int, Any] = {
        1: {**asked[1], "max_new_tokens": 19, "stopping_criteria": [RaisingAt(len(asked[1]["input_ids"]) + 5)]},
        3: {"max_new_tokens": 4},
        4: [[3, 4], [5, 6]],
        5: {**asked[5], "max_new_tokens": 19, "streamer": Leaving()},
        7: {**asked[7], "num_beams": 2},
    }
    given = [bad.get(index, prompt) for index, prompt in enumerate(asked)]
    found = dict(generate_many(target, given, assistant_model=drafter_of("eagle3", target), batch_size=4))
    messages = {1: "this row fails", 3: "no input_ids", 4: r"shape \[2, 2\]", 5: "reader has left", 7: "num_beams=2"}
    for index, message in messages.items():
        with pytest.raises((ValueError, RuntimeError, ConnectionError), match=message):
            raise found.pop(index)
    rest = [prompt for index, prompt in enumerate(asked) if index not in bad]
    assert_same(dict(enumerate(found[index] for index in sorted(found))), [alone(target, prompt) for prompt in rest])


@pytest.mark.parametrize("method", ["causal_lm_tree", "ngram"])
def test_each_row_streams_its_own_tokens(method: str) -> None:
    target, asked = make_target(), [{**prompt, "streamer": Tokens()} for prompt in prompts(7)]
    for index, output in generate_many(target, asked, assistant_model=drafter_of(method, target), batch_size=3):
        streamer = asked[index]["streamer"]
        assert streamer.ended
        assert streamer.tokens == output[0].tolist()


def test_prompts_are_read_as_rows_become_free_and_closing_ends_all() -> None:
    target, read = make_target(), []

    def asked() -> Iterator[dict[str, Any]]:
        for index in range(100):
            read.append(index)
            yield {"input_ids": torch.tensor([5, 6, 7]), "max_new_tokens": 4 + index % 3}

    drafter = drafter_of("ngram", target)
    outputs = generate_many(target, asked(), assistant_model=drafter, batch_size=3)
    assert not read
    next(outputs)
    assert len(read) <= 4
    outputs.close()
    assert len(read) <= 4
    assert drafter.stats is not None
    assert drafter.stats.per_step_accepted
    assert not any(module._forward_hooks for module in target.modules())


def test_an_error_of_the_prompts_themselves_is_raised() -> None:
    def asked() -> Iterator[list[int]]:
        yield [5, 6]
        raise LookupError("no more prompts")

    outputs = generate_many(make_target(), asked(), max_new_tokens=4)
    with pytest.raises(LookupError, match="no more prompts"):
        list(outputs)


def test_memory_is_bounded_and_what_can_never_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target, most = make_target(), []
    join = TreeCache.join

    def watched(self: TreeCache, others: Any, places: Any) -> None:
        join(self, others, places)
        most.append(self.batch)

    monkeypatch.setattr(TreeCache, "join", watched)
    asked = [*prompts(6), {"input_ids": [5] * 40, "max_new_tokens": 60}]
    found = dict(generate_many(target, asked, batch_size=8, max_cache_tokens=64))
    with pytest.raises(ValueError, match="Prompt 6 has 40 tokens and may become 100 tokens long"):
        raise found.pop(6)
    assert_same(found, [alone(target, prompt) for prompt in asked[:6]])
    assert most
    assert max(most) <= 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"return_dict_in_generate": True}, "it returns a cache"),
        ({"num_return_sequences": 2, "do_sample": True}, "it has 2 rows"),
    ],
)
def test_what_cannot_share_a_batch_is_decoded_by_its_own_call(settings: dict[str, Any], reason: str) -> None:
    target, asked = make_target(), prompts(4)
    asked[1] |= settings | {"seed": 7}
    with pytest.warns(UserWarning, match=reason):
        found = dict(generate_many(target, asked, assistant_model=drafter_of("ngram", target), batch_size=3))
    other = found.pop(1)
    assert other["sequences"].shape[0] == 1 if "return_dict_in_generate" in settings else len(other) == 2
    rest = [prompt for index, prompt in enumerate(asked) if index != 1]
    assert_same(dict(enumerate(found[index] for index in sorted(found))), [alone(target, prompt) for prompt in rest])


def test_a_padded_prompt_is_decoded_by_its_own_call() -> None:
    target = make_target()
    ids, mask = torch.tensor([[0, 0, 5, 9]]), torch.tensor([[0, 0, 1, 1]])
    with pytest.warns(UserWarning, match="its prompt is padded"):
        ((_, output),) = generate_many(target, [{"input_ids": ids, "attention_mask": mask}], max_new_tokens=5)
    torch.testing.assert_close(output, target.generate(ids, attention_mask=mask, max_new_tokens=5), rtol=0, atol=0)


def test_a_text_too_long_for_the_draft_model_is_decoded_by_its_own_call() -> None:
    target = make_target()
    asked = [{"input_ids": [5, 6, 7], "max_new_tokens": 4}, {"input_ids": [5, 6, 7], "max_new_tokens": 130}]
    with pytest.warns(UserWarning, match="the draft model has 128 positions"):
        found = dict(generate_many(target, asked, assistant_model=drafter_of("causal_lm_tree", target)))
    assert [output.shape[1] for _, output in sorted(found.items())] == [7, 133]


def test_an_attached_drafter_is_used() -> None:
    target, asked = make_target(), prompts(5)
    drafter = drafter_of("ngram", target)
    with attach(target, drafter):
        found = dict(generate_many(target, asked, batch_size=3))
    assert drafter.stats is not None
    assert drafter.stats.num_spec_steps
    assert_same(found, [alone(target, prompt) for prompt in asked])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"batch_size": 0}, "batch_size=0"), ({"max_cache_tokens": 2.5}, "max_cache_tokens=2.5")],
)
def test_sizes_are_checked_before_the_first_prompt(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_many(make_target(), [], **settings)


def test_another_assistant_is_refused() -> None:
    with pytest.raises(TypeError, match="argument assistant_model of generate_many"):
        generate_many(make_target(), [], assistant_model="ngram")  # type: ignore[arg-type]


def test_nan_in_one_row_stays_there() -> None:
    # A row whose drafts make the target's logits NaN, as plain decoding never sees it, and its neighbours.
    target = make_target()
    asked = prompts(8, seed=9)
    table = target.get_input_embeddings().weight.data
    expected = [alone(target, prompt) for prompt in asked]
    used = {int(token) for output in expected for token in output.flatten()}
    unused = [token for token in range(len(table)) if token not in used]
    before = table.clone()
    try:
        if not unused:
            pytest.skip("the texts use all tokens")
        table[unused] = torch.nan
        drafter = drafter_of("medusa_static", target)
        assert_same(dict(generate_many(target, asked, assistant_model=drafter, batch_size=3)), expected)
    finally:
        table.copy_(before)


@pytest.mark.slow
def test_hundreds_of_random_arrivals_and_ends() -> None:
    target, asked = make_target(), prompts(200, seed=21)
    drafter = drafter_of("causal_lm_tree", target)
    expected = [alone(target, prompt) for prompt in asked]
    batch, generator, waiting = Batch(target, drafter, 7, None, {}), torch.Generator().manual_seed(4), list(range(200))
    found: dict[int, Any] = {}
    while waiting or batch.num_rows:  # as a server: prompts come at any time
        for _ in range(int(torch.randint(0, 4, (), generator=generator))):
            if waiting and batch.has_room:
                index = waiting.pop(0)
                batch.add(index, asked[index])
        batch.round()
        found |= {ended.key: ended.result for ended in batch.take_ended()}
    batch.close()
    assert_same(found, expected)
