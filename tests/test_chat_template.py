"""Which prompts go through a chat template, and what it makes of messages."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specdec.chat_template import render, uses_template
from tests.targets import tiny_tokenizer

QUESTION = [{"role": "user", "content": "ab"}]


def with_template(template: str | None) -> Any:
    tokenizer = tiny_tokenizer().__class__(tokenizer_object=tiny_tokenizer()._tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def test_auto_uses_a_template_if_there_is_one() -> None:
    with_one, without = with_template("{{ messages[0].content }}"), with_template(None)
    assert uses_template(with_one, "target", chat="auto")
    assert uses_template(with_one, "target", chat="on")
    assert not uses_template(with_one, "target", chat="off")
    assert not uses_template(without, "target", chat="auto")
    with pytest.raises(ValueError, match="--chat on: the tokenizer of 'target' has no chat template. Use --chat off"):
        uses_template(without, "target", chat="on")


def test_thinking_is_refused_without_a_template_that_uses_it() -> None:
    tokenizer = with_template("<{{ messages[0].content }}>{% if enable_thinking is false %}no{% endif %}")
    assert uses_template(tokenizer, "target", chat="auto", thinking="on")
    assert render(QUESTION, tokenizer) == render(QUESTION, tokenizer, thinking="on") == "<ab>"
    assert render(QUESTION, tokenizer, thinking="off") == "<ab>no"
    with pytest.raises(ValueError, match="--thinking off needs a chat template, but --chat is off.*--chat"):
        uses_template(tokenizer, "target", chat="off", thinking="off")
    with pytest.raises(ValueError, match="--thinking on needs a chat template, but there is none"):
        uses_template(with_template(None), "target", chat="auto", thinking="on")
    with pytest.raises(ValueError, match="does not use enable_thinking"):
        uses_template(with_template("{{ messages[0].content }}"), "target", chat="on", thinking="on")


def test_a_template_without_a_system_message_is_an_error() -> None:
    messages = [{"role": "system", "content": " brief \n"}, *QUESTION]
    assert render(messages, with_template("{% for each in messages %}{{ each.content | trim }};{% endfor %}"))
    with pytest.raises(
        ValueError, match=r"leaves out the system message ' brief \\n': write it into the first question"
    ):
        render(messages, with_template("{{ messages[1].content }}"))
    with pytest.raises(
        ValueError, match="refuses messages with these roles: system, user .TemplateError: no system here"
    ):
        render(messages, with_template("{{ raise_exception('no system here') }}"))
