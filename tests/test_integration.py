"""The wrappers of transformers: they can be removed, and do not change other generation modes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, pipeline

import hf_specdec
from hf_specdec import integration
from hf_specdec.decoding.exchange import Committed
from hf_specdec.decoding.observers import Observer
from hf_specdec.decoding.upstream import EXPECTED
from tests.chains import assisted_loop
from tests.method_table import FREE, METHODS, make_ddtree
from tests.scripted import right_for
from tests.targets import PROMPTS, fresh_target, make_target, needs_own_adapters, tiny_tokenizer

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def leave_enabled() -> Iterator[None]:
    yield
    hf_specdec.enable()


def functions() -> list[Any]:
    return [getattr(owner, name) for owner, name in integration._WRAPS]


def test_enabling_twice_wraps_once() -> None:
    hf_specdec.enable()
    before = functions()
    hf_specdec.enable()
    assert functions() == before
    assert not any(hasattr(function._hf_specdec_original, "_hf_specdec_original") for function in before)


def test_disabling_restores_transformers_functions() -> None:
    hf_specdec.disable()
    for function in functions():
        assert function.__module__ in ("transformers.generation.utils", "transformers.pipelines.base")
        assert not hasattr(function, "_hf_specdec_original")
        assert not function.__globals__["__name__"].startswith("hf_specdec")
    own = functions()
    hf_specdec.disable()
    assert functions() == own
    hf_specdec.enable()
    assert [function._hf_specdec_original for function in functions()] == own


@pytest.mark.parametrize(("owner", "name"), integration._WRAPS)
def test_wrapped_functions_keep_the_signature_that_generate_inspects(owner: Any, name: str) -> None:
    hf_specdec.disable()
    own = inspect.signature(getattr(owner, name))
    hf_specdec.enable()
    assert inspect.signature(getattr(owner, name)) == own


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in EXPECTED.items() for name in names])
def test_a_host_function_that_is_missing_or_has_other_parameters_is_refused_with_the_version(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_specdec.disable()

    def renamed(self: Any, ids: Tensor, **kwargs: Any) -> None: ...

    if len(EXPECTED[owner][name]) > 1:
        monkeypatch.setattr(owner, name, renamed)
        with pytest.raises(
            ImportError, match=rf"transformers that {transformers.__version__} .*\.{name} has the param"
        ):
            hf_specdec.enable()
    monkeypatch.undo()
    if name in vars(owner):
        monkeypatch.delattr(owner, name)
    if not hasattr(owner, name):
        with pytest.raises(ImportError, match=rf"\.{name} is missing.*tested with transformers 5\.17"):
            hf_specdec.enable()
        monkeypatch.undo()


@pytest.mark.parametrize("method", ["ddtree", "causal_lm_tree", "ngram", "specbranch"])
def test_a_pipeline_takes_a_drafter_when_it_is_made(method: str) -> None:
    # Neither special tokens nor a config are needed: whatever it drafts are the target's own tokens.
    target = make_target("llama", "sdpa", torch.float32)
    drafter: Any = METHODS[method](target)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
    text = "abacadabra"
    alone = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer())(text, **settings)
    assisted = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), assistant_model=drafter)
    assert assisted(text, **settings) == alone
    assert drafter.stats.num_target_forwards > 1


@pytest.mark.parametrize("name", ["ngram", "drafter"])
def test_a_pipeline_takes_a_drafter_by_its_name(name: str, tmp_path: Path, chdir: Callable[[Path], None]) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    chdir(tmp_path)
    make_ddtree(target).save_pretrained("drafter")
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
    alone = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer())("abacadabra", **settings)
    assisted = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), assistant_model=name)
    assert isinstance(assisted.assistant_model, hf_specdec.Drafter)
    config = transformers.GenerationConfig(max_new_tokens=12, do_sample=False)
    assert assisted("abacadabra", generation_config=config, return_tensors=True) == alone
    assert assisted.assistant_model.stats.num_target_forwards > 1


def test_a_draft_model_with_a_draft_vocabulary_is_a_drafter_also_by_its_name(tmp_path: Path) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    small = fresh_target("llama", "sdpa", torch.float32, vocab_size=32)
    small.config.draft_token_ids = list(range(0, 64, 2))
    small.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
    alone = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer())("abacadabra", **settings)
    assisted = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), assistant_model=str(tmp_path))
    assert isinstance(assisted.assistant_model, hf_specdec.Drafter)
    assert assisted("abacadabra", **settings) == alone
    with pytest.raises(ValueError, match="whose rows are only some of the target's tokens.*load_drafter"):
        target.generate(**PROMPTS["batch of one"](), assistant_model=small)


def test_a_pipeline_leaves_other_names_to_the_host(tmp_path: Path) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    target.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), assistant_model=str(tmp_path))
    assert type(pipe.assistant_model) is LlamaForCausalLM
    said = []
    for switch in (hf_specdec.disable, hf_specdec.enable):
        switch()
        with pytest.raises(Exception) as error:  # noqa: PT011 - transformers' own error, compared below
            pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), assistant_model="./absent")
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]


def test_a_pipeline_of_an_ordinary_assistant_is_unchanged() -> None:
    target = make_target("llama", "sdpa", torch.float32)
    pipe = pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), assistant_model=target)
    assert pipe.assistant_model is target
    other = make_target("llama", "sdpa", torch.float32, vocab_size=80)
    with pytest.raises(ValueError, match="You should pass the assistant tokenizer"):
        pipeline("text-generation", model=target, tokenizer=tiny_tokenizer(), assistant_model=other)


def ordinary_assistant(target: PreTrainedModel) -> dict[str, Any]:
    return {"assistant_model": make_target("llama", "sdpa", torch.float64, 11)}


def prompt_lookup(target: PreTrainedModel) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": 3}


def early_exit(target: PreTrainedModel) -> dict[str, Any]:
    return {"assistant_early_exit": 2}


STOCK: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "plain": lambda target: {},
    "ordinary assistant": ordinary_assistant,
    "prompt lookup": prompt_lookup,
    "early exit": early_exit,
    "beam search": lambda target: {"num_beams": 3},
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mode", STOCK)
def test_other_generation_modes_are_unchanged(mode: str, do_sample: bool) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    outputs = []
    for switch in (hf_specdec.disable, hf_specdec.enable, hf_specdec.disable):
        switch()
        torch.manual_seed(3)
        try:
            output = target.generate(**prompts, max_new_tokens=12, do_sample=do_sample, **STOCK[mode](target))
            outputs.append(output.tolist())
        except Exception as error:  # transformers' error must be the same with us
            outputs.append(f"{type(error).__name__}: {error}")
    assert outputs[0] == outputs[1] == outputs[2]
    assert isinstance(outputs[0], list) or mode == "early exit"


def test_multi_token_prediction_is_unchanged() -> None:
    # No tiny checkpoint has such layers; transformers' error for a target without them shows that its own code ran.
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    said = []
    for switch in (hf_specdec.disable, hf_specdec.enable):
        switch()
        with pytest.raises(Exception) as error:  # noqa: PT011 - transformers' own error, compared below
            target.generate(**prompts, **GREEDY, use_mtp=True)
        said.append((error.type, str(error.value)))
    assert said[0] == said[1]


def test_errors_of_the_host_are_unchanged() -> None:
    # The host refuses batches for its own assistants, also with us enabled.
    target = make_target("llama", "sdpa")
    said = []
    for switch in (hf_specdec.disable, hf_specdec.enable):
        switch()
        with pytest.raises(ValueError, match="batch") as error:
            target.generate(**PROMPTS["ragged batch of three"](), **GREEDY, **ordinary_assistant(target))
        said.append(str(error.value))
    assert said[0] == said[1]


def test_a_drafter_works_again_after_disable_and_enable() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_ddtree(target)
    hf_specdec.disable()
    with pytest.raises(Exception):  # noqa: B017, PT011 - an error of transformers
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
    hf_specdec.enable()
    alone = target.generate(**prompts, **GREEDY)
    assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()


def test_peft_lora_target_generates_its_own_tokens() -> None:
    peft = pytest.importorskip("peft")
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    base = target.generate(**prompts, **GREEDY)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(target, config).eval()
    for parameter in adapted.parameters():
        parameter.data = parameter.data.double()
    alone = adapted.generate(**prompts, **GREEDY)
    assert alone.tolist() != base.tolist()
    for drafter in (right_for([3, 0, 2], alone), make_ddtree(target)):
        assert adapted.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_every_row_keeps_its_own_adapter_when_others_have_finished(method: str) -> None:
    peft = pytest.importorskip("peft")
    base, prompts = fresh_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    target = peft.get_peft_model(base, config, adapter_name="first")
    target.add_adapter("second", config)
    target.double().eval()
    settings = {**prompts, "adapter_names": ["first", "second", "__base__"], "max_new_tokens": 24, "do_sample": False}
    alone = target.generate(**settings)
    settings["eos_token_id"] = [int(alone[0, 12]), int(alone[1, 14])]
    alone = target.generate(**settings)
    assert target.generate(**settings, assistant_model=METHODS[method](base)).tolist() == alone.tolist()


@needs_own_adapters
def test_adapter_loaded_into_the_model_itself_works() -> None:
    peft = pytest.importorskip("peft")
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    target.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    for parameter in target.parameters():
        parameter.data = parameter.data.double()
    alone = target.generate(**prompts, **GREEDY)
    assert target.generate(**prompts, **GREEDY, assistant_model=right_for(3, alone)).tolist() == alone.tolist()


class OverridesGenerate(LlamaForCausalLM):
    """A target class with a `generate` of its own."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        return super().generate(*args, **kwargs)


