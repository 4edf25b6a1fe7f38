"""Messages as the text that a target reads: through its tokenizer's chat template, where it is used.

Shared by `hf-specdec generate`, `chat` and `bench`, whose options `--chat` and `--thinking` mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

Chat = Literal["auto", "on", "off"]
Thinking = Literal["default", "on", "off"]
Message: TypeAlias = dict[str, str]  # "role" and "content"


def uses_template(tokenizer: Any, name: str, *, chat: Chat, thinking: Thinking = "default") -> bool:
    """Whether prompts go through the tokenizer's chat template; "auto" uses one where there is one.

    Args:
        tokenizer: the target's.
        name: the target's, for messages.
        chat: what `--chat` says.
        thinking: what `--thinking` says.

    Raises:
        ValueError: the tokenizer cannot do what is asked of its chat template.
    """
    template = str(tokenizer.chat_template or "")
    if chat == "on" and not template:
        raise ValueError(f"--chat on: the tokenizer of {name!r} has no chat template. Use --chat off.")
    used = chat != "off" and bool(template)
    if thinking != "default" and not used:
        reason = "--chat is off" if template else "there is none"
        raise ValueError(
            f"--thinking {thinking} is a setting of the chat template, but {reason}: the prompts of {name!r} are used "
            f"as they are. Leave --thinking out{', or use --chat on' if template else ''}."
        )
    if thinking != "default" and "enable_thinking" not in template:
        raise ValueError(
            f"--thinking {thinking}: the chat template of {name!r} knows no enable_thinking. Leave --thinking out."
        )
    return used


def render(messages: Sequence[Message], tokenizer: Any, *, thinking: Thinking = "default") -> str:
    """The text of a conversation up to where the target's next answer begins, special tokens included.

    Args:
        messages: so far; the last one is the user's.
        tokenizer: the target's.
        thinking: "on" and "off" are handed to the template as `enable_thinking`; "default" leaves it to the template.

    Raises:
        ValueError: the template refuses the messages, or leaves the system message out.
    """
    switch = {} if thinking == "default" else {"enable_thinking": thinking == "on"}
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **switch))
    except Exception as error:  # a template is code of others, and may raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} refuses messages of these roles: {roles} "
            f"({type(error).__name__}: {error})."
        ) from error
    for message in messages:
        if message["role"] == "system" and message["content"].strip() not in text:
            raise ValueError(
                f"The chat template of {tokenizer.name_or_path!r} leaves out the system message "
                f"{message['content']!r}: write it into the first question."
            )
    return text
