"""The text of a traced call as HTML; accepted tokens and the target's own choices have different shades.

After Figure 6 of the SpecBlock paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from hf_specdec.decoding.trace import Trace


class TextPieces:
    """Decodes tokens one by one. A character of several tokens is returned with the last of them.

    Args:
        decode: token ids as text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self._ids: list[int] = []  # of the latest piece, then those without text yet: decoding depends on both
        self._num_decoded = 0  # how many of them are of the latest piece

    def add(self, token: int) -> str:
        """The text that this token completes; empty if its character continues in the next token."""
        self._ids.append(token)
        pending = len(self._ids) - self._num_decoded
        # A character has at most four bytes: after four tokens, the replacement character stands for invalid bytes.
        if self.decode(self._ids).endswith("\N{REPLACEMENT CHARACTER}") and pending < 4:
            return ""
        return self.rest()

    def rest(self) -> str:
        """The text of the tokens without text yet, such as an incomplete character at the end."""
        before, text = self.decode(self._ids[: self._num_decoded]), self.decode(self._ids)
        new = self._ids[self._num_decoded :]
        # If the tokenizer changed the text before them, the new tokens are decoded alone.
        piece = text.removeprefix(before) if text.startswith(before) else self.decode(new)
        if new:
            self._ids, self._num_decoded = new, len(new)
        return piece


def pieces(trace: Trace, tokenizer: Any, row: int = 0) -> Iterator[tuple[str, bool]]:
    """The output of a row, piece by piece, each with a flag whether it was drafted."""
    text, drafted = TextPieces(tokenizer.decode), False
    for token, drafted in trace.output(row):
        if piece := text.add(token):
            yield piece, drafted
    if piece := text.rest():
        yield piece, drafted


def shaded_text(trace: Trace, tokenizer: Any, row: int = 0) -> str:
    """A row of a traced call as HTML: the prompt, then accepted tokens and bonus tokens.

    Args:
        trace: of the call.
        tokenizer: the target's.
        row: of the batch.
    """
    prompt = tokenizer.decode(trace.prompt_ids[row], skip_special_tokens=True)
    parts = [f"<span class='prompt'>{escape(prompt)}</span>"]
    for text, drafted in pieces(trace, tokenizer, row):
        kind = "accepted" if drafted else "bonus"
        # A line break has no width: a shaded sign makes it visible.
        shown = escape(text).replace("\n", "↵\n")
        parts.append(f"<span class='{kind}' title='{_TITLES[kind]}'>{shown}</span>")
    return f"<div class='shaded' role='group' aria-label='Text with drafted tokens shaded'>{''.join(parts)}</div>"


_TITLES = {"accepted": "drafted and accepted", "bonus": "the target&#39;s own"}
