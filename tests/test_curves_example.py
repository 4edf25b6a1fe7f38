"""Curves as SVG: every point is where its numbers say, and what is written can be read."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

curves_svg = runpy.run_path(str(Path(__file__).parents[1] / "examples/curves.py"))["curves_svg"]

SVG = "{http://www.w3.org/2000/svg}"


def test_points_are_where_their_numbers_say() -> None:
    curves = {"frozen": [(0.0, 1.0), (5.0, 1.5), (10.0, 3.0)], "learning <1>": [(0.0, 2.0), (10.0, 2.0)]}
    root = ElementTree.fromstring(curves_svg("a & b", curves, across="minutes", marks={"C++": 5.0}))
    drawn = [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter(f"{SVG}polyline")
    ]
    (first, middle, last), (flat, end) = drawn
    assert middle[0] - first[0] == pytest.approx(last[0] - middle[0])
    assert (first[1] - middle[1]) * 3 == pytest.approx(middle[1] - last[1], abs=0.3)  # higher values are further up
    assert flat[1] == end[1] == pytest.approx((first[1] + last[1]) / 2, abs=0.2)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a & b", "frozen", "learning <1>", "minutes", "C++", "1", "3"} <= set(texts)


@pytest.mark.parametrize("curves", [{}, {"empty": []}, {name: [(0.0, 1.0)] for name in "abc"}])
def test_what_cannot_be_drawn_raises(curves: dict[str, list[tuple[float, float]]]) -> None:
    with pytest.raises(ValueError, match="cannot be drawn: give 1 to 2 curves"):
        curves_svg("title", curves, across="calls")
