"""Targets with pictures: draft trees give the tokens of plain decoding, positions of several axes included."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from hf_specdec import verify_lossless
from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.methods.lookup import NGramDrafter
from tests.chains import assisted_loop
from tests.method_table import METHODS
from tests.multimodal import prompt, tiny_model
from tests.scripted import random_trees, right_for
from tests.targets import IN_OLDEST, make_target
from tests.watched import unseen

NEW = 16
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
AXES = ["glm46v", "glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"]
PICTURES = {"text": [None], "picture": [0], "padded batch": [1, None, 0], "pictures of two sizes": [0, 1]}


@pytest.mark.parametrize("right", [0, 3, [2, 0, 5, 1]], ids=str)
@pytest.mark.parametrize("pictures", PICTURES)
@pytest.mark.parametrize("family", [*AXES, "llava"])
def test_trees_give_the_tokens_of_plain_decoding(family: str, pictures: str, right: Any) -> None:
    target = tiny_model(family)
    inputs = prompt(target, PICTURES[pictures])
    alone = target.generate(**inputs, **GREEDY)
    drafter = right_for(right, alone)
    assert target.generate(**inputs, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert (drafter.stats.num_accepted_draft_tokens > 0) == (right != 0)


def test_the_axes_of_a_prompt_with_a_picture_differ() -> None:
    """Or else the other tests could not fail."""
    for family in AXES:
        target = tiny_model(family)
        target.generate(**prompt(target, [1, None]), **GREEDY)
        first, second = target.model.rope_deltas.flatten().tolist()
        assert first != second


def in_turns(target: PreTrainedModel, drafters: list[Any]) -> list[torch.Tensor]:
    """The texts of turns on one cache, the first with a picture."""
    cache, texts = DynamicCache(config=target.config), []
    for drafter in drafters:
        said = prompt(target, [None if texts else 0])
        if texts:
            said["input_ids"] = torch.cat([texts[-1], said["input_ids"]], 1)
            said["attention_mask"] = torch.ones_like(said["input_ids"])
        texts.append(target.generate(**said, **{CACHE: cache}, assistant_model=drafter, **GREEDY))
    return texts


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_turns_on_one_cache_give_the_tokens_of_plain_decoding(family: str, chains: bool) -> None:
    target = tiny_model(family)
    alone = in_turns(target, [None] * 3)
    drafters = [right_for(3, text, siblings=0) for text in alone]
    if chains:
        with assisted_loop(), pytest.warns(UserWarning, match="own loop verifies"):
            assisted = in_turns(target, drafters)
    else:
        assisted = in_turns(target, drafters)
    assert [text.tolist() for text in assisted] == [text.tolist() for text in alone]
    assert all(drafter.stats.num_accepted_draft_tokens > 0 for drafter in drafters)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_rows_keep_their_positions_when_others_leave(family: str) -> None:
    target = tiny_model(family)
    inputs = prompt(target, [1, None, 0, 2], lengths=(9, 4, 7, 5))
    alone = target.generate(**inputs, **GREEDY)
    start = inputs["input_ids"].shape[1]
    ends = {**GREEDY, "eos_token_id": [int(alone[0, start + 2]), int(alone[2, start + 4])]}
    alone = target.generate(**inputs, **ends)
    assert 0 in alone[0, start:].tolist(), "a row ends early"
    rows: list[int] = []
    hook = target.register_forward_pre_hook(
        unseen(lambda _, args, kwargs: rows.append(len(kwargs["input_ids"]))), with_kwargs=True
    )
    assert target.generate(**inputs, **ends, assistant_model=NGramDrafter()).tolist() == alone.tolist()
    hook.remove()
    assert rows[-1] < max(rows)


@pytest.mark.skipif(IN_OLDEST, reason="plain decoding of this transformers fails after the first chunk")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_prompts_in_chunks_give_the_tokens_of_plain_decoding(family: str) -> None:
    target = tiny_model(family)
    for pictures in ([None], [None, None]):
        inputs = prompt(target, pictures)
        alone = target.generate(**inputs, **GREEDY, prefill_chunk_size=4)
        drafter = right_for(3, alone)
        assisted = target.generate(**inputs, **GREEDY, prefill_chunk_size=4, assistant_model=drafter)
        assert assisted.tolist() == alone.tolist()
        assert drafter.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("right", [0, 3, [2, 0, 5, 1]], ids=str)
def test_tensors_of_every_step_without_effect_do_not_hinder_trees(right: Any) -> None:
    """Qwen2-Audio gets the mask of the sound at every step, and ignores it after the prompt."""
    target = tiny_model("qwen2_audio")
    for sounds in ([0], [1, None, 0]):
        inputs = prompt(target, sounds)
        alone = target.generate(**inputs, **GREEDY)
        drafter = right_for(right, alone)
        assert target.generate(**inputs, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        assert (drafter.stats.num_accepted_draft_tokens > 0) == (right != 0)


@pytest.mark.parametrize("pictures", [[0], [0, 1]], ids=str)
@pytest.mark.parametrize("family", ["idefics", "kosmos-2", "git"])
def test_families_that_trees_cannot_serve_equal_plain_decoding(family: str, pictures: list[int]) -> None:
    target = tiny_model(family, torch.float32)  # Kosmos-2 does not run in float64
    inputs = prompt(target, pictures)
    alone = target.generate(**inputs, **GREEDY)
    for right in (0, 3, [2, 0, 5, 1]):
        drafter = right_for(right, alone, siblings=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert target.generate(**inputs, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        said = [text for each in caught if re.search("In this call|decodes it plainly", text := str(each.message))]
        assert bool(said) == (family != "git" or len(pictures) > 1 or IN_OLDEST), "drafted, or said why not"


def two_classes(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The image-text class and the text class of the same weights."""
    both = tiny_model(family)
    name = {"gemma3": "Gemma3ForCausalLM", "llava": "LlamaForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM"}[family]
    text = getattr(transformers, name)._from_config(both.config.get_text_config(), dtype=both.dtype).eval()
    text.model.load_state_dict(both.model.language_model.state_dict())
    text.lm_head.load_state_dict(both.lm_head.state_dict())
    text.generation_config.update(pad_token_id=0, eos_token_id=None, bos_token_id=None)
    return both, text


