"""What bad input gets: an error before the first token that names the values and the way out."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache

from hf_specdec.decoding.upstream import CACHE
from hf_specdec.methods.dflash.network import DFlashConfig, DFlashDrafter
from tests.method_table import METHODS, make_ddtree, make_dflash
from tests.scripted import fixed_tree
from tests.targets import PROMPTS, fresh_target, make_target
from tests.watched import unseen

GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa")


def assert_refused(target: Any, match: str, drafter: Any = None, **settings: Any) -> None:
    drafter = drafter or fixed_tree([5], [0])
    forwards: list[Any] = []
    handle = target.register_forward_hook(unseen(lambda *args: forwards.append(args)))
    try:
        with pytest.raises(ValueError, match=match):
            target.generate(**{**PROMPTS["batch of one"](), **GREEDY, **settings}, assistant_model=drafter)
    finally:
        handle.remove()
    assert not forwards, "refused only after the target had run"


def assert_chained(target: Any, match: str, prompts: dict[str, Any] | None = None, **settings: Any) -> None:
    """Trees cannot be verified here, for a reason that is told, so that chains are."""
    call = {**(prompts or PROMPTS["batch of one"]()), **GREEDY}
    alone = target.generate(**call, **{name: copy.deepcopy(value) for name, value in settings.items()})
    with pytest.warns(UserWarning, match=f"{match}.*'stub' drafts chains, which transformers' own loop verifies"):
        assisted = target.generate(**call, **settings, assistant_model=fixed_tree([5], [0]))
    assert assisted.tolist() == alone.tolist()


def assert_plain(target: Any, match: str) -> None:
    """Nothing can be verified here, for a reason that is told."""
    call = {**PROMPTS["batch of one"](), **GREEDY}
    alone = target.generate(**call)
    with pytest.warns(UserWarning, match=f"{match}.*Nothing is drafted in this call"):
        assert target.generate(**call, assistant_model=fixed_tree([5], [0])).tolist() == alone.tolist()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_beams": 2}, r"'beam_search' decoding \(num_beams=2\); draft trees need .* num_beams=1"),
        ({"num_beams": 2, "do_sample": True}, r"'beam_sample' decoding \(num_beams=2\)"),
        ({"use_cache": False}, r"use_cache=False was passed; leave it out"),
        ({"cache_implementation": "static"}, r"cache_implementation='static' does not support .* leave it out"),
        ({"cache_implementation": "quantized"}, r"cache_implementation='quantized' does not support draft trees"),
        ({"cache_implementation": "offloaded"}, r"cache_implementation='offloaded' does not support draft trees"),
        ({"assistant_ensemble_weight": 0.3}, r"assistant_ensemble_weight=0\.3 .* lossless only\. Leave it out"),
        ({"dola_layers": "low"}, r"dola_layers='low' replaces the target's logits.*Leave it out"),
        ({"synced_gpus": True}, r"synced_gpus=True .* without assistant_model"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(target: PreTrainedModel, settings: dict[str, Any], match: str) -> None:
    if "assistant_ensemble_weight" in settings and not hasattr(target.generation_config, "assistant_ensemble_weight"):
        pytest.skip("this transformers has no assistant_ensemble_weight")
    assert_refused(target, match, **settings)


def test_static_cache_object_is_refused(target: PreTrainedModel) -> None:
    target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=fixed_tree([5], [0]))  # the model's trials
    cache = StaticCache(config=target.config, max_cache_len=64)
    assert_refused(target, rf"{CACHE} is a StaticCache .*Pass a DynamicCache", **{CACHE: cache})


def test_an_offloaded_cache_object_is_left_to_the_assisted_loop(target: PreTrainedModel) -> None:
    cache = DynamicCache(config=target.config, offloading=False)
    cache.offloading = True
    cache.only_non_sliding, cache.prefetch_stream = False, None
    drafter = fixed_tree([5], [0])
    with (
        pytest.warns(UserWarning, match="a DynamicCache with offloading.*'stub' drafts chains"),
        contextlib.suppress(AssertionError, RuntimeError),  # there is no device to be offloaded from
    ):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter, **{CACHE: cache})


def test_quantized_cache_object_is_refused(target: PreTrainedModel) -> None:
    cache = QuantizedCache.__new__(QuantizedCache)
    cache.layers, cache.offloading, cache.layer_class_to_replicate = [], False, None
    assert_refused(target, rf"{CACHE} is a QuantizedCache", **{CACHE: cache})


@pytest.mark.parametrize("method", ["ngram", "dflash"])
def test_an_encoder_decoder_with_a_generate_of_its_own_is_refused(method: str) -> None:
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=8,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    drafter = METHODS[method](make_target("llama", "sdpa"))
    with pytest.raises(ValueError, match=r"WhisperForConditionalGeneration is an encoder-decoder; .* decoder-only"):
        transformers.WhisperForConditionalGeneration(config).eval().generate(
            torch.zeros(1, 8, 16), assistant_model=drafter
        )


def test_encoder_decoder_target_is_refused() -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    target = transformers.T5ForConditionalGeneration(config).eval()
    assert_refused(target, r"T5ForConditionalGeneration is an encoder-decoder; .* decoder-only")


def test_target_with_a_window_that_no_mask_can_change_runs_chains() -> None:
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    )
    target = transformers.GPTNeoForCausalLM(config).eval()
    assert_chained(target, r"GPTNeoForCausalLM has attention layers of type 'local'")


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_attention_that_keeps_some_keys_decodes_plainly() -> None:
    # A chain's later tokens would take places among the keys that are kept.
    config = transformers.DogeConfig(**SMALL, intermediate_size=48, keep_window_size=8)
    assert_plain(transformers.DogeForCausalLM(config).eval(), r"DogeForCausalLM has attention that keeps 8")


def test_a_target_without_a_cache_decodes_plainly() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    assert_plain(transformers.OpenAIGPTLMHeadModel(config).eval(), r"OpenAIGPTLMHeadModel")


def test_prompt_tuning_is_refused(target: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(
        fresh_target("llama", "sdpa", torch.float32),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    )
    assert_refused(tuned, r"PROMPT_TUNING.* virtual tokens, .*Use a LoRA adapter")


def test_unknown_keyword_of_generate_is_refused_by_the_host(target: PreTrainedModel) -> None:
    # Drafting options live on the drafter.
    assert_refused(target, "tree_budget", drafter=make_ddtree(target), tree_budget=9)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"tree_budgets": 8},
            r"Unknown drafting option 'tree_budgets'\. Did you mean 'tree_budget'\? Known: .*'method'",
        ),
        ({"method": "dtree"}, r"Unknown method 'dtree'\. Did you mean 'ddtree'\? Known: .*'dflash'"),
        ({"tree_budget": 0}, r"tree_budget=0 must be an integer from 1 to"),
        ({"tree_budget": 10**6}, r"tree_budget=1000000 must be an integer from 1 to"),
        ({"tree_budget": 2.5}, r"tree_budget=2\.5 must be an integer"),
        ({"tree_budget": "8"}, r"tree_budget='8' must be an integer"),
        ({"block_size": 1}, r"block_size=1 must be an integer from 2 to 5"),
        (
            {"block_size": 6},
            r"block_size=6 must be an integer from 2 to 5, the block this checkpoint was trained with",
        ),
    ],
    ids=str,
)
def test_drafting_options_are_checked(target: PreTrainedModel, options: dict[str, Any], match: str) -> None:
    drafter = make_ddtree(target)
    with pytest.raises(ValueError, match=match):
        drafter.set_options(**options)
    known = {name: value for name, value in options.items() if hasattr(drafter.options, name)}
    if known:
        # An option set by hand is checked when a call begins.
        drafter = make_ddtree(target)
        for name, value in known.items():
            setattr(drafter.options, name, value)
        assert_refused(target, match, drafter=drafter)


def test_trace_is_checked_in_each_call(target: PreTrainedModel) -> None:
    drafter: Any = make_ddtree(target)
    drafter.trace = True
    assert_refused(target, r"trace=True must be a Trace", drafter=drafter)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"hidden_size": 16, "head_dim": 4},
            r"hidden states of size 16, but target .* has hidden_size 32\. A drafter fits",
        ),
        ({"vocab_size": 48}, r"vocabulary of 48, but target .* has 64 embeddings"),
        ({"num_target_layers": 6}, r"trained for a target of 6 layers, but target .* has 4"),
        (
            {"num_target_layers": None, "dflash_config": {"target_layer_ids": [0, 7]}},
            r"reads target layers \[0, 7\], but \[7\] are not among the layers 0 to 3",
        ),
        ({"dflash_config": {"mask_token_id": 64}}, r"mask_token_id 64, but target .* has only 64 embeddings"),
        (
            {"hidden_size": 16, "head_dim": 4, "target_name_or_path": "somebody/their-model"},
            r"hidden states of size 16.*use 'somebody/their-model' as target",
        ),
    ],
    ids=str,
)
def test_drafter_for_another_target_is_refused(target: PreTrainedModel, settings: dict[str, Any], match: str) -> None:
    if "hidden_size" in settings:
        settings = {"num_attention_heads": 4, "num_key_value_heads": 2, **settings}
    assert_refused(target, match, drafter=make_dflash(target, **settings))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"block_size": None}, r"block_size is None in this DFlash config .* at least 2"),
        ({"block_size": 1}, r"block_size is 1 in this DFlash config"),
        ({"dflash_config": {"target_layer_ids": [0]}}, r"dflash_config\.mask_token_id is None"),
        ({"dflash_config": {"mask_token_id": 1}}, r"neither dflash_config\.target_layer_ids nor num_target_layers"),
    ],
    ids=str,
)
def test_dflash_config_that_says_too_little_is_refused(settings: dict[str, Any], match: str) -> None:
    known = {"mask_token_id": 1, "target_layer_ids": [0]}
    fields = {"block_size": 4, "dflash_config": known, "hidden_size": 16, "num_hidden_layers": 1, **settings}
    with pytest.raises(ValueError, match=match):
        DFlashDrafter(DFlashConfig(vocab_size=64, num_attention_heads=2, head_dim=8, **fields))
