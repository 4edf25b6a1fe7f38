from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hf_specdec.decoding.trace import Trace, TracedRound
from hf_specdec.visualize import shaded_text, terminal_text, terminal_tree, trace_page, tree_svg
from hf_specdec.visualize.style import _DARK, _LIGHT
from hf_specdec.visualize.text import TextPieces
from hf_specdec.visualize.tree import layout
from tests.browser import look_at, needs_browser
from tests.method_table import METHODS
from tests.targets import make_target, one_prompt, tiny_tokenizer

#     0 root
#     |- 1 (accepted)   |- 2   |- 3
#     '- 4 below 1, 5 (accepted) below 1
ROUND = TracedRound(
    row=0,
    position=9,
    token_ids=[7, 1, 2, 3, 4, 5],
    parents=[-1, 0, 0, 0, 1, 1],
    path=[1, 5],
    bonus_id=8,
    num_kept=3,
    probs=[1.0, 0.5, 0.25, 0.1, 0.6, 0.3],
    forwards=[0, 1, 1, 1, 2, 2],
)


def decode(token: int) -> str:
    return f"t{token}"


@pytest.fixture(scope="module")
def trace() -> Trace:
    drafter = METHODS["eagle3"](make_target())
    drafter.trace = Trace()
    make_target().generate(**one_prompt(), assistant_model=drafter, max_new_tokens=24, do_sample=False)
    return drafter.trace


def test_the_tree_shows_tokens_probabilities_forwards_and_the_accepted_path() -> None:
    svg = tree_svg(ROUND, decode)
    texts = [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"t7", "t1 ✓", "t5 ✓", "t2", "t3", "t4"} <= set(texts)
    assert {"f1 p 0.50", "f2 p 0.30"} <= set(texts)
    assert svg.count("node taken") == 3, "root and accepted nodes are marked"
    assert svg.count('"edge taken"') == 2
    assert 'aria-label="5 drafted nodes, depth 2; accepted: t1 t5; bonus token: t8"' in svg


def test_nodes_that_are_not_drawn_are_counted_and_accepted_nodes_are_always_drawn() -> None:
    wide = TracedRound(0, 0, [0, *range(1, 13)], [-1] + [0] * 12, [12], 9, 2)
    svg = tree_svg(wide, decode, most_children=3)
    assert "t12 ✓" in svg
    assert "8 more siblings" in svg
    root, _ = layout(wide, most_children=3, most_rows=24)
    assert [child.node for child in root.children] == [12, 1, 2, 3]


def test_no_two_nodes_share_a_place_and_the_accepted_path_is_a_straight_line() -> None:
    root, rows = layout(ROUND, most_children=4, most_rows=24)
    places, row_of, pending = set(), {}, [root]
    while pending:
        shown = pending.pop()
        assert (shown.depth, shown.row) not in places
        places.add((shown.depth, shown.row))
        row_of[shown.node] = shown.row
        pending += shown.children
    assert row_of[0] == row_of[1] == row_of[5]
    assert max(row_of.values()) < rows


def test_a_big_tree_is_drawn_within_its_rows() -> None:
    tokens = list(range(200))
    parents = [-1] + [(node - 1) // 4 for node in tokens[1:]]
    big = TracedRound(0, 0, tokens, parents, [1, 5, 21, 85], 9, 5)
    _, rows = layout(big, most_children=4, most_rows=12)
    assert rows < 24
    assert "t85 ✓" in tree_svg(big, decode, most_rows=12)


def test_shaded_text_is_the_output_with_different_shades_for_drafted_tokens(trace: Trace) -> None:
    tokenizer = tiny_tokenizer()
    html = shaded_text(trace, tokenizer)
    kinds = re.findall(r"<span class='(accepted|bonus)'[^>]*>([^<]*)</span>", html)
    assert "".join(text for _, text in kinds) == tokenizer.decode([token for token, _ in trace.output()])
    assert [kind == "accepted" for kind, _ in kinds] == [drafted for _, drafted in trace.output()]


def test_a_character_is_returned_with_the_last_of_its_tokens() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    pieces = TextPieces(decode)
    assert [pieces.add(byte) for byte in "a\u00e9\N{SNOWMAN}b".encode()] == [
        "a",
        "",
        "\u00e9",
        "",
        "",
        "\N{SNOWMAN}",
        "b",
    ]
    assert [pieces.add(byte) for byte in (0xFF, 0xFF, 0xFF, 0xFF, 0x61)][3:] == ["\N{REPLACEMENT CHARACTER}" * 4, "a"]
    assert pieces.add(0xC3) == ""
    assert pieces.rest() == "\N{REPLACEMENT CHARACTER}"
    assert pieces.rest() == ""


def test_text_in_a_terminal_is_the_same_without_its_colours(trace: Trace) -> None:
    tokenizer = tiny_tokenizer()
    coloured, plain = (terminal_text(trace, tokenizer, colour=colour) for colour in (True, False))
    uncoloured = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert uncoloured == re.sub(r"[\[\]]", "", plain)
    assert uncoloured.endswith(tokenizer.decode([token for token, _ in trace.output()]))
    assert plain.count("[") == sum(drafted for _, drafted in trace.output())


def test_a_tree_in_a_terminal_has_a_line_per_node() -> None:
    text = terminal_tree(ROUND, decode, colour=False)
    assert text.splitlines() == [
        "t7",
        "├─ t1 ✓  (0.50, forward 1)",
        "│  ├─ t4  (0.60, forward 2)",
        "│  └─ t5 ✓  (0.30, forward 2)",
        "├─ t2  (0.25, forward 1)",
        "└─ t3  (0.10, forward 1)",
        "bonus token: t8",
    ]
    coloured = terminal_tree(ROUND, decode)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == text
    assert "\x1b[1m" in coloured


def lightness(colour: str) -> float:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


@pytest.mark.parametrize("colours", [_LIGHT, _DARK], ids=["light", "dark"])
def test_text_can_be_read_on_every_colour(colours: dict[str, str]) -> None:
    paper = lightness(colours["paper"])
    for name in ("ink", "muted"):
        assert abs(lightness(colours[name]) - paper) > 0.35, f"{name} can be read on paper"
    for name in ("accepted", "bonus", *(f"forward{index}" for index in range(9))):
        assert abs(lightness(colours[name]) - lightness(colours["ink"])) > 0.35, f"ink can be read on {name}"


@needs_browser
def test_the_browser_check_finds_overlaps_and_complaints(tmp_path: Path) -> None:
    texts = "<text x='5' y='20'>one</text><text x='8' y='20'>two</text><text x='95' y='20'>three</text>"
    html = (
        "<!doctype html><html lang='en'><body><svg aria-label='a' width='100' height='40'>"
        f"{texts}</svg><script>console.error('broken')</script></body></html>"
    )
    seen = look_at(html, tmp_path)
    assert seen.problems == ['"one" lies on "two" in "a"', '"three" sticks out of "a"']
    assert len(seen.console) == 1
    assert "broken" in seen.console[0]


@needs_browser
def test_a_browser_shows_trees_without_overlaps_or_complaints(trace: Trace, tmp_path: Path) -> None:
    seen = look_at(trace_page(trace, tiny_tokenizer(), rounds=range(3)), tmp_path)
    assert seen.console == []
    assert seen.problems == []
    assert seen.counts["svg"] == 3
