"""The pictures as coloured text for a terminal; readable without colours too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_specdec.decoding.trace import Trace, TracedRound
from hf_specdec.visualize.text import pieces
from hf_specdec.visualize.tree import children_of, label

_ACCEPTED, _BONUS, _BOLD, _FAINT, _END = "\x1b[30;42m", "\x1b[4;31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
_FORWARDS = ("\x1b[36m", "\x1b[33m", "\x1b[32m", "\x1b[35m", "\x1b[34m", "\x1b[31m")


def terminal_text(trace: Trace, tokenizer: Any, row: int = 0, *, colour: bool = True) -> str:
    """The output of a row: accepted tokens on green, the target's own choices in red and underlined.

    Args:
        trace: of the call.
        tokenizer: the target's.
        row: of the batch.
        colour: whether to use colours; otherwise accepted tokens are in brackets.
    """
    prompt = tokenizer.decode(trace.prompt_ids[row], skip_special_tokens=True)
    parts = [f"{_FAINT}{prompt}{_END}" if colour else prompt]
    for text, drafted in pieces(trace, tokenizer, row):
        if colour:
            # A colour ends before a line break: otherwise a terminal fills the rest of the line with it.
            style = _ACCEPTED if drafted else _BONUS
            parts.append("\n".join(f"{style}{part}{_END}" if part else "" for part in text.split("\n")))
        else:
            parts.append(f"[{text}]" if drafted else text)
    return "".join(parts)


def terminal_tree(
    traced: TracedRound, decode: Callable[[int], str], *, colour: bool = True, most_children: int = 6
) -> str:
    """A round's draft tree, one node per line: accepted ones have a tick and are bold; colours show the origin.

    Args:
        traced: the round.
        decode: a token id as text.
        colour: whether to use colours.
        most_children: shown per node; accepted ones are always shown.
    """
    taken, below = set(traced.path), children_of(traced)
    lines: list[str] = []

    def write(node: int, lead: str, branch: str) -> None:
        text = label(decode(traced.token_ids[node])) + (" ✓" if node in taken else "")
        parts = ((traced.probs, "{:.2f}"), (traced.sources, "{}"), (traced.forwards, "forward {}"))
        if node and (notes := [form.format(values[node]) for values, form in parts if values is not None]):
            text += f"  ({', '.join(notes)})"
        if colour:
            style = _BOLD if node in taken or node == 0 else ""
            if node and traced.origins is not None:
                style += _FORWARDS[(traced.origins[node] - 1) % len(_FORWARDS)]
            text = f"{style}{text}{_END}" if style else text
        lines.append(lead + branch + text)
        children = below[node]
        shown = [child for rank, child in enumerate(children) if rank < most_children or child in taken]
        hidden = len(children) - len(shown)
        deeper = lead + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        for index, child in enumerate(shown):
            last = index == len(shown) - 1 and not hidden
            write(child, deeper, "└─ " if last else "├─ ")
        if hidden:
            lines.append(f"{deeper}└─ … {hidden} more")

    write(0, "", "")
    lines.append(f"bonus token: {label(decode(traced.bonus_id))}")
    return "\n".join(lines)
