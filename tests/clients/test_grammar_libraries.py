"""Grammar libraries: one matcher per row, advanced by the last token of each call, in batches and on chain targets.

Plain `generate` with the same library decides. Every row must also match the grammar.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from hf_specdec import load_drafter
from hf_specdec.drafting.drafter import Drafter
from tests.chains import assisted_loop
from tests.scripted import right_for

TINY = Path(__file__).parents[2] / "examples" / "tiny-code"
PATTERN = r'\{"name": "[a-z_]{2,9}", "size": [0-9]{1,3}\}'


@functools.cache
def pair() -> tuple[Any, Any]:
    """The bundled target and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype="float32")
    return model, AutoTokenizer.from_pretrained(TINY / "target")


def vocabulary() -> int:
    size: int = pair()[0].config.vocab_size
    return size


def end_of_text() -> int:
    token: int = pair()[1].eos_token_id
    return token


def texts_of_tokens() -> dict[int, str]:
    """What each token adds to a text; without special tokens and parts of characters."""
    _, tokenizer = pair()
    found = {
        token: tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids
    }
    return {token: text for token, text in found.items() if text and "\ufffd" not in text}


class PerRow(LogitsProcessor):
    """As these libraries' processors: a matcher per row, made in the first call and advanced in the others."""

    def __init__(self, make: Callable[[], Any], advance: Callable[[Any, int], Any], allowed: Callable[[Any], Any]):
        self.make, self.advance, self.allowed = make, advance, allowed
        self.matchers: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.matchers:
            self.matchers = [self.make() for _ in input_ids]
            self.ended = [False] * len(input_ids)
        else:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                self.ended[row] |= token == end_of_text()
                if not self.ended[row]:
                    self.advance(self.matchers[row], token)
        blocked = torch.ones_like(scores, dtype=torch.bool)
        for row, matcher in enumerate(self.matchers):
            blocked[row, end_of_text() if self.ended[row] else self.allowed(matcher)] = False
        return scores.masked_fill(blocked, -torch.inf)


def with_xgrammar() -> Callable[[], dict[str, Any]]:
    library: Any = pytest.importorskip("xgrammar")
    processors: Any = pytest.importorskip("xgrammar.contrib.hf")
    info = library.TokenizerInfo.from_huggingface(pair()[1], vocab_size=vocabulary(), stop_token_ids=[end_of_text()])
    grammar = library.GrammarCompiler(info).compile_regex(PATTERN)
    return lambda: {"logits_processor": LogitsProcessorList([processors.LogitsProcessor(grammar)])}


def with_llguidance() -> Callable[[], dict[str, Any]]:
    library: Any = pytest.importorskip("llguidance")
    tokenizers: Any = pytest.importorskip("llguidance.hf")
    tokenizer = tokenizers.from_tokenizer(pair()[1], n_vocab=vocabulary(), eos_token=end_of_text())
    grammar = library.LLMatcher.grammar_from_regex(PATTERN)

    def allowed(matcher: Any) -> list[int]:
        bits = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        return [token for token in range(vocabulary()) if bits[token // 8] >> token % 8 & 1]

    def advance(matcher: Any, token: int) -> None:
        assert matcher.consume_token(token), matcher.get_error()

    make = functools.partial(library.LLMatcher, tokenizer, grammar)
    return lambda: {"logits_processor": LogitsProcessorList([PerRow(make, advance, allowed)])}


def with_outlines_core() -> Callable[[], dict[str, Any]]:
    library: Any = pytest.importorskip("outlines_core")
    tokens: dict[str, list[int]] = {}
    for token, text in texts_of_tokens().items():
        tokens.setdefault(text, []).append(token)
    index = library.Index(PATTERN, library.Vocabulary(end_of_text(), tokens))
    make = functools.partial(library.Guide, index)
    processor = functools.partial(
        PerRow, make, lambda guide, token: guide.advance(token), lambda guide: guide.get_tokens()
    )
    return lambda: {"logits_processor": LogitsProcessorList([processor()])}


def with_lm_format_enforcer() -> Callable[[], dict[str, Any]]:
    library: Any = pytest.importorskip("lmformatenforcer")
    enforcers: Any = pytest.importorskip("lmformatenforcer.tokenenforcer")
    _, tokenizer = pair()
    regular = [(token, text, False) for token, text in texts_of_tokens().items()]

    def make() -> dict[str, Any]:
        data = enforcers.TokenEnforcerTokenizerData(regular, tokenizer.decode, end_of_text(), False, vocabulary())
        enforcer = enforcers.TokenEnforcer(data, library.RegexParser(PATTERN))
        return {"prefix_allowed_tokens_fn": lambda row, sent: enforcer.get_allowed_tokens(sent.tolist()).allowed_tokens}

    return make


LIBRARIES = {
    "xgrammar": with_xgrammar,
    "llguidance": with_llguidance,
    "outlines-core": with_outlines_core,
    "lm-format-enforcer": with_lm_format_enforcer,
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("chains", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_grammar_holds_in_every_row_as_in_plain_decoding(library: str, chains: bool, rows: int) -> None:
    make = LIBRARIES[library]()
    model, tokenizer = pair()
    prompts = ["item = ", "def size_of(name):\n    return ", "class Item:\n    value = "][:rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    start = inputs["input_ids"].shape[1]
    settings = {**inputs, "max_new_tokens": 40, "do_sample": False, "eos_token_id": end_of_text()}
    alone = model.generate(**settings, **make())
    for text in tokenizer.batch_decode(alone[:, start:], skip_special_tokens=True):
        assert re.fullmatch(PATTERN, text), text
    drafters: list[Drafter] = [
        right_for([4, 0, 7], alone, siblings=1, vocab=vocabulary()),
        load_drafter(str(TINY / "dflash"), target=model),
        load_drafter("suffix"),
    ]
    with assisted_loop() if chains else nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(In this call|decodes it plainly)")
        for drafter in drafters:
            for _ in range(2 if drafter is drafters[-1] else 1):  # the second time it remembers the first
                assert model.generate(**settings, **make(), assistant_model=drafter).tolist() == alone.tolist()
