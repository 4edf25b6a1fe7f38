"""LayerStates: the interface between the cache and the storage of one kind of layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


class Extent:
    """The lengths that a cache shares with its layers.

    Layers do not refer to the cache itself: the reference cycle would delay freeing its memory until a garbage
    collection.

    Attributes:
        longest: entries of the longest row; None during the prefill.
        nodes_at: entry of the round's first node, if not directly after the longest row.
        written: nodes of the current round that earlier forwards have written.
    """

    def __init__(self) -> None:
        self.longest: int | None = None
        self.nodes_at: int | None = None
        self.written = 0

    @property
    def node_start(self) -> int:
        """The entry of a round's first node."""
        assert self.longest is not None, "the cache is still in its prefill phase"
        return self.longest if self.nodes_at is None else self.nodes_at


class LayerStates(ABC):
    """The storage of all layers of one kind. A round does not change what was stored before it.

    Kinds that cannot drop entries (recurrent states) compute the new state after `commit`.

    Attributes:
        layers: of this kind, in the order of the model's layers; may be empty.
    """

    layers: Sequence[Any]

    @abstractmethod
    def begin_rounds(self, capacity: int, *, contiguous: bool) -> None:
        """Ends the prefill; rows may hold `capacity` entries, and more after `reserve`."""

    @abstractmethod
    def reserve(self, entries: int) -> None:
        """Makes room for this many entries per row, nodes included."""

    @abstractmethod
    def commit(self, path: Tensor, lengths: Tensor, counts: Tensor) -> None:
        """Appends nodes of the round to each row.

        Args:
            path: [batch, steps] int64 nodes in ascending order. Columns beyond a row's count are ignored.
            lengths: [batch] int64, entries of each row before the commit.
            counts: [batch] int64, nodes of the path that each row keeps.
        """

    @abstractmethod
    def carry_over(self, nodes: Tensor | int) -> None:
        """After a commit: the next round begins with these nodes of the last one, as its nodes 0, 1, ...

        Args:
            nodes: [batch, nodes] int64, or an index: all nodes from this one on.
        """

    @abstractmethod
    def clear_uncommitted(self, row_lengths: Sequence[int]) -> None:
        """Zeros the entries of nodes, and those that the host's own cache would have dropped.

        They may hold NaN, and masks do not stop NaN, because 0 * NaN is NaN.
        """

    @abstractmethod
    def take_row(self, row: int, length: int) -> Any:
        """A copy of a row's content, for `put_rows`."""

    @abstractmethod
    def keep_rows(self, rows: Sequence[int], longest: int) -> None:
        """Continues with these rows only, in this order."""

    @abstractmethod
    def put_rows(self, saved: dict[int, Any], longest: int) -> None:
        """Inserts rows saved by `take_row`; each key is the row's index in the resulting batch."""

    @abstractmethod
    def hand_back(self, like: Cache, length: int) -> None:
        """Writes to `like`, the caller's cache, what plain decoding would have left after `length` tokens."""
