"""The table in docs/support.md has not shrunk: each family is verified as it says, or better."""

from __future__ import annotations

import re

import pytest

from tests.support_table import FILE, KINDS, families, outcome

LINE = re.compile(r"^\| (?P<family>[\w-]+) \| (?P<kind>[a-z ]+) \|", re.MULTILINE)
TABLE = {found["family"]: found["kind"] for found in LINE.finditer(FILE.read_text()) if found["kind"] in KINDS}
VERIFIED = KINDS[: KINDS.index("plain") + 1]


def test_the_table_tells_of_most_families() -> None:
    kinds = list(TABLE.values())
    decoding = [kind for kind in kinds if kind not in ("no plain decoding", "not built")]
    assert len(decoding) > 120
    assert kinds.count("other tokens") == kinds.count("error") == 0
    assert kinds.count("trees") >= 0.9 * len(decoding)


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
