"""The draft tree of a round as SVG: tokens, probabilities, the accepted path, and the origin of each node.

After Figure 7 of the SpecBlock paper. Depth increases to the right; siblings are in the drafter's order, downwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from hf_specdec.decoding.trace import TracedRound
from hf_specdec.visualize.style import COLOURS, FORWARDS, PICTURES

_CHARACTER = 7.4  # pixels, of a monospace font of 12 pixels
_ROW, _GAP, _NODE = 40, 38, 30
_MAX_CHARACTERS = 14  # of a token


@dataclass
class Shown:
    """A drawn node: its position, and the number of its children that are not drawn."""

    node: int
    depth: int
    row: float
    children: list[Shown]
    hidden: int = 0


def layout(traced: TracedRound, most_children: int, most_rows: int) -> tuple[Shown, int]:
    """Chooses and places the drawn nodes. Each leaf has its own row; a parent is in the row of its first child.

    Args:
        traced: the round.
        most_children: drawn per node; accepted ones are always drawn.
        most_rows: of the picture; beyond them, only accepted nodes are drawn.

    Returns:
        The root, and the number of rows.
    """
    taken, below = set(traced.path), children_of(traced)
    rows = 0

    def place(node: int, depth: int) -> Shown:
        nonlocal rows
        children = below[node]
        has_space = rows < most_rows
        drawn = [child for rank, child in enumerate(children) if child in taken or (has_space and rank < most_children)]
        # The accepted child is first, so that the path is a straight line.
        drawn.sort(key=lambda child: child not in taken)
        shown = Shown(node, depth, float(rows), [])
        for child in drawn:
            if shown.children:
                if rows >= most_rows and child not in taken:
                    break
                rows += 1
            shown.children.append(place(child, depth + 1))
        shown.hidden = len(children) - len(shown.children)
        if shown.hidden and shown.children:
            rows += 1  # for their number; without drawn children, it is to the right of the node
        return shown

    root = place(0, 0)
    return root, rows + 1


def children_of(traced: TracedRound) -> dict[int, list[int]]:
    """The children of each node, in the drafter's order."""
    below: dict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(traced.parents):
        below[parent].append(node)
    return below


def tree_svg(
    traced: TracedRound,
    decode: Callable[[int], str],
    *,
    most_children: int = 4,
    most_rows: int = 24,
    standalone: bool = True,
) -> str:
    """Draws a round.

    Args:
        traced: the round.
        decode: a token id as text.
        most_children: drawn per node; the picture gives the number of the others.
        most_rows: approximate limit of the rows.
        standalone: whether the SVG contains the styles; False inside a page that has them.
    """
    root, rows = layout(traced, most_children, most_rows)
    taken, depths = set(traced.path), traced.depths
    names = [label(decode(token)) for token in traced.token_ids]
    # A column is as wide as its widest node.
    drawn = list(_subtree(root))
    widths: dict[int, float] = {}
    for shown in drawn:
        text = len(names[shown.node]) + 2  # the tick
        note = len(_note(traced, shown.node))
        more = len(_more(shown.hidden)) * 0.85 - 5 if shown.hidden else 0
        widths[shown.depth] = max(widths.get(shown.depth, 0.0), text * _CHARACTER + 14, note * 6.6 + 14)
        widths[shown.depth + 1] = max(widths.get(shown.depth + 1, 0.0), more * _CHARACTER)
    starts, x = {}, 4.0
    for depth in sorted(widths):
        starts[depth] = x
        x += widths[depth] + _GAP
    top = 26
    edges: list[str] = []
    nodes = [
        f'<text class="small" x="{starts[depth]:.1f}" y="14">{f"depth {depth}" if depth else "root"}</text>'
        for depth in sorted({shown.depth for shown in drawn})
    ]
    for shown in drawn:
        left, y = starts[shown.depth], top + _ROW * shown.row
        width = widths[shown.depth]
        for child in shown.children:
            own, to = starts[child.depth], top + _ROW * child.row + _NODE / 2
            bend = own - _GAP / 2
            style, place = ("edge taken", len(edges)) if child.node in taken else ("edge", 0)
            line = f"M{left + width:.1f},{y + _NODE / 2:.1f} H{bend:.1f} V{to:.1f} H{own:.1f}"
            edges.insert(place, f'<path class="{style}" d="{line}"/>')  # the accepted path is drawn on top
        nodes.append(
            _draw(traced, shown.node, names[shown.node], left, y, width, shown.node in taken or shown.node == 0)
        )
        if shown.hidden:
            below = max(each.row for each in _subtree(shown)) + 1 if shown.children else shown.row
            nodes.append(
                f'<text class="more" x="{starts[shown.depth + 1]:.1f}" y="{top + _ROW * below + 18:.1f}">'
                f"{_more(shown.hidden)}</text>"
            )
    bonus = label(decode(traced.bonus_id))
    accepted = " ".join(names[node] for node in traced.path) or "nothing"
    summary = f"{len(names) - 1} drafted nodes, depth {max(depths)}; accepted: {accepted}; bonus token: {bonus}"
    height = top + _ROW * rows + 6
    style = f"<style>{COLOURS}{PICTURES}</style>" if standalone else ""
    return (
        f'<svg class="tree" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(summary, quote=True)}" '
        f'viewBox="0 0 {x:.0f} {height:.0f}" width="{x:.0f}" height="{height:.0f}" font-size="12">'
        f"{style}<title>{escape(summary)}</title>{''.join(edges)}{''.join(nodes)}</svg>"
    )


