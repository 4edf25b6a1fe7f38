"""attach: the model's own `generate` drafts, whoever calls it, and every call that worked before still works."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from transformers import PreTrainedModel, pipeline

import hf_specdec
from hf_specdec import attach, detach
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.drafting.drafter import Drafter
from tests.chains import assisted_loop
from tests.method_table import METHODS, make_ddtree, make_ngram
from tests.targets import PROMPTS, fresh_target, tiny_tokenizer

GREEDY = {"max_new_tokens": 12, "do_sample": False}
PROMPT = PROMPTS["batch of one"]()


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target("llama", "sdpa")


def drafts(target: Any, drafter: Drafter, **settings: Any) -> bool:
    """Whether a call without an assistant uses the attached drafter; its output must be that of plain decoding."""
    settings = {**PROMPT, **GREEDY, **settings}
    plain = target.generate(**settings, assistant_model=None)
    drafter.stats = None
    assert target.generate(**settings).tolist() == plain.tolist()
    return drafter.stats is not None


@pytest.mark.parametrize("method", METHODS)
def test_the_models_own_generate_drafts_until_detached_and_the_model_can_be_freed(method: str) -> None:
    target = fresh_target("llama", "sdpa")
    drafter = METHODS[method](target)
    attach(target, drafter)
    assert drafts(target, drafter)
    assert drafts(target, drafter, **PROMPTS["ragged batch of three"]())
    detach(target)
    assert not drafts(target, drafter)
    detach(target)
    attach(target, drafter)
    freed = weakref.ref(target)
    del target, drafter
    gc.collect()
    assert freed() is None


def test_with_restores_what_was_attached_before(target: PreTrainedModel) -> None:
    first, second = make_ddtree(target), make_ngram(target)
    with attach(target, first):
        with attach(target, second):
            assert drafts(target, second)
            assert not drafts(target, first)
        assert drafts(target, first)
    assert not drafts(target, first)
    with pytest.raises(RuntimeError, match="of the block"), attach(target, first):
        raise RuntimeError("of the block")
    assert not drafts(target, first)


def test_attaching_enables_and_disabling_ends_it(target: PreTrainedModel) -> None:
    drafter = make_ddtree(target)
    hf_specdec.disable()
    attach(target, drafter)
    assert drafts(target, drafter)
    hf_specdec.disable()
    assert not drafts(target, drafter)
    hf_specdec.enable()
    assert drafts(target, drafter)


def test_sampling_draws_as_with_the_drafter_named_in_the_call(target: PreTrainedModel) -> None:
    drafter, sampled = make_ddtree(target), {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3}
    torch.manual_seed(4)
    named = target.generate(**PROMPT, **sampled, assistant_model=drafter)
    with attach(target, drafter):
        torch.manual_seed(4)
        assert target.generate(**PROMPT, **sampled).tolist() == named.tolist()


OTHERS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "none": lambda target: {"assistant_model": None},
    "a model": lambda target: {"assistant_model": target},
    "another drafter": lambda target: {"assistant_model": make_ngram(target)},
    "prompt look-up": lambda target: {"prompt_lookup_num_tokens": 3},
    "prompt look-up in a config": lambda target: {
        "generation_config": transformers.GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=12)
    },
    "a function": lambda target: {"custom_generate": lambda model, input_ids, **others: input_ids},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_call_that_names_an_assistant_does_not_use_the_attached_one(other: str, target: PreTrainedModel) -> None:
    arguments = OTHERS[other](target)
    settings = {**PROMPT, **({} if "generation_config" in arguments else GREEDY), **arguments}
    alone = target.generate(**settings)
    drafter = make_ddtree(target)
    with attach(target, drafter):
        assert target.generate(**settings).tolist() == alone.tolist()
    assert drafter.stats is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3}, "cannot be used with 'beam_search'"),
    "sampled beams": ({"num_beams": 3, "do_sample": True}, "cannot be used with 'beam_sample'"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "no cache": ({"use_cache": False}, "use_cache=False was passed"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_a_call_that_drafts_cannot_be_used_for_is_decoded_as_before_with_a_warning(
    refused: str, target: PreTrainedModel
) -> None:
    arguments, reason = REFUSED[refused]
    settings: dict[str, Any] = {**PROMPT, **GREEDY, **arguments}
    torch.manual_seed(5)
    alone = target.generate(**settings)
    drafter = make_ddtree(target)
    attach(target, drafter)
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match=f"{reason}.*The attached DFlashDrafter drafts nothing in this call") as said:
        assert target.generate(**settings).tolist() == alone.tolist()
    assert [Path(warning.filename).name for warning in said] == ["test_attach.py"]
    assert drafter.stats is None
    assert drafts(target, drafter)


def with_static_cache(target: PreTrainedModel, drafter: Any) -> dict[str, Any]:
    return {CACHE: transformers.StaticCache(config=target.config, max_cache_len=64)}


def with_checkpointing(target: PreTrainedModel, drafter: Any) -> dict[str, Any]:
    target.gradient_checkpointing_enable()
    target.train()
    return {}


def with_an_option_out_of_range(target: PreTrainedModel, drafter: Any) -> dict[str, Any]:
    drafter.options.tree_budget = 0
    return {}


def with_another_embedding(target: PreTrainedModel, drafter: Any) -> dict[str, Any]:
    target.resize_token_embeddings(400)
    return {}


def with_a_rule_that_cannot_be_used(target: PreTrainedModel, drafter: Any) -> dict[str, Any]:
    drafter.acceptance = "typical"
    target.config.keep_window_size = 64  # trees are refused
    return {}


def with_a_compiled_forward(target: PreTrainedModel, drafter: Any) -> dict[str, Any]:
    for layer in target.model.layers:  # type: ignore[union-attr]
        layer._forward_hooks = _NoHooks()
    return {}


class _NoHooks(OrderedDict[int, Any]):
    """Takes hooks and never runs one, as a forward that was compiled without them."""

    def values(self) -> Any:
        return ()

    def items(self) -> Any:
        return ()

    def __bool__(self) -> bool:
        return False


LATE = {
    "a static cache": (with_static_cache, f"{CACHE} is a StaticCache"),
    "checkpointing": (with_checkpointing, "training mode with gradient checkpointing"),
    "an option": (with_an_option_out_of_range, "tree_budget=0"),
    "another embedding": (with_another_embedding, "has 400 embeddings"),
    "a rule": (with_a_rule_that_cannot_be_used, "needs the loop of this library"),
    "a forward without hooks": (with_a_compiled_forward, "its hook did not run"),
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.* is deprecated")
@pytest.mark.parametrize("what", LATE)
def test_what_is_found_out_later_ends_no_program_either(what: str, target: PreTrainedModel) -> None:
    change, reason = LATE[what]
    streamed: list[int] = []

    class Streamer(transformers.generation.BaseStreamer):
        """Keeps what it gets."""

        def put(self, value: torch.Tensor) -> None:
            streamed.extend(value.flatten().tolist())

        def end(self) -> None:
            """Nothing is left."""

    drafter = make_ddtree(target)
    attach(target, drafter)
    arguments = change(target, drafter)
    twin = copy.deepcopy(target)
    alone = twin.generate(**PROMPT, **GREEDY, **change(twin, copy.copy(drafter)))
    with pytest.warns(UserWarning, match=f"{reason}.*The attached DFlashDrafter drafts nothing in this call"):
        output = target.generate(**PROMPT, **GREEDY, **arguments, streamer=Streamer())
    assert output.tolist() == alone.tolist()
    assert streamed == output[0].tolist()


def test_an_error_behind_the_first_token_stays_an_error(target: PreTrainedModel) -> None:
    class Failing(transformers.generation.BaseStreamer):
        """Takes the prompt and four tokens."""

        taken = 0

        def put(self, value: torch.Tensor) -> None:
            self.taken += 1
            if self.taken > 5:
                raise ValueError("no more")

        def end(self) -> None:
            """Nothing is left."""

    streamer = Failing()
    attach(target, make_ddtree(target))
    with pytest.raises(ValueError, match="no more"):
        target.generate(**PROMPT, **GREEDY, streamer=streamer)
    assert streamer.taken == 6


def test_continuous_batching_decodes_plainly_and_leaves_the_drafter_attached(target: PreTrainedModel) -> None:
    drafter = make_ngram(target)
    # On a CPU the default takes most of the memory for its pages.
    pages = transformers.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)
    config = transformers.GenerationConfig(**GREEDY, eos_token_id=-1, pad_token_id=0)
    inputs = [[5, 9, 23, 7], [12, 4, 31]]
    model: Any = target.float()
    found = []
    for _ in range(2):
        outputs = model.generate_batch(inputs, generation_config=config, continuous_batching_config=pages)
        found.append([output.generated_tokens for output in outputs.values()])
        attach(target, drafter)
        assert drafts(target, drafter)
        drafter.stats = None
    outputs = model.generate_batch(inputs, generation_config=config, continuous_batching_config=pages)
    found.append([output.generated_tokens for output in outputs.values()])
    assert found[0] == found[1] == found[2]
    assert drafter.stats is None
    assert drafts(target, drafter)


def test_an_error_of_a_call_is_the_one_without_a_drafter(target: PreTrainedModel) -> None:
    said = []
    for change in (lambda: None, lambda: attach(target, make_ddtree(target))):
        change()
        for wrong in ({"unknown": 1}, {"max_new_tokens": -1}, {"stop_strings": ["a"]}):
            with pytest.raises(Exception) as error:  # noqa: PT011 - transformers' own error, compared below
                target.generate(**PROMPT, **wrong)
            said.append((error.type, str(error.value)))
        with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
            target.generate(PROMPT["input_ids"], inputs=PROMPT["input_ids"])
    assert said[:3] == said[3:]


def test_what_does_not_fit_is_refused_when_it_is_attached(target: PreTrainedModel) -> None:
    drafter = make_ddtree(target)
    with pytest.raises(ValueError, match="size 32, but target .* has hidden_size 48"):
        attach(fresh_target("llama", hidden_size=48), drafter)
    drafter.options.tree_budget = 0
    with pytest.raises(ValueError, match="tree_budget=0"):
        attach(target, drafter)
    for swapped in ((drafter, target), (target, "owner/drafter"), (target, None)):
        with pytest.raises(
            TypeError, match=r"must be what load_drafter returns. The order is attach\(model, drafter\)"
        ):
            attach(*swapped)
    with pytest.raises(TypeError, match=r"model is a Linear; it must be a model of transformers"):
        attach(torch.nn.Linear(2, 2), make_ngram(target))
    shape = {"vocab_size": 64, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8}
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        attach(transformers.T5ForConditionalGeneration(transformers.T5Config(**shape)), make_ngram(target))
    drafter = make_ngram(target)
    assert not drafts(target, drafter)


def in_lora(target: PreTrainedModel) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(target, config).double().eval()


WRAPPERS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "peft": in_lora,
    "compiled": lambda target: torch.compile(target, backend="eager"),
    "compiled peft": lambda target: torch.compile(in_lora(target), backend="eager"),
    "offloaded": lambda target: accelerate.cpu_offload(target, torch.device("cpu")),
    "dispatched": lambda target: accelerate.dispatch_model(target, {"": "cpu"}, force_hooks=True),
}


@pytest.mark.parametrize("first", [True, False], ids=["attached first", "wrapped first"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_of_a_model_draft_whenever_it_was_attached(wrapper: str, first: bool, target: PreTrainedModel) -> None:
    drafter = make_ddtree(target)
    if first:
        attach(target, drafter)
    wrapped = WRAPPERS[wrapper](target)
    if not first:
        attach(wrapped, drafter)
    assert drafts(wrapped, drafter)
    assert drafts(target, drafter)
    detach(wrapped)
    assert not drafts(target, drafter)


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning")
def test_a_prompt_tuned_model_is_decoded_plainly(target: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    drafter = make_ddtree(target)
    attach(target, drafter)
    tuned = peft.get_peft_model(target, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.warns(UserWarning, match="PROMPT_TUNING virtual tokens.*drafts nothing in this call"):
        tuned.double().eval().generate(**PROMPT, **GREEDY)


def test_pipelines_and_threads_draft() -> None:
    target = fresh_target("llama", "sdpa", torch.float32)
    drafter = make_ddtree(target)
    pipe = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer())
    settings: dict[str, Any] = {**GREEDY, "return_tensors": True}
    texts = ["abacadabra", "hello", "a b c d"]
    alone = [pipe(text, **settings) for text in texts]
    attach(target, drafter)
    assert [pipe(text, **settings) for text in texts] == alone
    assert drafter.stats is not None
    with ThreadPoolExecutor(3) as threads:
        assert (
            list(
                threads.map(
                    lambda text: target.generate(**tiny_tokenizer()(text, return_tensors="pt"), **GREEDY)[0].tolist(),
                    texts * 3,
                )
            )
            == [found[0]["generated_token_ids"] for found in alone] * 3
        )


def test_it_is_neither_saved_nor_copied_with_the_model(target: PreTrainedModel, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "before")
    drafter = make_ddtree(target)
    attach(target, drafter)
    target.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes()
    assert len(list((tmp_path / "after").iterdir())) == len(list((tmp_path / "before").iterdir()))
    for copied in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert not drafts(copied, drafter)
    assert drafts(target, drafter)


def test_new_weights_of_the_target_are_used_at_once(target: PreTrainedModel) -> None:
    drafter = make_ddtree(target)
    attach(target, drafter)
    texts = set()
    for seed in range(3):
        assert drafts(target, drafter)
        texts.add(tuple(target.generate(**PROMPT, **GREEDY)[0].tolist()))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    assert len(texts) == 3


def test_a_target_without_trees_decodes_with_chains_and_says_so() -> None:
    target = fresh_target("llama", "sdpa")
    drafter = make_ddtree(target)
    attach(target, drafter)
    with assisted_loop(), pytest.warns(UserWarning, match="drafts chains"):
        assert drafts(target, drafter)
