"""Charts as SVG by matplotlib: bars with whiskers, stacked bars, boxes, lines.

Colours are CSS variables of the page, so charts follow its light and dark theme. No information is in colour alone:
bars have names, lines differ in dash and marker, stacked parts in lightness and order. Every chart has a description
for screen readers; the page shows its numbers in a table.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

WIDTH = 760  # CSS pixels; a matplotlib point is one pixel here
SERIES = 8  # colours of lines, used in rotation
DASHES: tuple[Any, ...] = ("-", (0, (7, 4)), (0, (2, 3)), (0, (10, 3, 2, 3)), (0, (5, 2)), (0, (1, 5)))
MARKERS = ("o", "s", "^", "D", "X", "v", "P")
_VARIABLES = (
    "ink", "muted", "grid", "soft", "fill", *(f"step{index}" for index in range(6)),
    *(f"series{index}" for index in range(SERIES)),
)  # fmt: skip
# matplotlib accepts only numbers as colours: each variable has a number, which `_svg` replaces.
_COLOURS = {name: f"#0102{index:02x}" for index, name in enumerate(_VARIABLES, start=1)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 12,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.labelweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.handlelength": 4,
    "xtick.labelsize": 11,
    "grid.color": _COLOURS["grid"],
    "xtick.color": _COLOURS["muted"],
    "ytick.color": _COLOURS["muted"],
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "ytick.labelcolor"), _COLOURS["ink"]),
}


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


def number(value: float) -> str:
    """At most three significant digits, no exponent.

    Example:
        >>> number(0.5), number(12.0), number(1234.0)
        ('0.5', '12', '1234')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str, axis: str, reference: float) -> str:
    """Horizontal bars in groups; whiskers show the interval.

    Args:
        groups: heading and bars; an empty heading is not shown.
        title: for screen readers.
        axis: what is shown, with its unit.
        reference: value to draw a line at.
    """
    with matplotlib.rc_context(_STYLE):
        rows = sum(len(own) + bool(name) for name, own in groups)
        figure, axes = _axes(rows, axis)
        positions, labels, row = [], [], 0
        for name, own in groups:
            if name:
                axes.text(0, row, name, weight="bold", va="center")
                row += 1
            for bar in own:
                axes.barh(row, bar.value, 0.7, color=_COLOURS["fill"])
                interval = [[bar.value - bar.low], [bar.high - bar.value]]
                axes.errorbar(bar.value, row, xerr=interval, color=_COLOURS["ink"], capsize=4)
                _annotate(axes, bar.high, row, number(bar.value))
                positions.append(row)
                labels.append(bar.label)
                row += 1
        highest = max([bar.high for _, own in groups for bar in own] + [reference])
        _rows(axes, positions, labels, rows, highest, reference)
        return _svg(figure, title)


