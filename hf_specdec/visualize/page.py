"""A traced call as one HTML page without other files: the shaded text, then the trees of some rounds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from hf_specdec.decoding.trace import Trace
from hf_specdec.visualize.style import COLOURS, PICTURES
from hf_specdec.visualize.text import shaded_text
from hf_specdec.visualize.tree import tree_legend, tree_svg

_STYLE = f"""
{COLOURS}
body {{ margin: 0 auto; max-width: 1080px; padding: 20px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }}
.remark {{ color: var(--muted); font-size: 12px; }}
{PICTURES}
"""


def pictures(trace: Trace, tokenizer: Any, rounds: Sequence[int] = (0,), row: int = 0) -> str:
    """The shaded text and the trees of some rounds as HTML, for a page with the styles of `trace_page`.

    Args:
        trace: of the call.
        tokenizer: the target's.
        rounds: indices of the row's rounds; negative ones count from the end. Missing ones are ignored.
        row: of the batch.
    """
    own = [traced for traced in trace.rounds if traced.row == row]

    def decode(token: int) -> str:
        return str(tokenizer.decode([token]))

    drafted = sum(was_drafted for _, was_drafted in trace.output(row))
    parts = [
        shaded_text(trace, tokenizer, row),
        f"<p class='remark'>Shaded: drafted and accepted ({drafted} of {len(trace.output(row))} new tokens); "
        "underlined: the target's own choice.</p>",
    ]
    for index in dict.fromkeys(index % len(own) for index in rounds if -len(own) <= index < len(own)):
        traced = own[index]
        parts.append(
            f"<div class='picture'>{tree_svg(traced, decode, standalone=False)}</div>"
            f"<p class='remark'>Round {index + 1} of {len(own)}. {escape(tree_legend(traced, decode))}</p>"
        )
    return "".join(parts)


def trace_page(
    trace: Trace, tokenizer: Any, *, title: str = "What speculation did", rounds: Sequence[int] = range(4), row: int = 0
) -> str:
    """A whole page: see `pictures`."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='icon' href='data:,'><title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>{pictures(trace, tokenizer, rounds, row)}</body></html>\n"
    )
