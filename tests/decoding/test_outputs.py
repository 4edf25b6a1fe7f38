"""What `return_dict_in_generate` returns, and caches: handed back, passed in, continued; all as in plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.upstream import CACHE
from tests.method_table import METHODS, STEADY
from tests.scripted import StubDrafter, right_for
from tests.targets import PROMPTS, fresh_target, make_target
from tests.watched import unseen

NEW = 14
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
CACHE_FAMILIES = ["llama", "mistral-sliding", "qwen3-mixed", "gemma3", "gpt2", "gemma4"]
CACHE_FAMILIES += ["qwen3-next", "nemotron-h", "falcon-h1", "jamba", "lfm2"]


def drafter_for(script: Tensor) -> StubDrafter:
    """Rounds of several lengths; the second row's drafts stop being right early, so that rows diverge."""
    wrong = script.clone()
    if len(wrong) > 1:
        wrong[1, -6:] = 3
    return right_for([3, 0, 4, 1], wrong)


def assert_same_cache(ours: DynamicCache, theirs: DynamicCache, mask: Tensor | None = None) -> None:
    """Equal layer by layer; entries under left padding are compared too, they come from the same prefill."""
    assert type(ours) is type(theirs)
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert len(ours.layers) == len(theirs.layers)
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(own) is type(other)
        for name in ("conv_states", "recurrent_states"):  # computed in float32, whatever the model is in
            torch.testing.assert_close(getattr(own, name, {}), getattr(other, name, {}), rtol=1e-4, atol=1e-4)
        assert getattr(own, "has_previous_state", None) == getattr(other, "has_previous_state", None)
        if getattr(other, "keys", None) is not None:
            assert own.get_seq_length() == other.get_seq_length()
            torch.testing.assert_close(own.keys, other.keys, **tolerance(ours))
            torch.testing.assert_close(own.values, other.values, **tolerance(ours))


def tolerance(cache: DynamicCache) -> dict[str, float]:
    """What layers behind states may differ by."""
    keeps_states = any(hasattr(layer, "recurrent_states") for layer in cache.layers)
    return {"rtol": 1e-4, "atol": 1e-4} if keeps_states else {}


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize(
    "settings", [{}, {"repetition_penalty": 1.3}, {"do_sample": True, "top_k": 1, "temperature": 0.7}], ids=str
)
def test_scores_and_logits_are_those_of_plain_decoding(settings: dict[str, Any], batch: str) -> None:
    target, prompts = make_target("qwen3-mixed", "sdpa"), PROMPTS[batch]()
    settings = {**GREEDY, **settings, "output_scores": True, "output_logits": True}
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter_for(alone.sequences))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = getattr(assisted, name), getattr(alone, name)
        assert len(ours) == len(theirs) == NEW
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, other)


def test_scores_of_rows_are_right_up_to_their_end() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    script = target.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    eos = [int(script[0, 9 + 3]), int(script[1, 9 + 8])]
    settings = {**GREEDY, "output_scores": True, "eos_token_id": eos}
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter_for(script))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert len(assisted.scores) == len(alone.scores)
    for row, tokens in enumerate(alone.sequences[:, 9:].tolist()):
        ends = [step for step, token in enumerate(tokens) if token in eos] or [len(tokens) - 1]
        for step in range(ends[0] + 1):
            torch.testing.assert_close(assisted.scores[step][row], alone.scores[step][row])


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-sliding", "gpt-oss"])
def test_attentions_and_hidden_states_are_those_of_plain_decoding(family: str, batch: str) -> None:
    padded = batch != "batch of one"
    target = make_target(family, "eager", torch.float32 if padded else torch.float64)
    prompts = PROMPTS[batch]()
    settings = {**GREEDY, "output_attentions": True, "output_hidden_states": True}
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter_for(alone.sequences))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    tolerances = {"rtol": 1e-3, "atol": 2e-4} if padded else {"rtol": 1e-4, "atol": 1e-5}
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(assisted, name), getattr(alone, name)
        assert len(ours) == len(theirs) == NEW
        for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            assert len(own) == len(other)
            for layer, (state, expected) in enumerate(zip(own, other, strict=True)):
                where = f"{name}, token {step}, layer {layer}"
                assert state.shape == expected.shape, where
                assert torch.allclose(state, expected, **tolerances), where


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", CACHE_FAMILIES)
@pytest.mark.parametrize("new", [1, 2, NEW])
def test_returned_cache_equals_that_of_plain_decoding(family: str, new: int, batch: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS[batch]()
    settings = {**GREEDY, "max_new_tokens": new}
    alone = target.generate(**prompts, **settings)
    script = target.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter_for(script))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert_same_cache(assisted[CACHE], alone[CACHE])


