"""The tables in docs/support.md have not shrunk: each family is verified as they say, or better."""

from __future__ import annotations

import pytest

from tests import multimodal
from tests.support_table import (
    COLUMNS,
    FILE,
    KINDS,
    UNTESTED,
    families,
    multimodal_outcome,
    multimodal_part,
    outcome,
    page,
    read_multimodal_part,
    read_page,
)

TABLE = read_page(FILE.read_text())
PICTURES = read_multimodal_part(FILE.read_text())
VERIFIED = KINDS[: KINDS.index("plain") + 1]


def test_the_table_tells_of_most_families() -> None:
    kinds = list(TABLE.values())
    decoding = [kind for kind in kinds if kind not in ("no plain decoding", "not built")]
    assert len(decoding) > 120
    assert kinds.count("other tokens") == kinds.count("error") == 0
    assert kinds.count("trees") >= 0.9 * len(decoding)


def test_the_page_holds_every_family_with_its_kind() -> None:
    found = {"llama": ("trees", ""), "bart-x": ("trees", ""), "odd": ("not built", "A `b` | <c>. And more.")}
    assert read_page(page(found)) == {name: kind for name, (kind, _) in found.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [name for name, kind in TABLE.items() if kind in VERIFIED])
def test_a_family_is_verified_as_the_table_says(family: str) -> None:
    if family not in families():
        pytest.skip("this version of transformers does not have it")
    kind, reason = outcome(family)
    if kind in ("not built", "no plain decoding"):
        pytest.skip(f"not in this version of transformers: {reason:.80}")
    assert KINDS.index(kind) <= KINDS.index(TABLE[family]), reason


def test_the_second_table_tells_of_most_families_that_decode_with_pictures() -> None:
    cells = [cell for each in PICTURES.values() for cell in each if cell]
    assert len(PICTURES) > 70
    assert sum(bool(each[COLUMNS.index("one picture")]) for each in PICTURES.values()) > 45
    assert cells.count("other tokens") == cells.count("error") == 0
    assert cells.count("trees") >= 0.95 * len(cells)


def test_the_second_table_holds_every_family_that_was_tested() -> None:
    found = {
        "llava": (" / ".join(["trees"] * 4), ""),
        "odd": ("trees / plain / no plain decoding / chains", "Because `b` | <c>. And more."),
        "unknown": (" / ".join(["not built"] * 4), "no"),
    }
    text = page({"llama": ("trees", "")}) + multimodal_part(found)
    assert read_multimodal_part(text) == {"llava": ["trees"] * 4, "odd": ["trees", "plain", "", "chains"]}
    assert read_page(text) == {"llama": "trees"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", PICTURES)
def test_a_family_is_verified_with_pictures_as_the_table_says(family: str) -> None:
    if family not in multimodal.families():
        pytest.skip("this version of transformers does not have it")
    kinds, reason = multimodal_outcome(family)
    pairs = [each for each in zip(kinds.split(" / "), PICTURES[family], strict=True) if each[1]]
    if all(found in UNTESTED for found, _ in pairs):
        pytest.skip(f"not in this version of transformers: {reason:.80}")
    for found, said in pairs:
        assert KINDS.index(found) <= KINDS.index(said), reason
