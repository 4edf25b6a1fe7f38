"""Every argument of `generate` that makes sense with an assistant, over ten architectures: as plain `generate`.

Compared is all that is returned: tokens, scores, logits, attentions, hidden states and caches. Arguments by which
sampling leaves more than one token are not here: `test_sampling.py` compares distributions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    WatermarkingConfig,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from hf_specdec.decoding.upstream import CACHE
from tests.scripted import right_for
from tests.targets import PROMPTS, STATEFUL, make_target, tiny_tokenizer

NEW = 10
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
# Full, windowed, capped and interleaved attention, learnt positions, alibi, experts, shared keys, and three kinds of
# states.
FAMILIES = {
    **dict.fromkeys(("llama", "mistral-sliding", "gemma3", "gpt2", "qwen3-moe", "gemma3n"), "sdpa"),
    **dict.fromkeys(("gemma2", "bloom"), "eager"),
    **dict.fromkeys(("qwen3-next", "falcon-h1", "lfm2"), "sdpa"),
}

Prompts = dict[str, Tensor]
Arguments = dict[str, Any]


class Collected(BaseStreamer):
    """What a streamer is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append("end")


def allowed(row: int, prefix: Tensor) -> list[int]:
    return [(7 * int(prefix[-1]) + 5 * row + len(prefix) + step) % 64 for step in range(6)]


def of_tokens(make: Callable[[int, int, int], Arguments]) -> Callable[..., Arguments]:
    """A case of which tokens plain decoding gives: the second, the fourth and the sixth of its last row."""

    def arguments(target: PreTrainedModel, prompts: Prompts, new: Tensor) -> Arguments:
        return make(*(int(new[-1, at]) for at in (1, 3, 5)))

    return arguments


def fixed(**arguments: Any) -> Callable[..., Arguments]:
    return lambda target, prompts, new: dict(arguments)


def sampled(**arguments: Any) -> Callable[..., Arguments]:
    """One token is left to draw."""
    return fixed(do_sample=True, **{"top_k": 1, **arguments})


def outputs(*names: str, **arguments: Any) -> Callable[..., Arguments]:
    return fixed(return_dict_in_generate=True, **dict.fromkeys(names, True), **arguments)


def embeddings(target: PreTrainedModel, prompts: Prompts, new: Tensor) -> Arguments:
    return {"inputs_embeds": target.get_input_embeddings()(prompts["input_ids"]), "input_ids": None}


def embeddings_and_ids(target: PreTrainedModel, prompts: Prompts, new: Tensor) -> Arguments:
    return {"inputs_embeds": target.get_input_embeddings()(prompts["input_ids"])}


def positions(target: PreTrainedModel, prompts: Prompts, new: Tensor) -> Arguments:
    return {"position_ids": (prompts["attention_mask"].cumsum(-1) - 1).clamp(min=0)}


def second_turn(target: PreTrainedModel, prompts: Prompts, new: Tensor) -> Arguments:
    """The cache of a first turn of three tokens, which must not be shared by two calls, and all ids."""
    cache = DynamicCache(config=target.config)
    ids = target.generate(**prompts, max_new_tokens=4, do_sample=False, **{CACHE: cache})
    mask = torch.cat([prompts["attention_mask"], torch.ones_like(ids[:, -4:])], 1)
    return {"input_ids": ids, "attention_mask": mask, CACHE: cache, "return_dict_in_generate": True}


def config_object(target: PreTrainedModel, prompts: Prompts, new: Tensor) -> Arguments:
    config = GenerationConfig(max_new_tokens=7, do_sample=False, repetition_penalty=1.3, eos_token_id=int(new[0, 5]))
    return {"generation_config": config, "max_new_tokens": None, "do_sample": None}


def criteria(target: PreTrainedModel, prompts: Prompts, new: Tensor) -> Arguments:
    longest = prompts["input_ids"].shape[1] + 6
    return {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(longest), EosTokenCriteria(int(new[0, 3]))])}