@pytest.mark.parametrize("family", CACHE_FAMILIES)
def test_returned_cache_contains_the_padding_of_rows_that_ended_early(family: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS["ragged batch of three"]()
    script = target.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    settings = {**GREEDY, "eos_token_id": [int(script[0, 9 + 2]), int(script[1, 9 + 7])]}
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter_for(script))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert_same_cache(assisted[CACHE], alone[CACHE])


def extended(prompts: dict[str, Tensor], sequences: Tensor, new: int = 5) -> dict[str, Tensor]:
    """The next turn: all tokens so far and a few more."""
    more = torch.randint(3, 60, (len(sequences), new), generator=torch.Generator().manual_seed(5))
    ids = torch.cat([sequences, more], dim=1)
    added = ids.shape[1] - prompts["attention_mask"].shape[1]
    mask = torch.cat([prompts["attention_mask"], torch.ones(len(ids), added, dtype=torch.int64)], dim=1)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", [name for name in CACHE_FAMILIES if name != "jamba"])  # its own turns start anew
def test_plain_and_speculative_turns_continue_each_others_cache(family: str, batch: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS[batch]()
    first = target.generate(**prompts, **GREEDY)
    turn = extended(prompts, first.sequences)
    expected = target.generate(**turn, **GREEDY)

    spoken = target.generate(**prompts, **GREEDY, assistant_model=drafter_for(first.sequences))
    plain_after = target.generate(**turn, **GREEDY, **{CACHE: spoken[CACHE]})
    assert plain_after.sequences.tolist() == expected.sequences.tolist()

    again = target.generate(**prompts, **GREEDY)
    ours_after = target.generate(
        **turn, **GREEDY, **{CACHE: again[CACHE]}, assistant_model=drafter_for(expected.sequences)
    )
    assert ours_after.sequences.tolist() == expected.sequences.tolist()
    assert ours_after[CACHE].get_seq_length() == ours_after.sequences.shape[1] - 1


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", CACHE_FAMILIES)
def test_cache_passed_in_is_the_cache_returned(family: str, batch: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS[batch]()
    own_plain, own_ours = DynamicCache(config=target.config), DynamicCache(config=target.config)
    alone = target.generate(**prompts, **GREEDY, **{CACHE: own_plain})
    assisted = target.generate(**prompts, **GREEDY, **{CACHE: own_ours}, assistant_model=drafter_for(alone.sequences))
    assert assisted[CACHE] is own_ours
    assert_same_cache(own_ours, own_plain)


def test_cache_passed_in_is_filled_without_return_dict_too() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    settings = {**GREEDY, "return_dict_in_generate": False}
    own_plain, own_ours = DynamicCache(), DynamicCache()  # without a config: layers are added as they are used
    alone = target.generate(**prompts, **settings, **{CACHE: own_plain})
    target.generate(**prompts, **settings, **{CACHE: own_ours}, assistant_model=drafter_for(alone))
    assert_same_cache(own_ours, own_plain)


@pytest.mark.parametrize("batch", PROMPTS)
def test_cache_of_a_prefix_may_come_with_only_the_new_tokens(batch: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    kept = 6

    def prefix() -> DynamicCache:
        cache = DynamicCache()
        mask = prompts["attention_mask"][:, :kept]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            target(prompts["input_ids"][:, :kept], attention_mask=mask, position_ids=positions, **{CACHE: cache})
        return cache

    new = {"input_ids": prompts["input_ids"][:, kept:], "attention_mask": prompts["attention_mask"]}
    alone = target.generate(**new, **GREEDY, **{CACHE: prefix()})
    for drafter in (drafter_for(alone.sequences), METHODS["ddtree"](target)):
        assisted = target.generate(**new, **GREEDY, **{CACHE: prefix()}, assistant_model=drafter)
        assert assisted.sequences.tolist() == alone.sequences.tolist()
        assert_same_cache(assisted[CACHE], alone[CACHE])


@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", [*METHODS, "scripted"])
def test_chunked_prefill_changes_no_token(method: str, batch: str, chunk: int) -> None:
    target, prompts = make_target("qwen3-mixed", "sdpa"), PROMPTS[batch]()
    settings = {**GREEDY, "return_dict_in_generate": False, "prefill_chunk_size": chunk}
    alone = target.generate(**prompts, **{**settings, "prefill_chunk_size": None})
    drafter = drafter_for(alone) if method == "scripted" else METHODS[method](target)
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()


@pytest.mark.parametrize("method", STEADY)
def test_features_of_a_chunked_prefill_draft_the_same(method: str) -> None:
    target, prompts = make_target("qwen3-mixed", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    if isinstance(drafter, torch.nn.Module):
        drafter.to(torch.float64)
    drafts = []
    for chunk in (None, 4):
        drafter.forget()
        target.generate(**prompts, **GREEDY, prefill_chunk_size=chunk, assistant_model=drafter)
        drafts.append((drafter.stats.per_step_accepted, drafter.stats.num_draft_tokens))
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "mistral-sliding"])
def test_attentions_of_a_chunked_prefill_leave_out_what_windows_have_dropped(family: str, chunk: int) -> None:
    target, prompts = make_target(family, "eager"), PROMPTS["batch of one"]()
    settings = {**GREEDY, "output_attentions": True, "prefill_chunk_size": chunk}
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter_for(alone.sequences))
    for ours, plain in zip(assisted.attentions[0], alone.attentions[0], strict=True):
        assert torch.allclose(ours, plain, atol=1e-5)  # eager attention has float32 inside
        assert ours.shape == plain.shape


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", [*METHODS, "scripted"])
def test_prompt_may_be_given_as_embeddings(method: str, batch: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    inputs = {
        "inputs_embeds": target.get_input_embeddings()(prompts["input_ids"]).detach(),
        "attention_mask": prompts["attention_mask"],
    }
    settings = {**GREEDY, "return_dict_in_generate": False}
    alone = target.generate(**inputs, **settings)
    assert alone.shape[1] == NEW  # new tokens only
    drafter = drafter_for(alone) if method == "scripted" else METHODS[method](target)
    assert target.generate(**inputs, **settings, assistant_model=drafter).tolist() == alone.tolist()


def test_statistics_come_with_the_output() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = METHODS["ddtree"](target)
    output = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert isinstance(output.speculation, SpeculationStats)
    assert output.speculation is drafter.stats
    assert output.speculation.method == "ddtree"
    assert "mean acceptance length" in str(drafter.stats)
    assert set(output.keys()) == {"sequences", CACHE, "speculation"}


def test_right_padding_and_gaps_in_the_mask_change_no_token() -> None:
    # Unusual, but plain decoding takes it.
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    prompts["attention_mask"][0, 4] = 0
    settings = {**GREEDY, "return_dict_in_generate": False}
    alone = target.generate(**prompts, **settings)
    assert target.generate(**prompts, **settings, assistant_model=drafter_for(alone)).tolist() == alone.tolist()


def test_position_ids_given_by_the_caller_are_kept() -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    prompts["position_ids"] = torch.arange(9)[None] + 17
    settings = {**GREEDY, "return_dict_in_generate": False}
    alone = target.generate(**prompts, **settings)
    assert target.generate(**prompts, **settings, assistant_model=drafter_for(alone)).tolist() == alone.tolist()


def forwards_of(target: PreTrainedModel) -> tuple[list[tuple[int, int]], Any]:
    """The list of (tokens, logits) per row that hooks of `target` fill, and the hook."""
    seen: list[tuple[int, int]] = []

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.append((kwargs["input_ids"].shape[1], output.logits.shape[1]))

    return seen, target.register_forward_hook(unseen(note), with_kwargs=True)


@pytest.mark.parametrize("sees", ["nothing", "own cache", "output"])
def test_the_cache_is_completed_only_for_callers_who_see_it(sees: str) -> None:
    target, inputs = fresh_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    alone = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    ends = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [int(alone[0, 12])]}
    alone = target.generate(**inputs, **ends)
    drafter = right_for(1, alone, siblings=0)
    settings: dict[str, Any] = {"output": {"return_dict_in_generate": True}}.get(sees, {})
    if sees == "own cache":
        settings[CACHE] = DynamicCache(config=target.config)
    seen, hook = forwards_of(target)
    assisted = target.generate(**inputs, **ends, **settings, assistant_model=drafter)
    hook.remove()
    assert (assisted if isinstance(assisted, Tensor) else assisted.sequences).tolist() == alone.tolist()
    rounds = drafter.stats.num_target_forwards
    assert len(seen) == 1 + rounds + (sees != "nothing")
    if sees != "nothing":
        tokens, logits = seen[-1]
        assert tokens > 4
        assert logits == 1
