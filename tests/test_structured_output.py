"""Grammar libraries with a drafter: what they let through is drafted, and the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.methods import make_ddtree
from tests.scripted import right_for
from tests.targets import PROMPTS, make_target, tiny_tokenizer

REGEX = "([a-m]{2}[n-z]){7}"


def tokenizer() -> Any:
    return tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer()._tokenizer, eos_token="b", pad_token="a")


def xgrammar() -> Any:
    package = pytest.importorskip("xgrammar")
    hf = pytest.importorskip("xgrammar.contrib.hf")
    info = package.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=64)
    return hf.LogitsProcessor(package.GrammarCompiler(info).compile_regex(REGEX))


def outlines() -> Any:
    package = pytest.importorskip("outlines")
    backends = pytest.importorskip("outlines.backends")
    model = package.from_transformers(make_target("llama", "sdpa"), tokenizer())
    return backends.get_regex_logits_processor("outlines_core", model, REGEX)


@pytest.mark.parametrize("library", [xgrammar, outlines])
def test_constrained_text_is_that_of_plain_decoding(library: Callable[[], Any]) -> None:
    target, prompt = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    settings: dict[str, Any] = {**prompt, "max_new_tokens": 40, "do_sample": False, "eos_token_id": 1}
    alone = target.generate(**settings, logits_processor=[library()])
    text = tiny_tokenizer().decode(alone[0, 9:])
    assert all(("a" <= letter <= "m") == (at % 3 < 2) for at, letter in enumerate(text.removesuffix("b"))), text
    assert not torch.equal(alone, target.generate(**settings)), "the grammar changes nothing here"
    for drafter in (right_for([3, 0, 5], alone), make_ddtree(target)):
        assisted = target.generate(**settings, logits_processor=[library()], assistant_model=drafter)
        assert assisted.tolist() == alone.tolist()
