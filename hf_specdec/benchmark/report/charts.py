"""Charts as SVG, drawn by hand: bars with whiskers, lines, stacked bars, boxes.

They take their colours from CSS variables of the page, so they follow light and dark, and they never tell things apart
by colour alone: bars carry their names, lines differ in dash and marker, stacked parts in lightness and order. Every
chart has a title and a description for screen readers; the numbers stand in a table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 760
FONT = 12
# Width of a character, in pixels; generous, so that estimates are never too narrow.
CHARACTER = 7.2
DASHES = ("", "7 4", "2 3", "10 3 2 3", "5 2", "1 5", "12 4", "8 2 2 2 2 2")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "ring")


@dataclass(frozen=True)
class Bar:
    """A labelled value with an interval around it."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """A labelled curve of (x, y) points."""

    label: str
    points: Sequence[tuple[float, float]]


def ticks(top: float, count: int = 6) -> list[float]:
    """Round numbers from 0 to at least `top`.

    Example:
        >>> ticks(2.3)
        [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    """
    top = top if top > 0 and math.isfinite(top) else 1.0
    rough = top / (count - 1)
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    return [round(index * step, 10) for index in range(math.ceil(top / step - 1e-9) + 1)]


def number(value: float) -> str:
    """At most three significant digits, no exponent.

    Example:
        >>> number(0.5), number(12.0), number(1234.0)
        ('0.5', '12', '1234')
    """
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str, axis: str, reference: float | None = None) -> str:
    """Horizontal bars, one row each, group below group; whiskers show the interval, `reference` a line.

    Args:
        groups: heading and bars; an empty heading leaves none.
        title: for screen readers.
        axis: what is shown, with its unit.
        reference: value to draw a line at.
    """
    row, heading = 22, 26
    left = _label_width([bar.label for _, own in groups for bar in own])
    height = 8 + sum(row * len(own) + (heading if name else 6) for name, own in groups)
    scale_ticks = ticks(max([bar.high for _, own in groups for bar in own] + [reference or 0.0]))
    right = 64  # for the values behind the longest whisker
    x = _scale(scale_ticks[-1], left, WIDTH - right)
    parts = [_vertical_grid(scale_ticks, x, height)]
    if reference is not None:
        parts.append(f'<line class="reference" x1="{x(reference):.1f}" x2="{x(reference):.1f}" y1="0" y2="{height}"/>')
    y = 8.0
    for name, own in groups:
        if name:
            parts.append(_text(0, y + 14, name, "start", "heading"))
            y += heading
        else:
            y += 6
        for bar in own:
            middle = y + row / 2
            parts.append(_text(left - 8, middle + 4, bar.label, "end"))
            parts.append(
                f'<rect class="bar" x="{x(0):.1f}" y="{y + 3:.1f}" width="{x(bar.value) - x(0):.1f}" '
                f'height="{row - 6}"/>'
            )
            parts.append(_whisker(x(bar.low), x(bar.high), middle))
            parts.append(_text(x(bar.high) + 6, middle + 4, number(bar.value), "start", "value"))
            y += row
    parts.append(_horizontal_axis(scale_ticks, x, height, axis, left, WIDTH - right))
    return _svg("".join(parts), height + 44, title)


def stacked(rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], *, title: str, axis: str) -> str:
    """Horizontal bars of parts, in one order everywhere, from dark to light; the total stands behind each.

    Args:
        rows: label and the parts' values.
        names: of the parts.
        title: for screen readers.
        axis: what is shown, with its unit.
    """
    row = 26
    left = _label_width([label for label, _ in rows])
    height = 8 + row * len(rows)
    scale_ticks = ticks(max(sum(values) for _, values in rows))
    right = 64
    x = _scale(scale_ticks[-1], left, WIDTH - right)
    parts = [_vertical_grid(scale_ticks, x, height)]
    for index, (label, values) in enumerate(rows):
        y = 8 + row * index
        parts.append(_text(left - 8, y + row / 2 + 4, label, "end"))
        total = 0.0
        for part, value in enumerate(values):
            parts.append(
                f'<rect class="part part{part}" x="{x(total):.1f}" y="{y + 3}" height="{row - 6}" '
                f'width="{x(total + value) - x(total):.2f}"><title>{escape(names[part])}: {number(value)}'
                "</title></rect>"
            )
            total += value
        parts.append(_text(x(total) + 6, y + row / 2 + 4, number(total), "start", "value"))
    parts.append(_horizontal_axis(scale_ticks, x, height, axis, left, WIDTH - right))
    legend, rows_high = _legend(
        names,
        height + 50,
        lambda index, px, py: f'<rect class="part part{index}" x="{px}" y="{py - 10}" width="22" height="12"/>',
    )
    return _svg("".join(parts) + legend, height + 50 + rows_high, title)


def boxes(rows: Sequence[tuple[str, Sequence[float]]], *, title: str, axis: str, reference: float | None = None) -> str:
    """One row per label: every value as a dot, quartiles as a box, the median as a line.

    Args:
        rows: label and values.
        title: for screen readers.
        axis: what is shown, with its unit.
        reference: value to draw a line at.
    """
    row = 30
    left = _label_width([label for label, _ in rows])
    height = 8 + row * len(rows)
    scale_ticks = ticks(max([max(values) for _, values in rows] + [reference or 0.0]))
    right = 24
    x = _scale(scale_ticks[-1], left, WIDTH - right)
    parts = [_vertical_grid(scale_ticks, x, height)]
    if reference is not None:
        parts.append(f'<line class="reference" x1="{x(reference):.1f}" x2="{x(reference):.1f}" y1="0" y2="{height}"/>')
    for index, (label, values) in enumerate(rows):
        y = 8 + row * index
        parts.append(_text(left - 8, y + row / 2 + 4, label, "end"))
        ordered = sorted(values)
        low, median, high = (_quantile(ordered, share) for share in (0.25, 0.5, 0.75))
        parts.append(
            f'<rect class="box" x="{x(low):.1f}" y="{y + 5}" width="{max(1.0, x(high) - x(low)):.1f}" '
            f'height="{row - 10}"/>'
            f'<line class="median" x1="{x(median):.1f}" x2="{x(median):.1f}" y1="{y + 3}" y2="{y + row - 3}"/>'
        )
        for place, value in enumerate(ordered):
            offset = (place * 7) % (row - 16) - (row - 16) / 2  # apart from each other, the same in every run
            parts.append(f'<circle class="dot" cx="{x(value):.1f}" cy="{y + row / 2 + offset:.1f}" r="2.2"/>')
    parts.append(_horizontal_axis(scale_ticks, x, height, axis, left, WIDTH - right))
    return _svg("".join(parts), height + 44, title)


def lines(
    curves: Sequence[Line],
    *,
    title: str,
    x_axis: str,
    y_axis: str,
    logarithmic: bool = False,
    reference: float | None = None,
) -> str:
    """Curves over a common axis; they differ in dash and marker, and a legend names them.

    Args:
        curves: at least one point each.
        title: for screen readers.
        x_axis: what x is, with its unit.
        y_axis: what y is, with its unit.
        logarithmic: whether x doubles from tick to tick.
        reference: y to draw a line at.
    """
    left, right, top, height = 62, 16, 12, 280
    xs = sorted({x for curve in curves for x, _ in curve.points})
    y_ticks = ticks(max([y for curve in curves for _, y in curve.points] + [reference or 0.0]))
    bottom = height - 4

    def y(value: float) -> float:
        return bottom - (value / y_ticks[-1]) * (bottom - top)

    place = math.log2 if logarithmic else float
    first, last = place(xs[0]), place(xs[-1])
    reach = last - first or 1.0

    def x(value: float) -> float:
        return left + 14 + (place(value) - first) / reach * (WIDTH - left - right - 28)

    parts = []
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(_text(left - 8, y(tick) + 4, number(tick), "end", "tick"))
    parts.append(f'<line class="axis" x1="{left}" x2="{WIDTH - right}" y1="{bottom}" y2="{bottom}"/>')
    shown = -math.inf
    for tick in xs:
        if x(tick) - shown >= 12 + CHARACTER * len(number(tick)):  # only where it does not run into the one before
            parts.append(_text(x(tick), height + 14, number(tick), "middle", "tick"))
            shown = x(tick)
    parts.append(_text((left + WIDTH - right) / 2, height + 34, x_axis, "middle", "axis-title"))
    parts.append(
        f'<text class="axis-title" text-anchor="middle" transform="translate(14 {(top + bottom) / 2:.0f}) rotate(-90)">'
        f"{escape(y_axis)}</text>"
    )
    if reference is not None:
        at = f"{y(reference):.1f}"
        parts.append(f'<line class="reference" x1="{left}" x2="{WIDTH - right}" y1="{at}" y2="{at}"/>')
    for index, curve in enumerate(curves):
        path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in curve.points)
        parts.append(f'<polyline class="curve series{index % 8}" stroke-dasharray="{_dash(index)}" points="{path}"/>')
        parts += [_marker(index, x(px), y(py)) for px, py in curve.points]
    legend, rows_high = _legend(
        [curve.label for curve in curves],
        height + 56,
        lambda index, px, py: (
            f'<line class="curve series{index % 8}" stroke-dasharray="{_dash(index)}" x1="{px}" '
            f'x2="{px + 30}" y1="{py - 4}" y2="{py - 4}"/>' + _marker(index, px + 15, py - 4)
        ),
    )
    return _svg("".join(parts) + legend, height + 56 + rows_high, title)


def _dash(index: int) -> str:
    return DASHES[index % len(DASHES)]


def _marker(index: int, x: float, y: float) -> str:
    kind, style = MARKERS[index % len(MARKERS)], f'class="marker series{index % 8}"'
    if kind == "circle":
        return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    if kind == "ring":
        return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill-opacity="0"/>'
    if kind == "square":
        return f'<rect {style} x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>'
    shapes = {
        "triangle": "M0,-5 L4.8,4 L-4.8,4 Z",
        "diamond": "M0,-5.4 L5.4,0 L0,5.4 L-5.4,0 Z",
        "cross": "M-4,-4 L4,4 M-4,4 L4,-4",
    }
    return f'<path {style} transform="translate({x:.1f} {y:.1f})" d="{shapes[kind]}"/>'


def _legend(names: Sequence[str], y: float, mark: Callable[[int, float, float], str]) -> tuple[str, int]:
    """Marks with names in columns, and its height."""
    column = 44 + CHARACTER * max(map(len, names)) + 16
    columns = max(1, int(WIDTH // column))
    parts = []
    for index, name in enumerate(names):
        px, py = column * (index % columns) + 4, y + 20 * (index // columns) + 8
        parts.append(mark(index, px, py) + _text(px + 38, py, name, "start"))
    return "".join(parts), 20 * math.ceil(len(names) / columns) + 8


def _label_width(labels: Sequence[str]) -> float:
    return 16 + CHARACTER * max(map(len, labels))


def _scale(top: float, left: float, right: float) -> Callable[[float], float]:
    return lambda value: left + value / top * (right - left)


def _vertical_grid(scale_ticks: Sequence[float], x: Callable[[float], float], height: float) -> str:
    return "".join(
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="0" y2="{height}"/>' for tick in scale_ticks
    )


def _horizontal_axis(
    scale_ticks: Sequence[float], x: Callable[[float], float], height: float, axis: str, left: float, right: float
) -> str:
    parts = [f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{height}" y2="{height}"/>']
    parts += [_text(x(tick), height + 16, number(tick), "middle", "tick") for tick in scale_ticks]
    parts.append(_text((left + right) / 2, height + 36, axis, "middle", "axis-title"))
    return "".join(parts)


def _whisker(low: float, high: float, y: float) -> str:
    return (
        f'<path class="whisker" d="M{low:.1f},{y:.1f} H{high:.1f} M{low:.1f},{y - 4:.1f} V{y + 4:.1f} '
        f'M{high:.1f},{y - 4:.1f} V{y + 4:.1f}"/>'
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(content: str, height: float, title: str) -> str:
    return (
        f'<svg class="chart" role="img" aria-label="{escape(title, quote=True)}" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" font-size="{FONT}">{content}</svg>'
    )
