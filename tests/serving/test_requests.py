"""Requests to transformers' server: what is answered, and the reason for what is not."""

from __future__ import annotations

from typing import Any

import pytest

from hf_specdec.serving.requests import CHAT, RESPONSES, TEXT, why_refused

ASKED = {CHAT: {"messages": [{"role": "user", "content": "a"}]}, TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}


@pytest.mark.parametrize("path", ASKED)
def test_what_asks_for_nothing_special_is_answered(path: str) -> None:
    usual = {
        "model": "m", "max_tokens": 1, "temperature": 0, "top_p": 1, "seed": 0, "n": 1, "logprobs": None, "stop": ["a"],
        "response_format": {"type": "text"}, "presence_penalty": 0.0, "tools": [], "tool_choice": "auto",
        "stream": True, "stream_options": {"include_usage": True}, "user": "me",
    }  # fmt: skip
    assert why_refused(path, ASKED[path] | usual, has_tools=False) is None
    assert why_refused(path, ASKED[path] | {"tools": [{"type": "function"}]}, has_tools=True) is None


@pytest.mark.combinations(30)
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        *[(name, value, "must be a whole number of at least 1") for name in ("max_tokens", "max_completion_tokens")
          for value in (-5, 0, 1.5, "9", True)],
        *[("temperature", value, "must be a number between") for value in (-1, float("nan"), float("inf"), "1", True)],
        *[("top_p", value, "must be a number above 0") for value in (0, 1.1, -1)],
        *[("seed", value, "must be a whole number between") for value in (-1, 2**32, "x")],
        *[("stop", value, "must be a text, or a list") for value in ([], [""], "", [1], {"a": 1})],
        ("frequency_penalty", -1, "must be a number above -1"),
        ("n", 2, "is not supported"), ("n", 0, "is not supported"), ("logprobs", True, "is not supported"),
        ("logprobs", 0, "is not supported"), ("top_logprobs", 3, "is not supported"),
        ("best_of", 2, "is not supported"),
        ("response_format", {"type": "json_object"}, "is not supported"), ("tools", [{"a": 1}], "are not supported"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_or_fail_is_refused_by_its_name(name: str, value: Any, reason: str) -> None:
    for path, asked in ASKED.items():
        said = why_refused(path, asked | {name: value}, has_tools=False)
        assert said is not None
        assert said.startswith(name)
        assert reason in said


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, []), (CHAT, {}), (CHAT, {"messages": []}), (CHAT, {"messages": "a"}), (CHAT, {"messages": ["a"]}),
     (CHAT, {"messages": [{"content": "a"}]}), (TEXT, {}), (TEXT, {"prompt": ""}), (TEXT, {"prompt": ["a"]}),
     (RESPONSES, {}), (RESPONSES, {"input": []})],
)  # fmt: skip
def test_a_request_without_a_question_is_refused(path: str, body: Any) -> None:
    assert why_refused(path, body, has_tools=True) is not None