def tree_legend(traced: TracedRound, decode: Callable[[int], str]) -> str:
    """A legend for the picture of a round."""
    parts = [f"root: {label(decode(traced.token_ids[0]))}; ✓ and thick lines: accepted"]
    parts.append(f"then the bonus token {label(decode(traced.bonus_id))}, the target's own choice")
    if traced.probs is not None:
        parts.append("p: the drafter's probability after the path above")
    if traced.sources is not None:
        parts.append("names and colour: the drafters that proposed the node")
    if traced.forwards is not None:
        parts.append(f"f and colour: which of the {max(traced.forwards)} drafter forwards made the node")
    return "; ".join(parts) + "."


def label(text: str) -> str:
    """A token's text with visible blanks, shortened to fit.

    Examples:
        >>> label(" a"), label(chr(10)), label("x" * 20)
        ('·a', '↵', 'xxxxxxxxxxxxx…')
    """
    text = text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·").replace("\r", "␍")
    text = "".join(character if character.isprintable() else "�" for character in text)
    return (text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…") or "∅"


def _subtree(shown: Shown) -> list[Shown]:
    return [shown, *(below for child in shown.children for below in _subtree(child))]


def _more(hidden: int) -> str:
    return f"{hidden} more sibling{'s' if hidden > 1 else ''}"


def _note(traced: TracedRound, node: int) -> str:
    if node == 0:
        return "root"
    parts = []
    if traced.sources is not None:
        parts.append(traced.sources[node])
    if traced.forwards is not None:
        parts.append(f"f{traced.forwards[node]}")
    if traced.probs is not None:
        parts.append(f"p {traced.probs[node]:.2f}")
    return " ".join(parts)


def _draw(traced: TracedRound, node: int, name: str, x: float, y: float, width: float, taken: bool) -> str:
    origin = 0 if node == 0 or traced.origins is None else (traced.origins[node] - 1) % FORWARDS + 1
    style = "node taken" if taken else "node"
    tick = " ✓" if taken and node else ""
    note = _note(traced, node) if node else ""
    at = y + (14 if note else 19)
    return (
        f'<rect class="{style} forward{origin}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_NODE}" rx="5"/>'
        f'<text x="{x + 7:.1f}" y="{at:.1f}">{escape(name)}{tick}</text>'
        + (f'<text class="small" x="{x + 7:.1f}" y="{y + 26:.1f}">{escape(note)}</text>' if note else "")
    )
