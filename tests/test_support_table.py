"""The table in docs/support.md has not shrunk: each family is verified as it says, or better."""

from __future__ import annotations

import pytest

from tests.support_table import FILE, KINDS, families, outcome, page, read_page

TABLE = read_page(FILE.read_text())
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


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [name for name, kind in TABLE.items() if kind in VERIFIED])
def test_a_family_is_verified_as_the_table_says(family: str) -> None:
    if family not in families():
        pytest.skip("this version of transformers does not have it")
    kind, reason = outcome(family)
    if kind in ("not built", "no plain decoding"):
        pytest.skip(f"not in this version of transformers: {reason:.80}")
    assert KINDS.index(kind) <= KINDS.index(TABLE[family]), reason
