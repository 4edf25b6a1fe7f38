"""Curves over time as SVG, such as the accepted length of two drafters on one stream."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from hf_specdec.visualize.style import COLOURS

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 16, 44, 42  # margins
_STYLES = ("stroke: var(--ink); stroke-dasharray: 5 4", "stroke: var(--curve); stroke-width: 2.5")


def curves_svg(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    across: str,
    marks: Mapping[str, float] | None = None,
) -> str:
    """Draws one or two curves.

    Args:
        title: above the picture.
        curves: points (x, y) by name, ascending in x; the first curve is dashed.
        across: what the horizontal axis shows, with its unit.
        marks: names of places on the horizontal axis, such as where something changed.

    Raises:
        ValueError: there is no point, or there are more than two curves.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points or len(curves) > len(_STYLES):
        raise ValueError(
            f"{len(curves)} curves with {len(points)} points cannot be drawn: give 1 to {len(_STYLES)} curves with "
            "points."
        )
    last = max(x for x, _ in points) or 1.0
    lowest, highest = math.floor(min(y for _, y in points)), math.ceil(max(y for _, y in points))
    highest = max(highest, lowest + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across_px = _LEFT + x / last * (_WIDTH - _LEFT - _RIGHT)
        return across_px, _HEIGHT - _BOTTOM - (y - lowest) / (highest - lowest) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>']
    for tick in range(5):
        y = lowest + (highest - lowest) * tick / 4
        (left, height), (right, _) = place(0, y), place(last, y)
        parts.append(f'<path class="grid" d="M{left:.1f},{height:.1f} H{right:.1f}"/>')
        parts.append(f'<text x="{left - 8:.1f}" y="{height + 4:.1f}" text-anchor="end">{y:g}</text>')
        x, bottom = place(last * tick / 4, lowest)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{last * tick / 4:.3g}</text>')
    for name, x in (marks or {}).items():
        (at, top), (_, bottom) = place(x, highest), place(x, lowest)
        parts.append(f'<path class="grid" d="M{at:.1f},{top:.1f} V{bottom:.1f}"/>')
        parts.append(f'<text x="{at + 4:.1f}" y="{top + 12:.1f}">{escape(name)}</text>')
    for index, (name, curve) in enumerate(curves.items()):
        style = f'style="fill: none; {_STYLES[index]}"'
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        parts.append(f'<polyline {style} points="{drawn}"/>')
        x = _LEFT + 240 * index
        parts.append(f'<path {style} d="M{x},32 h28"/><text x="{x + 34}" y="36">{escape(name)}</text>')
    parts.append(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>')
    own = ":root { --curve: #0a7d4f; } svg.curves { font-family: sans-serif; background: var(--paper); } "
    own += "svg.curves text { fill: var(--ink); } svg.curves .grid { stroke: var(--grid); fill: none; }"
    return (
        f'<svg class="curves" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title, quote=True)}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" font-size="12">'
        f"<style>{COLOURS}{own}</style><title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
