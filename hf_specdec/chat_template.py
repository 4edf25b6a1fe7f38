"""Converts messages into a target's input text with its tokenizer's chat template.

`hf-specdec generate`, `chat` and `bench` share it, and have the same options `--chat` and `--thinking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

Chat = Literal["auto", "on", "off"]
Thinking = Literal["default", "on", "off"]
Message: TypeAlias = dict[str, str]  # "role" and "content"


def uses_template(tokenizer: Any, name: str, *, chat: Chat, thinking: Thinking = "default") -> bool:
    """Whether to use the tokenizer's chat template; "auto" uses it if there is one.

    Args:
        tokenizer: the target's.
        name: the target's, for error messages.
        chat: value of `--chat`.
        thinking: value of `--thinking`.

    Raises:
        ValueError: the tokenizer's chat template does not support these values, or there is none.
    """
    template = str(tokenizer.chat_template or "")
    if chat == "on" and not template:
        raise ValueError(f"--chat on: the tokenizer of {name!r} has no chat template. Use --chat off.")
    used = chat != "off" and bool(template)
    if thinking != "default" and not used:
        reason = "--chat is off" if template else "there is none"
        raise ValueError(
            f"--thinking {thinking} needs a chat template, but {reason}: prompts are given to {name!r} as they are. "
            f"Leave --thinking out{', or use --chat on' if template else ''}."
        )
    if thinking != "default" and "enable_thinking" not in template:
        raise ValueError(
            f"--thinking {thinking}: the chat template of {name!r} does not use enable_thinking. Leave --thinking out."
        )
    return used


def render(messages: Sequence[Message], tokenizer: Any, *, thinking: Thinking = "default") -> str:
    """The text of a conversation up to the start of the target's next answer, special tokens included.

    Args:
        messages: so far; the last one is the user's.
        tokenizer: the target's.
        thinking: "on" and "off" set the template's `enable_thinking`; "default" does not set it.

    Raises:
        ValueError: the template refuses the messages, or leaves the system message out.
    """
    switch = {} if thinking == "default" else {"enable_thinking": thinking == "on"}
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **switch))
    except Exception as error:  # a template is third-party code and may raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} refuses messages with these roles: {roles} "
            f"({type(error).__name__}: {error})."
        ) from error
    for message in messages:
        if message["role"] == "system" and message["content"].strip() not in text:
            raise ValueError(
                f"The chat template of {tokenizer.name_or_path!r} leaves out the system message "
                f"{message['content']!r}: write it into the first question."
            )
    return text