def stacked(rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], *, title: str, axis: str) -> str:
    """Horizontal bars of at most six parts, in the same order everywhere, from dark to light, with their total.

    Args:
        rows: label and the parts' values.
        names: of the parts.
        title: for screen readers.
        axis: what is shown, with its unit.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(len(rows), axis, legend=len(names))
        positions = list(range(len(rows)))
        starts = [0.0] * len(rows)
        for part, name in enumerate(names):
            widths = [values[part] for _, values in rows]
            colours: dict[str, Any] = {"facecolor": _COLOURS[f"step{part}"], "edgecolor": _COLOURS["ink"]}
            axes.barh(positions, widths, 0.75, left=starts, label=name, **colours)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for row, total in enumerate(starts):
            _annotate(axes, total, row, number(total))
        _rows(axes, positions, [label for label, _ in rows], len(rows), max(starts))
        figure.legend(loc="outside lower left", ncols=len(names))
        return _svg(figure, title)


def boxes(rows: Sequence[tuple[str, Sequence[float]]], *, title: str, axis: str, reference: float) -> str:
    """One row per label: every value as a dot, quartiles as a box, the median as a line.

    Args:
        rows: label and values.
        title: for screen readers.
        axis: what is shown, with its unit.
        reference: value to draw a line at.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(len(rows), axis)
        positions = list(range(len(rows)))
        axes.boxplot(
            [list(values) for _, values in rows], orientation="horizontal", positions=positions, widths=0.7, whis=0,
            showfliers=False, showcaps=False, patch_artist=True, manage_ticks=False,
            boxprops={"facecolor": _COLOURS["soft"], "edgecolor": _COLOURS["ink"]},
            medianprops={"color": _COLOURS["ink"], "linewidth": 3},
            whiskerprops={"color": _COLOURS["ink"]},
        )  # fmt: skip
        dot: dict[str, Any] = {
            "color": _COLOURS["fill"],
            "markeredgecolor": _COLOURS["ink"],
            "markersize": 4,
            "markeredgewidth": 0.5,
        }
        for row, (_, values) in enumerate(rows):
            # The heights of the dots differ, equally in every run, so that equal values stay visible.
            heights = [row + (index * 7 % 15 - 7) / 25 for index in range(len(values))]
            axes.plot(sorted(values), heights, "o", **dot)
        highest = max(reference, *(max(values) for _, values in rows))
        _rows(axes, positions, [label for label, _ in rows], len(rows), highest, reference)
        return _svg(figure, title)


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
        logarithmic: whether x is on a logarithmic scale, with a tick at each value.
        reference: y to draw a line at.
    """
    with matplotlib.rc_context(_STYLE):
        columns = max(1, WIDTH // (80 + 8 * max(len(curve.label) for curve in curves)))
        height = 340 + 20 * -(-len(curves) // columns)
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        axes = figure.add_subplot(xlabel=x_axis, ylabel=y_axis)
        axes.grid(axis="y")
        for index, curve in enumerate(curves):
            style: dict[str, Any] = {
                "color": _COLOURS[f"series{index % SERIES}"],
                "linestyle": DASHES[index % len(DASHES)],
            }
            axes.plot(
                *zip(*curve.points, strict=True), marker=MARKERS[index % len(MARKERS)], label=curve.label, **style
            )
        if reference is not None:
            axes.axhline(reference, color=_COLOURS["ink"], linestyle="--", linewidth=1)
        axes.set_ylim(bottom=0)
        if logarithmic:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for curve in curves for x, _ in curve.points})
            axes.set_xticks(ticks, [number(x) for x in ticks])
            axes.minorticks_off()
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside lower left", ncols=columns)
        return _svg(figure, title)


def _axes(rows: int, axis: str, *, legend: int = 0) -> tuple[Figure, Axes]:
    """A figure for horizontal bars, with space for a legend."""
    figure = Figure(figsize=(WIDTH / 72, (24 * rows + 60 + 24 * bool(legend)) / 72), layout="constrained")
    axes = figure.add_subplot(xlabel=axis)
    axes.grid(axis="x")
    return figure, axes


def _annotate(axes: Axes, x: float, row: int, text: str) -> None:
    axes.annotate(text, (x, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=11)


def _rows(
    axes: Axes, positions: list[int], labels: list[str], rows: int, highest: float, reference: float | None = None
) -> None:
    """Labels and limits of horizontal bars: the first row at the top, and space for the text after the longest."""
    axes.set_yticks(positions, labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * highest or 1.0)
    if reference is not None:
        axes.axvline(reference, color=_COLOURS["ink"], linestyle="--", linewidth=1)


def _svg(figure: Figure, title: str) -> str:
    """The figure as an SVG element for HTML: without ids that other charts may also have, colours as CSS variables."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawing = file.getvalue()
    content = drawing[drawing.index(">", drawing.index("<svg")) + 1 : drawing.rindex("</svg>")]
    content = re.sub(r"<style.*?</style>", "", content, flags=re.DOTALL)
    content = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", content).replace("xlink:href", "href")
    for name, colour in _COLOURS.items():
        content = content.replace(colour, f"var(--{name})")
    height = round(72 * figure.get_figheight())
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title, quote=True)}" '
        f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">{content}</svg>'
    )