def max_length(target: PreTrainedModel, prompts: Prompts, new: Tensor) -> Arguments:
    return {"max_length": prompts["input_ids"].shape[1] + 5, "max_new_tokens": None}


def stop_strings(target: PreTrainedModel, prompts: Prompts, new: Tensor) -> Arguments:
    return {"stop_strings": [tiny_tokenizer().decode(new[0, 4:6])[:-1], "zzz"], "tokenizer": tiny_tokenizer()}


CASES: dict[str, Callable[[PreTrainedModel, Prompts, Tensor], Arguments]] = {
    # lengths and ends
    "nothing": fixed(),
    "max_new_tokens=1": fixed(max_new_tokens=1),
    "max_length": max_length,
    "min_new_tokens": of_tokens(lambda second, fourth, sixth: {"min_new_tokens": 5, "eos_token_id": second}),
    "min_length": of_tokens(lambda second, fourth, sixth: {"min_length": 13, "eos_token_id": [second, fourth]}),
    "max_time": fixed(max_time=1000.0),
    "eos_token_id": of_tokens(lambda second, fourth, sixth: {"eos_token_id": fourth}),
    "several eos_token_id": of_tokens(
        lambda second, fourth, sixth: {"eos_token_id": [sixth, fourth], "pad_token_id": 5}
    ),
    "stop_strings": stop_strings,
    "stopping_criteria": criteria,
    "generation_config": config_object,
    # processors
    "repetition_penalty": fixed(repetition_penalty=1.6),
    "no_repeat_ngram_size": fixed(no_repeat_ngram_size=1),
    "bad_words_ids": of_tokens(lambda second, fourth, sixth: {"bad_words_ids": [[second], [fourth, sixth]]}),
    "suppress_tokens": of_tokens(lambda second, fourth, sixth: {"suppress_tokens": [second, sixth]}),
    "begin_suppress_tokens": lambda target, prompts, new: {"begin_suppress_tokens": new[:, 0].tolist()},
    "sequence_bias": of_tokens(lambda second, fourth, sixth: {"sequence_bias": [[[second], -4.0], [[fourth, 9], 8.0]]}),
    "forced_bos_token_id": fixed(forced_bos_token_id=7),
    "forced_eos_token_id": fixed(forced_eos_token_id=9),
    "exponential_decay_length_penalty": of_tokens(
        lambda second, fourth, sixth: {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": sixth}
    ),
    "remove_invalid_values": fixed(remove_invalid_values=True, renormalize_logits=True),
    "prefix_allowed_tokens_fn": fixed(prefix_allowed_tokens_fn=allowed),
    "watermarking_config": fixed(watermarking_config=WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")),
    "logits_processor": lambda target, prompts, new: {
        "logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor(new[:, 2].tolist(), "cpu")])
    },
    "token_healing": fixed(token_healing=False),
    # sampling of one token
    "temperature": sampled(temperature=0.3),
    "top_k": sampled(),
    "top_p": sampled(top_k=0, top_p=1e-6),
    "min_p": sampled(top_k=0, min_p=1.0),
    "typical_p": sampled(typical_p=0.6),
    "epsilon_cutoff": sampled(epsilon_cutoff=0.02),
    "eta_cutoff": sampled(eta_cutoff=0.02),
    "num_return_sequences": sampled(num_return_sequences=3),
    # what is returned
    "return_dict_in_generate": outputs(),
    "output_scores": outputs("output_scores", repetition_penalty=1.3),
    "output_logits": outputs("output_logits"),
    "output_attentions": outputs("output_attentions"),
    "output_hidden_states": outputs("output_hidden_states"),
    "all outputs": outputs("output_scores", "output_logits", "output_hidden_states", do_sample=True, top_k=1),
    "output_attentions of a kernel without": outputs("output_attentions"),
    "no dictionary": fixed(output_scores=True, output_attentions=True),
    # inputs and cache
    "inputs": lambda target, prompts, new: {"inputs": prompts["input_ids"], "input_ids": None},
    "inputs_embeds": embeddings,
    "inputs_embeds and input_ids": embeddings_and_ids,
    "no attention_mask": fixed(attention_mask=None),
    "position_ids": positions,
    CACHE: second_turn,
    "prefill_chunk_size": fixed(prefill_chunk_size=4),
    "logits_to_keep": fixed(logits_to_keep=1),
    "use_cache": fixed(use_cache=True, cache_implementation="dynamic"),
    "disable_compile": fixed(disable_compile=True),
    "streamer": lambda target, prompts, new: {"streamer": Collected()},
}


def run(target: PreTrainedModel, prompts: Prompts, case: str, new: Tensor, drafter: Any) -> dict[str, Any]:
    """What is returned, and what a streamer was given."""
    arguments = {**prompts, **GREEDY, **CASES[case](target, prompts, new)}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    output = target.generate(**arguments, assistant_model=drafter)
    return {"output": output, "streamed": arguments["streamer"].given if "streamer" in arguments else None}


def assert_same(ours: Any, theirs: Any, **close: float) -> None:
    """Equal tokens; close numbers; the same structure."""
    if isinstance(theirs, Tensor):
        assert ours.shape == theirs.shape
        if theirs.dtype == torch.int64:
            assert ours.tolist() == theirs.tolist()
        else:
            torch.testing.assert_close(ours, theirs, **close)
    elif isinstance(theirs, DynamicCache):
        assert type(ours) is type(theirs)
        for own, other in zip(ours.layers, theirs.layers, strict=True):
            assert type(own) is type(other)
            assert isinstance(other, DynamicLayer) == isinstance(own, DynamicLayer)
            for name in ("keys", "values"):
                assert_same(getattr(own, name, None), getattr(other, name, None), **close)
    elif isinstance(theirs, dict):
        assert set(ours) - {"speculation"} == set(theirs)
        for name in theirs:
            assert_same(ours[name], theirs[name], **close)
    elif isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for own, other in zip(ours, theirs, strict=True):
            assert_same(own, other, **close)
    else:
        assert ours == theirs


# Every case meets every family, half of them in a batch.
MEETINGS = [
    (case, family, list(PROMPTS)[(place + number) % len(PROMPTS)])
    for number, case in enumerate(CASES)
    for place, family in enumerate(FAMILIES)
]


@pytest.mark.parametrize(("case", "family", "batch"), MEETINGS)
@pytest.mark.usefixtures("softmax_in_its_type")
def test_argument_means_the_same_with_a_drafter(case: str, family: str, batch: str) -> None:
    # Other kernels return no attention weights, and plain decoding then returns empty tuples.
    attention = "eager" if case == "output_attentions" else FAMILIES[family]
    target, prompts = make_target(family, attention), PROMPTS[batch]()
    new = target.generate(**prompts, **GREEDY)[:, prompts["input_ids"].shape[1] :]
    try:
        alone = run(target, prompts, case, new, None)
    except ValueError as error:  # not every class of transformers takes embeddings
        with pytest.raises(ValueError, match=f"^{re.escape(str(error))}$"):
            run(target, prompts, case, new, right_for(3, prompts["input_ids"]))
        assert "inputs_embeds" in case
        return
    script = alone["output"] if isinstance(alone["output"], Tensor) else alone["output"].sequences
    if case == "inputs_embeds":  # the prompt is not returned
        script = torch.cat([prompts["input_ids"], script], 1)
    drafter = right_for([3, 0, 2], script)
    close = {"rtol": 1e-4, "atol": 1e-4} if family in STATEFUL else {}  # states are kept in float32
    assert_same(run(target, prompts, case, new, drafter), alone, **close)
    assert drafter.trees or script.shape[1] == prompts["input_ids"].shape[1] + 1
