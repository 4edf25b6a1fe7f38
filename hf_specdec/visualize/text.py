"""The text of a traced call as HTML, drafted and accepted tokens shaded apart from the target's own.

After Figure 6 of the SpecBlock paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from hf_specdec.decoding.trace import Trace


def pieces(trace: Trace, tokenizer: Any, row: int = 0) -> Iterator[tuple[str, bool]]:
    """The text a row wrote, piece by piece, and whether it was drafted.

    A character may be spread over several tokens: it comes with the last of them.
    """
    tokens = trace.output(row)
    ids: list[int] = []
    told = ""
    for token, drafted in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if text.endswith("�") and len(ids) < len(tokens):
            continue
        if text.startswith(told):
            yield text[len(told) :], drafted
            told = text
        else:  # a tokenizer that rewrites what came before: token by token then
            yield tokenizer.decode([token]), drafted
            told = text


def shaded_text(trace: Trace, tokenizer: Any, row: int = 0) -> str:
    """A row of a traced call as HTML: the prompt, then tokens that were drafted and accepted, and bonus tokens.

    Args:
        trace: of the call.
        tokenizer: the target's.
        row: of the batch.
    """
    prompt = tokenizer.decode(trace.prompt_ids[row], skip_special_tokens=True)
    parts = [f"<span class='prompt'>{escape(prompt)}</span>"]
    for text, drafted in pieces(trace, tokenizer, row):
        kind = "accepted" if drafted else "bonus"
        # A line break has no width: shade a sign for it, so that it can be seen.
        shown = escape(text).replace("\n", "↵\n")
        parts.append(f"<span class='{kind}' title='{_TITLES[kind]}'>{shown}</span>")
    return f"<div class='shaded' role='group' aria-label='Text with drafted tokens shaded'>{''.join(parts)}</div>"


_TITLES = {"accepted": "drafted and accepted", "bonus": "the target&#39;s own"}