@pytest.mark.parametrize("method", METHODS)
def test_target_class_that_overrides_generate_works(method: str) -> None:
    stock, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    target = OverridesGenerate(stock.config).double().eval()
    target.load_state_dict(stock.state_dict())
    target.generation_config = stock.generation_config
    alone = stock.generate(**prompts, **GREEDY)
    assert target.generate(**prompts, **GREEDY, assistant_model=METHODS[method](target)).tolist() == alone.tolist()
    assert target.called


def test_compiled_target_hands_its_plain_model_to_the_loop() -> None:
    # The wrapper that torch.compile returns forwards `generate` to the model it wraps, so nothing is compiled here.
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    compiled = torch.compile(target)
    assert compiled.generate.__self__ is target
    alone = target.generate(**prompts, **GREEDY)
    assert compiled.generate(**prompts, **GREEDY, assistant_model=right_for(3, alone)).tolist() == alone.tolist()


def test_options_of_the_call_reach_the_loop_through_a_generation_config() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    config = transformers.GenerationConfig(max_new_tokens=7, repetition_penalty=1.4, do_sample=False, pad_token_id=0)
    alone = target.generate(**prompts, generation_config=config)
    drafter = right_for(3, alone)
    assert target.generate(**prompts, generation_config=config, assistant_model=drafter).tolist() == alone.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_greedy_decoding_draws_no_random_numbers(method: str) -> None:
    target = make_target("llama", "sdpa")
    drafter = METHODS[method](target)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    assert torch.equal(torch.get_rng_state(), before)


