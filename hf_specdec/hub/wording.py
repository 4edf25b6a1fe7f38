"""Text from checkpoints, made safe to show in a terminal or an error."""

from __future__ import annotations


def printable(text: str, most: int = 1000) -> str:
    r"""The text with control characters escaped, truncated to `most` characters.

    Args:
        text: text of any origin, which may hold escape sequences of terminals.
        most: number of characters to keep.

    Examples:
        >>> printable("a\x1b[2Jb"), printable("abcdef", 3)
        ('a\\x1b[2Jb', 'abc... (6 characters)')
    """
    kept = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:most])
    return kept if len(text) <= most else f"{kept}... ({len(text)} characters)"
