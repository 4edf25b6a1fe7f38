"""Extent: the lengths that a cache shares with its layers."""

from __future__ import annotations


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