@pytest.mark.parametrize(
    "method", ["dflash", "dspark", "eagle3", "medusa", "specblock", "specbound", "causal_lm_chain"]
)
@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen3_5"])
def test_a_drafter_serves_both_classes_of_the_same_weights(family: str, method: str) -> None:
    if (family, method) == ("qwen3_5", "specbound"):
        pytest.skip("its layers do not run in slices")
    both, text = two_classes(family)
    drafter = METHODS[method](text)
    if isinstance(drafter, torch.nn.Module):
        drafter = drafter.to(torch.float64)
    inputs = prompt(text, [None])
    assert text.generate(**inputs, **GREEDY).equal(both.generate(**inputs, **GREEDY))
    drafted = []
    for target in (text, both):
        alone = target.generate(**inputs, **GREEDY)
        assert target.generate(**inputs, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        drafted.append(drafter.stats.per_step_accepted)
    assert drafted[0] == drafted[1], "the same drafts, from the same features"
    inputs = prompt(both, [0])
    alone = both.generate(**inputs, **GREEDY)
    assert both.generate(**inputs, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens > 0


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_the_pair_is_checked_for_image_text_classes_too(family: str) -> None:
    both, text = two_classes(family)
    drafter = METHODS["dflash"](make_target("llama", "sdpa", hidden_size=64))
    for target in (both, text):
        with pytest.raises(ValueError, match="hidden"):
            target.generate(**prompt(text, [None]), **GREEDY, assistant_model=drafter)


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2_5_vl", "qwen3_5"])
def test_verify_lossless_takes_prompts_with_pictures(family: str) -> None:
    target = tiny_model(family)
    prompts = [prompt(target, [0]), prompt(target, [1]), prompt(target, [None])["input_ids"]]
    script = target.generate(**prompts[0], **GREEDY)
    drafter = random_trees(script, share=0.3)
    report = verify_lossless(target, drafter, prompts, max_new_tokens=12, verbose=False)
    assert report.lossless, str(report)
    assert report.num_prompts == 3
    assert report.replays
    assert not report.left_out


def test_verify_lossless_finds_positions_that_are_wrong_with_a_picture_only() -> None:
    target = tiny_model("qwen2_5_vl")
    inputs = prompt(target, [0])

    def shifted(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """As if rounds took the positions of a text without pictures."""
        position_ids, cache = kwargs.get("position_ids"), kwargs.get(CACHE)
        if position_ids is not None and isinstance(cache, TreeCache) and cache.get_seq_length():
            kwargs["position_ids"] = position_ids[:1].expand_as(position_ids)
        return args, kwargs

    hook = target.register_forward_pre_hook(shifted, with_kwargs=True)
    script = target.generate(**inputs, **GREEDY)
    report = verify_lossless(target, right_for(2, script), [inputs], max_new_tokens=12, verbose=False)
    hook.remove()
    assert not report.lossless, str(report)
    assert not report.verified
    assert all(math.isfinite(each.gap) and not each.is_near_tie for each in report.differences.values())
