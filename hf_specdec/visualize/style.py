"""Colours as CSS variables, and the styles of trees and shaded text.

No information is in colour alone: accepted nodes have a thick border and a tick, nodes show the number of their
forward, bonus tokens are underlined.
"""

from __future__ import annotations

FORWARDS = 8  # colours, used in rotation; nodes also show the number of their forward

_LIGHT = {
    "paper": "#ffffff", "ink": "#1b1f24", "muted": "#57606a", "grid": "#d8dee4",
    "accepted": "#b7e4c0", "bonus": "#f6c9c0",
    "forward0": "#f4f6f8", "forward1": "#cfe3f5", "forward2": "#fbe3b5", "forward3": "#d3ecd0", "forward4": "#ecd5ea",
    "forward5": "#f7d4cb", "forward6": "#d6dcf2", "forward7": "#e6e3c8", "forward8": "#dfdfdf",
}  # fmt: skip
_DARK = {
    "paper": "#14181d", "ink": "#e8ecf0", "muted": "#a3adb8", "grid": "#39424c",
    "accepted": "#215732", "bonus": "#6b2f27",
    "forward0": "#232a32", "forward1": "#1f4160", "forward2": "#594716", "forward3": "#26502a", "forward4": "#52294f",
    "forward5": "#5d3025", "forward6": "#323d6b", "forward7": "#4a471d", "forward8": "#454545",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


COLOURS = f"""
:root {{ color-scheme: light dark; {_variables(_LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}
@media print {{ * {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }} }}
"""

PICTURES = """
.picture { overflow-x: auto; }
svg.tree { font-family: ui-monospace, "DejaVu Sans Mono", monospace; max-width: none; }
svg.tree text { fill: var(--ink); }
svg.tree .edge { stroke: var(--muted); fill: none; }
svg.tree .edge.taken { stroke: var(--ink); stroke-width: 3; }
svg.tree .node { stroke: var(--muted); }
svg.tree .node.taken { stroke: var(--ink); stroke-width: 3; }
svg.tree .small { font-size: 10px; fill: var(--ink); }
svg.tree .more { font-size: 10px; fill: var(--muted); font-style: italic; }
.shaded { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; white-space: pre-wrap;
  overflow-wrap: anywhere; border: 1px solid var(--grid); padding: 10px; line-height: 1.7; }
.shaded span { border-right: 1px solid var(--paper); }
.shaded .prompt { color: var(--muted); }
.shaded .accepted { background: var(--accepted); }
.shaded .bonus { background: var(--bonus); text-decoration: underline; }
""" + "".join(f"svg.tree .forward{index} {{ fill: var(--forward{index}); }}\n" for index in range(FORWARDS + 1))
