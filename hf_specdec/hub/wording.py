"""Text from checkpoints of others, as it may be shown in a terminal or an error."""

from __future__ import annotations


def printable(text: str, most: int = 1000) -> str:
    r"""The text without control characters, which a terminal would obey, and cut where it is long.

    Args:
        text: of any origin.
        most: characters that are kept.

    Example:
        >>> printable("a\x1b[2Jb"), printable("abcdef", 3)
        ('a\\x1b[2Jb', 'abc... (6 characters)')
    """
    kept = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:most])
    return kept if len(text) <= most else f"{kept}... ({len(text)} characters)"