def test_int32_token_ids_have_the_output_dtype_of_plain_decoding() -> None:
    target, prompt = make_target("llama", "sdpa"), PROMPTS["batch of one"]()["input_ids"].int()
    alone = target.generate(prompt, **GREEDY)
    assisted = target.generate(prompt, **GREEDY, assistant_model=right_for(3, alone))
    assert (assisted.dtype, assisted.tolist()) == (alone.dtype, alone.tolist())


def test_no_gradients_are_recorded() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_ddtree(target)
    with torch.enable_grad():
        output = target.generate(
            **prompts, **GREEDY, return_dict_in_generate=True, output_scores=True, assistant_model=drafter
        )
    assert not any(score.requires_grad for score in output.scores)
    with torch.inference_mode():
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == output.sequences.tolist()


@pytest.mark.parametrize("method", FREE)
def test_one_drafter_serves_targets_and_batches_in_turn(method: str) -> None:
    first, second = make_target("llama", "sdpa"), make_target("llama", "eager", torch.float32, 5)
    drafter = METHODS[method](first)
    for target in (first, second, first):
        for prompts in (PROMPTS["ragged batch of three"](), PROMPTS["batch of one"]()):
            alone = target.generate(**prompts, **GREEDY)
            assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()


class CommitObserver(Observer):
    waits = True

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def on_commit(self, committed: Committed) -> None:
        self.token_ids += committed.token_ids[0, : committed.num_committed[0]].tolist()


@pytest.mark.filterwarnings("ignore:.*(In this call|decodes it plainly)")
@pytest.mark.parametrize("loop", [nullcontext, assisted_loop])
def test_an_observer_is_given_the_committed_tokens_in_both_loops(
    loop: Callable[[], AbstractContextManager[None]],
) -> None:
    target, observer = make_target(), CommitObserver()
    drafter = METHODS["ddtree"](target)
    prompt = PROMPTS["batch of one"]()["input_ids"]
    with loop(), integration.observing(observer):
        written = target.generate(prompt, assistant_model=drafter, **GREEDY)[0, prompt.shape[1] :].tolist()
    seen = list(observer.token_ids)
    assert len(seen) >= len(written) // 2
    assert seen[: len(written)] == written[: len(seen)]
    target.generate(prompt, assistant_model=drafter, **GREEDY)
    assert observer.token_ids == seen, "observed outside the context"
