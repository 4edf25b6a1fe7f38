"""TreeCache: what all layers keep of committed tokens, plus the nodes of the round in flight.

Each row of a batch has its own length. A round writes all its nodes behind the longest row; `commit` then keeps the
accepted ones at the end of their own row, and rollback is forgetting the rest. What a layer stores is its own business
(`layers/`); the cache owns the lengths, on the device and, as far as it has read them, on the host. The same cache
serves targets and drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from hf_specdec.decoding.graphs import Workspace
from hf_specdec.decoding.host import DummyLayer
from hf_specdec.decoding.layers.base import Extent, LayerStates
from hf_specdec.decoding.layers.entries import GROWTH, Entries, EntriesLayer
from hf_specdec.decoding.layers.kinds import KINDS, own_layer
from hf_specdec.decoding.layers.recurrent import Recurrent
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.support import TreesRefusedError
from hf_specdec.decoding.tree import from_host


class TreeCache(Cache):
    """A cache for rounds of draft trees, in two phases: `prefill` (rows grow together), then rounds (rows diverge).

    Args:
        num_layers: of the model that will write here.
        like: layers of a cache that the host has made for the model, whose kinds tell those of ours; attention layers
            where omitted.

    Attributes:
        entries: keys and values; empty before the first round.
        recurrent: states of a recurrence; empty where there are none.
        workspace: where buffers come from, if they outlive the call; to be set before the first round.
    """

    def __init__(self, num_layers: int, like: Sequence[object] = ()) -> None:
        self._extent = Extent()
        kinds = [*like, *[None] * (num_layers - len(like))]
        super().__init__(layers=[own_layer(layer, self._extent) for layer in kinds])
        self.recurrent = Recurrent(self.layers, self._extent)
        self.workspace: Workspace | None = None
        self.entries = Entries([], self._extent, None)
        self._row_lengths: list[int] = []
        self._unread: list[Counts] = []  # of commits that the host has not read yet
        self._lengths: Tensor | None = None  # as a tensor, once it has been asked for

    @classmethod
    def continuing(cls, cache: Cache, num_layers: int) -> TreeCache:
        """A TreeCache in its prefill phase that holds what `cache` (a DynamicCache that the user passed) holds.

        Raises:
            ValueError: `cache` is of a class whose content cannot be taken over exactly.
            TreesRefusedError: it is offloaded.
        """
        kinds = {type(layer) for layer in getattr(cache, "layers", ())}
        if not isinstance(cache, DynamicCache) or kinds - set(KINDS):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__} with layers {sorted(kind.__name__ for kind in kinds)}; "
                "speculative decoding can continue only a DynamicCache with layers of these kinds: "
                f"{sorted(kind.__name__ for kind in KINDS)}. Pass a DynamicCache, or leave past_key_values out."
            )
        if cache.offloading:
            raise TreesRefusedError("past_key_values is a DynamicCache with offloading, which draft trees do not do")
        own = cls(num_layers, cache.layers)
        for layer, source in zip(own.layers, cache.layers, strict=False):
            if not isinstance(layer, DummyLayer):
                layer.take_over(source)
        return own

    @classmethod
    def empty(
        cls,
        num_layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = GROWTH,
        workspace: Workspace | None = None,
    ) -> TreeCache:
        """A cache that starts with rounds at once, no entry committed, all layers of one shape on one device."""
        cache = cls(num_layers)
        cache.workspace = workspace
        keys = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        values = keys if value_dim is None else keys.new_empty(batch, kv_heads, 0, value_dim)
        for layer in cache.layers:
            layer.lazy_initialization(keys, values)
        cache.begin_rounds(capacity)
        return cache

    def spread(self, order: Tensor, mask: Tensor) -> None:
        """Moves entry i of each row to entry `order[row, i]`, all [batch, entries]; zeros where `mask` is False.

        During prefill.
        """
        for layer in self.layers:
            if isinstance(layer, EntriesLayer) and layer.is_initialized:
                target = order.to(layer.device)[:, None, :, None]
                seen = mask.to(layer.device)[:, None, :, None]
                for name in ("keys", "values"):
                    held = getattr(layer, name)
                    moved = torch.empty_like(held).scatter_(2, target.expand_as(held), held)
                    setattr(layer, name, moved.masked_fill_(~seen, 0))

    def begin_rounds(self, capacity: int, *, contiguous: bool = False) -> None:
        """Ends the prefill.

        Args:
            capacity: entries that a row has room for; grows where it does not suffice.
            contiguous: layers get copies of their entries, contiguous as in the host's cache, in place of views.
        """
        self.entries = Entries(self.layers, self._extent, self.workspace)
        length = self.get_seq_length()
        for states in self._stored:
            states.begin_rounds(capacity, contiguous=contiguous)
        self._set_lengths([length] * (self.entries if self.entries.layers else self.recurrent).batch)

    # How long the rows are.

    @property
    def row_lengths(self) -> list[int]:
        """Committed entries of each row, left padding included: it exists, and the mask hides it.

        To be asked when the host has read what all rounds came to.
        """
        self._catch_up()
        assert not self._unread, "the host has not read yet how many entries the last round has committed"
        return self._row_lengths

    @property
    def lengths(self) -> Tensor:
        """`row_lengths` as [batch] int64, on the device of the first layer; known there at any time."""
        if self._lengths is None:
            if self.is_even:
                self._lengths = torch.full((self.batch,), self.longest, device=self.device)
            else:
                self._lengths = from_host(self.row_lengths, self.device)
        return self._lengths

    @property
    def is_even(self) -> bool:
        """Whether all rows have one length."""
        return min(self.row_lengths) == self.longest

    @property
    def longest(self) -> int:
        """The largest of `row_lengths`, or the most it can be while some are not read."""
        self._catch_up()
        assert self._extent.longest is not None, "the cache is still in its prefill phase"
        return self._extent.longest

    def _catch_up(self) -> None:
        """Takes note of what earlier commits have added, as far as the host knows by now; the device always has."""
        while self._unread and (counts := self._unread[0].known) is not None:
            self._row_lengths = [length + count for length, count in zip(self._row_lengths, counts, strict=True)]
            del self._unread[0]
            self._extent.longest = max(self._row_lengths) + sum(counts.most for counts in self._unread)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far; without attention layers those of this call, since states do not tell."""
        if any(isinstance(layer, EntriesLayer) for layer in self.layers):
            return int(super().get_seq_length(layer_idx))
        if self._extent.longest is not None:
            return self._extent.node_start + self._extent.held
        return max(layer.seen for layer in self.recurrent.layers)

    @property
    def _stored(self) -> tuple[LayerStates, ...]:
        stored: tuple[LayerStates, ...] = (self.entries, self.recurrent)
        return tuple(states for states in stored if states.layers)

    @property
    def has_dummies(self) -> bool:
        """Whether some layers keep nothing, as those that read what others keep."""
        return any(isinstance(layer, DummyLayer) for layer in self.layers)

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep states, which cannot be cut back behind a commit."""
        return bool(self.recurrent.layers)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self._row_lengths)

    @property
    def device(self) -> torch.device:
        """Of the first layer; from the first round on."""
        return (self.entries if self.entries.layers else self.recurrent).device

    @property
    def capacity(self) -> int:
        """Entries a row can hold before the buffers must grow."""
        return self.entries.capacity

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the buffers."""
        return self.entries.addresses

    @property
    def node_start(self) -> int:
        """The entry of a round's first node; all before it are the prefix, or unused."""
        return self._extent.node_start

    def _set_lengths(self, row_lengths: list[int]) -> None:
        self._row_lengths, self._lengths, self._unread = row_lengths, None, []
        self._extent.longest = max(row_lengths)
        self._end_round()

    def _end_round(self) -> None:
        self._extent.held, self._extent.nodes_at = 0, None

    # The nodes of a round.

    def place_nodes(self, at: int | None) -> None:
        """The next round's nodes are written from this entry on, which no row reaches; None: behind the longest.

        A fixed place makes shapes and addresses of a forward independent of how long the rows are.
        """
        assert at is None or self.longest <= at
        self._extent.nodes_at = at

    def reserve(self, nodes: int) -> None:
        """Makes room for a round of `nodes` nodes behind the longest row; grows the buffers in steps where needed."""
        for states in self._stored:
            states.reserve(max(self.longest, self.node_start) + nodes)

    def hold(self, nodes: int) -> None:
        """Lets the round go on: its next forward writes behind the `nodes` nodes of the last one, and sees them.

        For drafters whose rounds take several forwards. Commit and rollback end the round.
        """
        self._extent.held += nodes

    @contextmanager
    def behind(self, nodes: int) -> Iterator[None]:
        """Lets forwards write behind the first `nodes` nodes of the round, and see them, while the context is open."""
        before, self._extent.held = self._extent.held, nodes
        try:
            yield
        finally:
            self._extent.held = before

    def commit(self, path: Tensor, counts: Counts) -> None:
        """Keeps the first nodes of `path` at the end of each row and forgets all other nodes of the round.

        Args:
            path: [batch, steps] int64, node indices within the round just written, in ascending order. Entries
                beyond a row's count may be any node index.
            counts: how many entries of `path` each row keeps.
        """
        # What earlier rounds came to may be known by now; nodes lie where they were written before it was.
        path = path.to(self.device)
        for states in self._stored:
            states.commit(path, self.lengths, counts.tensor)
        self._add(counts)

    def commit_first(self, counts: Counts) -> None:
        """Keeps the first `counts` nodes of the round, in order, at the end of each row: a commit of a chain.

        Where all rows have one length, the nodes already lie where they belong.
        """
        if not self.keeps_states and not self._unread and min(self.row_lengths) == self.node_start:
            self._add(counts)
        else:
            self.commit(torch.arange(counts.most, device=self.device).expand(self.batch, -1), counts)

    def _add(self, counts: Counts) -> None:
        self._catch_up()
        if counts.known is not None and not self._unread:
            self._set_lengths([length + count for length, count in zip(self._row_lengths, counts.known, strict=True)])
            return
        self._lengths = self.lengths + counts.tensor.to(self.device)
        self._extent.longest = self.longest + counts.most
        self._unread.append(counts)
        self._end_round()

    def commit_lead(self, count: int) -> None:
        """Keeps the first `count` nodes at the end of each row; the round goes on, and its others count from 0 now."""
        start = self.node_start + count
        if count:
            self.commit_first(Counts.of([count] * self.batch, self.device))
            for states in self._stored:
                states.keep_nodes(count)
            self._extent.nodes_at = None if start == self.longest else start

    def regroup(self, kept: Sequence[Sequence[int]], held: Sequence[Sequence[int]]) -> None:
        """Ends the round, and begins the next one with some of its nodes.

        Args:
            kept: per row the nodes to commit, in order.
            held: per row the nodes that become nodes 0, 1, ... of the next round, whose first forward then writes
                behind those of the row that has most.
        """
        before, row_lengths = self.node_start, [n + len(nodes) for n, nodes in zip(self.row_lengths, kept, strict=True)]
        longest, most = max(row_lengths), max(map(len, held))
        self.entries.reserve(longest + most)
        source, target = [], []
        for row, (keeps, holds) in enumerate(zip(kept, held, strict=True)):
            start = row * self.capacity
            for nodes, first in ((keeps, self.row_lengths[row]), (holds, longest)):
                source += [start + before + node for node in nodes]
                target += [start + first + place for place in range(len(nodes))]
        if source != target:
            self.entries.move(from_host(source, self.device), from_host(target, self.device))
        if self.keeps_states:
            if any(kept):
                counts = from_host(list(map(len, kept)), self.device)
                self.recurrent.commit(_padded(kept, self.device), self.lengths, counts)
            self.recurrent.keep_nodes(_padded(held, self.device))
        self._set_lengths(row_lengths)
        self._extent.held = most

    def rollback(self, row_lengths: Sequence[int] | None = None) -> None:
        """Forgets the nodes of the round; and all entries of each row beyond `row_lengths`, if these are given."""
        if row_lengths is not None:
            assert all(new <= old for new, old in zip(row_lengths, self.row_lengths, strict=True))
            assert not self.keeps_states or list(row_lengths) == self.row_lengths, "states cannot be cut back"
            self._set_lengths(list(row_lengths))
        self._end_round()

    def wipe(self) -> None:
        """Forgets the nodes of the round, so that nothing of them is left, NaN least of all."""
        for states in self._stored:
            states.wipe(self.row_lengths)
        self.rollback()

    # Rows, and the end of the call.

    def take_row(self, row: int) -> tuple[int, Any]:
        """A copy of a row's committed entries, for `put_rows`."""
        length = self.row_lengths[row]
        return length, [states.take_row(row, length) for states in self._stored]

    def take_states(self, row: int) -> Any:
        """A copy of a row's states, for `return_to`."""
        return self.recurrent.take_row(row, self.row_lengths[row])

    def return_to(self, row: int, length: int, states: Any) -> None:
        """Goes back to when a row had `length` entries and these states."""
        self.recurrent.return_to(row, states)
        self._set_lengths([length if place == row else each for place, each in enumerate(self.row_lengths)])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only, in this order; between rounds."""
        row_lengths = [self.row_lengths[row] for row in rows]
        for states in self._stored:
            states.keep_rows(rows, max(row_lengths))
        self._set_lengths(row_lengths)

    def put_rows(self, aside: dict[int, tuple[int, Any]]) -> None:
        """Brings rows back that `take_row` gave; each takes the place of its key among all rows."""
        batch = self.batch + len(aside)
        own = iter(self.row_lengths)
        row_lengths = [aside[row][0] if row in aside else next(own) for row in range(batch)]
        for place, states in enumerate(self._stored):
            states.put_rows({row: each[place] for row, (_, each) in aside.items()}, max(row_lengths))
        self._set_lengths(row_lengths)

    def hand_back(self, like: Cache, length: int) -> None:
        """Makes `like`, the DynamicCache that the caller keeps, hold the first `length` entries of every row.

        It is as plain decoding would have left it. The cache is of no use afterwards.
        """
        for states in self._stored:
            states.hand_back(like, length)
        self.release()

    def release(self) -> None:
        """Gives the buffers back to the workspace, for the next call; the cache is of no use afterwards."""
        self.entries.release()


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[rows, longest] int64, zeros behind what a row has."""
    longest = max(map(len, rows))
    return from_host([[*row, *[0] * (longest - len(row))] for row in rows], device).long()  # of nothing it is floating
