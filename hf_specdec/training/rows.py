"""Rows: what training reads its tokens from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class Rows(Protocol):
    """Rows with the columns of `data.py`: a list, a `datasets.Dataset`, or rows cached with the target's states."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...
