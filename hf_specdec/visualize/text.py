"""The text of a traced call as HTML, drafted and accepted tokens shaded apart from the target's own.

After Figure 6 of the SpecBlock paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from hf_specdec.decoding.trace import Trace


class TextPieces:
    """Tokens as text, as they come. A character may be spread over several tokens: it comes with the last of them.

    Args:
        decode: token ids as text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self._ids: list[int] = []  # of the latest piece and of what has no text yet: how a token reads depends on both
        self._told = 0  # how many of them are of that piece

    def add(self, token: int) -> str:
        """The text that this token completes; empty where a character goes on in the next one."""
        self._ids.append(token)
        held = len(self._ids) - self._told
        # A character has at most four bytes, so after four tokens the sign stands for bytes that are no text.
        if self.decode(self._ids).endswith("\N{REPLACEMENT CHARACTER}") and held < 4:
            return ""
        return self.rest()

    def rest(self) -> str:
        """The text of the tokens that have none yet: of a character that was cut off."""
        before, text = self.decode(self._ids[: self._told]), self.decode(self._ids)
        new = self._ids[self._told :]
        # A tokenizer may rewrite what came before: these tokens by themselves then.
        piece = text.removeprefix(before) if text.startswith(before) else self.decode(new)
        if new:
            self._ids, self._told = new, len(new)
        return piece


def pieces(trace: Trace, tokenizer: Any, row: int = 0) -> Iterator[tuple[str, bool]]:
    """The text a row wrote, piece by piece, and whether it was drafted."""
    text, drafted = TextPieces(tokenizer.decode), False
    for token, drafted in trace.output(row):
        if piece := text.add(token):
            yield piece, drafted
    if piece := text.rest():
        yield piece, drafted


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
