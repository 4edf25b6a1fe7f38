"""LayerStates: the interface between the cache and what one kind of layer stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


class Extent:
    """How far the rows of a cache reach: what the cache shares with its layers.

    A reference from the layers to the cache itself would be a cycle, and its memory would wait for the collector.

    Attributes:
        longest: entries of the longest row; None during the prefill.
        nodes_at: where the nodes of a round lie, if not right behind the longest row.
        held: nodes of the round in flight that earlier forwards have written.
    """

    def __init__(self) -> None:
        self.longest: int | None = None
        self.nodes_at: int | None = None
        self.held = 0

    @property
    def node_start(self) -> int:
        """The entry of a round's first node."""
        assert self.longest is not None, "the cache is still in its prefill phase"
        return self.longest if self.nodes_at is None else self.nodes_at


class LayerStates(ABC):
    """What all layers of one kind store. During a round what they have stored before stays as it was.

    A kind whose base cannot be cut back by entries (recurrent states) computes the new base in `commit`.

    Attributes:
        layers: those of the kind, in the order of the model's; a model may have none.
    """

    layers: Sequence[Any]

    @abstractmethod
    def begin_rounds(self, capacity: int, *, contiguous: bool) -> None:
        """Ends the prefill; rows may hold `capacity` entries, and more after `reserve`."""

    @abstractmethod
    def reserve(self, entries: int) -> None:
        """Makes room for rows, or nodes behind them, up to this many entries."""

    @abstractmethod
    def commit(self, path: Tensor, lengths: Tensor, counts: Tensor) -> None:
        """Keeps nodes of the round at the end of each row.

        Args:
            path: [batch, steps] int64 nodes in ascending order. What lies behind a row's own count is never read.
            lengths: [batch] int64, entries of each row before.
            counts: [batch] int64, nodes of the path that each row keeps.
        """

    @abstractmethod
    def keep_nodes(self, nodes: Tensor | int) -> None:
        """After a commit: the next round begins with nodes of the last one, as its nodes 0, 1, ...

        Args:
            nodes: [batch, nodes] int64; a number: all from this one on.
        """

    @abstractmethod
    def wipe(self, row_lengths: Sequence[int]) -> None:
        """Zeros where nodes lay, and where the host's own cache has dropped entries: 0 * NaN is NaN behind any mask."""

    @abstractmethod
    def take_row(self, row: int, length: int) -> Any:
        """A copy of what a row has stored, for `put_rows`."""

    @abstractmethod
    def keep_rows(self, rows: Sequence[int], longest: int) -> None:
        """Goes on with these rows only, in this order."""

    @abstractmethod
    def put_rows(self, aside: dict[int, Any], longest: int) -> None:
        """Brings rows back that `take_row` gave; each takes the place of its key among all rows."""

    @abstractmethod
    def hand_back(self, like: Cache, length: int) -> None:
        """Makes the caller's cache hold what plain decoding would have left after `length` tokens."""
