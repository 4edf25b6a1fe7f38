"""LangChain, LlamaIndex and pipelines around a target with an attached drafter: they print what they print without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, pipeline

from hf_specdec import attach
from hf_specdec.drafting.drafter import Drafter
from tests.method_table import make_ddtree
from tests.targets import make_target, tiny_tokenizer

PROMPT, NEW = "uhelloxq", 24


def ask_langchain(target: PreTrainedModel, tokenizer: Any) -> str:
    langchain = pytest.importorskip("langchain_huggingface", reason="needs langchain-huggingface")
    pipe = pipeline("text-generation", target, tokenizer=tokenizer, max_new_tokens=NEW, do_sample=False)
    return str(langchain.HuggingFacePipeline(pipeline=pipe).invoke(PROMPT))


def stream_langchain(target: PreTrainedModel, tokenizer: Any) -> str:
    langchain = pytest.importorskip("langchain_huggingface", reason="needs langchain-huggingface")
    pipe = pipeline("text-generation", target, tokenizer=tokenizer, max_new_tokens=NEW, do_sample=False)
    return "".join(langchain.HuggingFacePipeline(pipeline=pipe).stream(PROMPT))


def ask_llama_index(target: PreTrainedModel, tokenizer: Any) -> str:
    llms = pytest.importorskip("llama_index.llms.huggingface", reason="needs llama-index-llms-huggingface")
    model = llms.HuggingFaceLLM(model=target, tokenizer=tokenizer, max_new_tokens=NEW)
    return str(model.complete(PROMPT, do_sample=False))


def ask_pipeline(target: PreTrainedModel, tokenizer: Any) -> str:
    pipe = pipeline("text-generation", target, tokenizer=tokenizer, max_new_tokens=NEW, do_sample=False)
    return str(pipe(PROMPT)[0]["generated_text"])


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return make_ddtree(make_target("llama", "sdpa", torch.float32))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ask", [ask_langchain, stream_langchain, ask_llama_index, ask_pipeline])
def test_a_program_prints_the_same_with_a_drafter(ask: Callable[..., str], drafter: Drafter) -> None:
    target, tokenizer = make_target("llama", "sdpa", torch.float32), tiny_tokenizer()
    plain = ask(target, tokenizer)
    assert len(plain) > 4
    drafter.stats = None
    with attach(target, drafter):
        assert ask(target, tokenizer) == plain
    assert drafter.stats is not None
    assert drafter.stats.num_draft_tokens > 0
