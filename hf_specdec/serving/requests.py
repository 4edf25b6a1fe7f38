"""Which requests transformers' own server cannot answer as asked, and why; it would ignore these fields, or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CHAT, TEXT, RESPONSES, LOAD = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/load_model"
# Fields that the server ignores, with the values that ask for nothing.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "web_search_options": (),
}


def _number(kind: type | tuple[type, ...], holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool) and holds(value)


_count = (_number(int, lambda value: value >= 1), "a whole number of at least 1")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": _count,
    "max_completion_tokens": _count,
    "max_output_tokens": _count,
    "temperature": (_number((int, float), lambda value: 0 <= value <= 100), "a number between 0 and 100"),
    "top_p": (_number((int, float), lambda value: 0 < value <= 1), "a number above 0 and at most 1"),
    "frequency_penalty": (_number((int, float), lambda value: -1 < value <= 2), "a number above -1 and at most 2"),
    "seed": (_number(int, lambda value: 0 <= value < 2**32), f"a whole number between 0 and {2**32 - 1}"),
    "stop": (
        lambda value: bool(value) and all(isinstance(each, str) and each for each in _listed(value)),
        "a text, or a list of texts, none of them empty",
    ),
}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def why_refused(path: str, body: Any, *, has_tools: bool) -> str | None:
    """Why a request cannot be answered as it asks; None if it can.

    Args:
        path: `CHAT`, `TEXT` or `RESPONSES`.
        body: its JSON.
        has_tools: whether the target's chat template shows tools to it.

    Examples:
        >>> why_refused("/v1/completions", {"prompt": "a", "n": 2}, has_tools=False)
        'n=2 is not supported by this server: leave it out.'
    """
    if not isinstance(body, dict):
        return "The request must be a JSON object."
    given = {name: value for name, value in body.items() if value is not None}
    if path == CHAT:
        messages = given.get("messages")
        if not isinstance(messages, list) or not messages:
            return "messages must be a list with at least one message."
        if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
            return "Each message must be an object with a role."
    if path == TEXT and (not isinstance(given.get("prompt"), str) or not given["prompt"]):
        return "prompt must be a text that is not empty."
    if path == RESPONSES and not given.get("input"):
        return "input must be a text or a list of messages that is not empty."
    if given.get("tools") and not has_tools:
        return "tools are not supported: the chat template of this target does not show them to it. Leave them out."
    for name, value in given.items():
        # Types too: logprobs=0 asks for something, unlike logprobs=False.
        if name in _IGNORED and not any(type(value) is type(same) and value == same for same in _IGNORED[name]):
            return f"{name}={value!r} is not supported by this server: leave it out."
        if name in _RULES and not _RULES[name][0](value):
            return f"{name}={value!r} must be {_RULES[name][1]}."
    return None
