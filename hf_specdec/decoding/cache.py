"""TreeCache: keys, values and states of committed tokens in all layers, plus the nodes of the current round.

Each row of a batch has its own length. A round writes all its nodes after the longest row. `commit` moves the accepted
nodes to the end of their own row; all others are dropped. `layers/` defines what each kind of layer stores. The cache
owns the row lengths, on the device and, once they are read, on the host. Targets and drafters use the same cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicIndexedLayer, LinearAttentionLayer

from hf_specdec.decoding.speed.cuda_graphs import Workspace
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.targets.entries import GROWTH, Entries, EntriesLayer, Extent
from hf_specdec.decoding.targets.kinds import KINDS, own_layer
from hf_specdec.decoding.targets.recurrent import Recurrent
from hf_specdec.decoding.targets.support import TreesRefusedError
from hf_specdec.decoding.tree import from_host
from hf_specdec.decoding.upstream import CACHE, DummyLayer


class TreeCache(Cache):
    """A cache for rounds of draft trees. Two phases: prefill (all rows grow alike), then rounds (rows grow separately).

    Args:
        num_layers: of the model that will write here.
        like: layers of a cache that transformers has made for the model; they select the kinds of our layers. Attention
            layers if omitted.

    Attributes:
        entries: keys and values; empty before the first round.
        recurrent: recurrent states; empty if there are none.
        workspace: provides buffers that are reused by later calls, or None; set it before the first round.
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
        self._lengths: Tensor | None = None  # `lengths`, made on first use

    @classmethod
    def continuing(cls, cache: Cache, num_layers: int) -> TreeCache:
        """A TreeCache in its prefill phase with the content of `cache`, a DynamicCache that the user passed.

        Raises:
            ValueError: the content of this class of cache cannot be loaded exactly.
            TreesRefusedError: it is offloaded, or records the past of convolutions.
        """
        kinds = {type(layer) for layer in getattr(cache, "layers", ())}
        if not isinstance(cache, DynamicCache) or kinds - set(KINDS):
            raise ValueError(
                f"{CACHE} is a {type(cache).__name__} with layers {sorted(kind.__name__ for kind in kinds)}; "
                "speculative decoding can continue only a DynamicCache with layers of these kinds: "
                f"{sorted(kind.__name__ for kind in KINDS)}. Pass a DynamicCache, or leave {CACHE} out."
            )
        if cache.offloading:
            raise TreesRefusedError(f"{CACHE} is a DynamicCache with offloading, which draft trees do not allow")
        if any(isinstance(layer, LinearAttentionLayer) and layer.record_past for layer in cache.layers):
            raise TreesRefusedError(
                f"{CACHE} records the past of convolutions (activate_past_recording), and draft trees do not"
            )
        own = cls(num_layers, cache.layers)
        for layer, source in zip(own.layers, cache.layers, strict=False):
            if not isinstance(layer, DummyLayer):
                layer.load_from(source)
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
        index_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = GROWTH,
        workspace: Workspace | None = None,
    ) -> TreeCache:
        """A cache without committed entries that starts with rounds; all layers of one shape on one device.

        `index_dim` is the width of an indexer's keys; None for layers without an indexer.
        """
        cache = cls(num_layers, [] if index_dim is None else [DynamicIndexedLayer()] * num_layers)
        cache.workspace = workspace
        keys = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        values = keys if value_dim is None else keys.new_empty(batch, kv_heads, 0, value_dim)
        for layer in cache.layers:
            layer.lazy_initialization(keys, values)
            if index_dim is not None:
                layer.index = keys.new_empty(batch, 1, 0, index_dim)
        cache.begin_rounds(capacity)
        return cache

    def spread(self, order: Tensor, mask: Tensor) -> None:
        """During the prefill: moves entry i of each row to `order[row, i]`, and zeros entries where `mask` is False.

        Args:
            order: [batch, entries] int64.
            mask: [batch, entries] bool.
        """
        for layer in self.layers:
            if isinstance(layer, EntriesLayer) and layer.is_initialized:
                target = order.to(layer.device)[:, None, :, None]
                seen = mask.to(layer.device)[:, None, :, None]
                for name in ("keys", "values"):
                    stored = getattr(layer, name)
                    moved = torch.empty_like(stored).scatter_(2, target.expand_as(stored), stored)
                    setattr(layer, name, moved.masked_fill_(~seen, 0))

    def begin_rounds(self, capacity: int, *, contiguous: bool = False) -> None:
        """Ends the prefill.

        Args:
            capacity: entries that a row has room for; grows if needed.
            contiguous: layers get contiguous copies of their entries, as from transformers' cache, instead of views.
        """
        self.entries = Entries(self.layers, self._extent, self.workspace)
        length = self.get_seq_length()
        self.entries.begin_rounds(capacity, contiguous=contiguous)
        self._set_lengths([length] * (self.entries if self.entries.layers else self.recurrent).batch)

    # Lengths of the rows.

    @property
    def row_lengths(self) -> list[int]:
        """Committed entries of each row, including left padding, which the mask hides.

        Available only when the host has read the verdicts of all rounds.
        """
        self._update_lengths()
        assert not self._unread, "the host has not read yet how many entries the last round has committed"
        return self._row_lengths

    @property
    def lengths(self) -> Tensor:
        """`row_lengths` as [batch] int64 on the device of the first layer; always available."""
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
        """The largest of `row_lengths`; an upper bound while the host has not read all of them."""
        self._update_lengths()
        assert self._extent.longest is not None, "the cache is still in its prefill phase"
        return self._extent.longest

    def _update_lengths(self) -> None:
        """Adds the counts of earlier commits that the host has read since the last call."""
        while self._unread and (counts := self._unread[0].known) is not None:
            self._row_lengths = [length + count for length, count in zip(self._row_lengths, counts, strict=True)]
            del self._unread[0]
            self._extent.longest = max(self._row_lengths) + sum(counts.most for counts in self._unread)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far. Without attention layers only the tokens of this call, since states have no length."""
        if any(isinstance(layer, EntriesLayer) for layer in self.layers):
            return int(super().get_seq_length(layer_idx))
        if self._extent.longest is not None:
            return self._extent.node_start + self._extent.written
        return max(layer.seen for layer in self.recurrent.layers)

    @property
    def _stored(self) -> list[Entries | Recurrent]:
        return [states for states in (self.entries, self.recurrent) if states.layers]

    @property
    def has_dummies(self) -> bool:
        """Whether some layers store nothing, for example because they read the entries of other layers."""
        return any(isinstance(layer, DummyLayer) for layer in self.layers)

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep recurrent states, which cannot be cropped after a commit."""
        return bool(self.recurrent.layers)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self._row_lengths)

    @property
    def device(self) -> torch.device:
        """Of the first layer; available from the first round on."""
        return (self.entries if self.entries.layers else self.recurrent).device

    @property
    def capacity(self) -> int:
        """Entries a row can hold before the buffers must grow."""
        return self.entries.capacity

    @property
    def addresses(self) -> tuple[int, ...]:
        """Data pointers of the buffers."""
        return self.entries.addresses

    @property
    def node_start(self) -> int:
        """The entry of a round's first node; entries before it are the prefix, or unused."""
        return self._extent.node_start

    def _set_lengths(self, row_lengths: list[int]) -> None:
        self._row_lengths, self._lengths, self._unread = row_lengths, None, []
        self._extent.longest = max(row_lengths)
        self._end_round()

    def _end_round(self) -> None:
        self._extent.written, self._extent.nodes_at = 0, None

    # The nodes of a round.

    def place_nodes(self, at: int | None) -> None:
        """The nodes of the next round are written from entry `at` on, not before the longest row's end; None: there.

        With a fixed entry, the shapes and addresses of a forward do not depend on the row lengths.
        """
        assert at is None or self.longest <= at
        self._extent.nodes_at = at

    def reserve(self, nodes: int) -> None:
        """Makes room for a round of `nodes` nodes after the longest row; grows the buffers in steps if needed."""
        for states in self._stored:
            states.reserve(max(self.longest, self.node_start) + nodes)

    def continue_round(self, nodes: int) -> None:
        """The next forward of the round writes after the `nodes` nodes of the last one, and attends to them.

        For drafters whose rounds take several forwards. Commit and rollback end the round.
        """
        self._extent.written += nodes

    @contextmanager
    def writing_after(self, nodes: int) -> Iterator[None]:
        """In this context, forwards write after the first `nodes` nodes of the round, and attend to them."""
        before, self._extent.written = self._extent.written, nodes
        try:
            yield
        finally:
            self._extent.written = before

    def commit(self, path: Tensor, counts: Counts) -> None:
        """Appends the first nodes of `path` to each row and drops all other nodes of the round.

        Args:
            path: [batch, steps] int64, node indices within the round just written, in ascending order. Entries
                beyond a row's count may be any node index.
            counts: how many entries of `path` each row keeps.
        """
        # No `_update_lengths` before the layers commit: it could change `node_start`, and the nodes are at the old one.
        path = path.to(self.device)
        for states in self._stored:
            states.commit(path, self.lengths, counts.tensor)
        self._add(counts)

    def commit_first(self, counts: Counts) -> None:
        """Appends the first `counts` nodes of the round to each row: a commit of a chain.

        If all rows have one length, the nodes are already at the right entries and nothing is copied.
        """
        if not self.keeps_states and not self._unread and min(self.row_lengths) == self.node_start:
            self._add(counts)
        else:
            self.commit(torch.arange(counts.most, device=self.device).expand(self.batch, -1), counts)

    def _add(self, counts: Counts) -> None:
        self._update_lengths()
        if counts.known is not None and not self._unread:
            self._set_lengths([length + count for length, count in zip(self._row_lengths, counts.known, strict=True)])
            return
        self._lengths = self.lengths + counts.tensor.to(self.device)
        self._extent.longest = self.longest + counts.most
        self._unread.append(counts)
        self._end_round()

    def commit_and_continue(self, count: int) -> None:
        """Appends the first `count` nodes to each row; the round continues with the others, renumbered from 0."""
        start = self.node_start + count
        if count:
            self.commit_first(Counts.of([count] * self.batch, self.device))
            self.recurrent.apply_commit(count)
            self._extent.nodes_at = None if start == self.longest else start

    def regroup(self, kept: Sequence[Sequence[int]], carried: Sequence[Sequence[int]]) -> None:
        """Ends the round and begins the next one with some of its nodes.

        Args:
            kept: per row the nodes to commit, in order.
            carried: per row the nodes that become nodes 0, 1, ... of the next round. Its first forward writes after
                those of the row that has most.
        """
        before, row_lengths = self.node_start, [n + len(nodes) for n, nodes in zip(self.row_lengths, kept, strict=True)]
        longest, most = max(row_lengths), max(map(len, carried))
        self.entries.reserve(longest + most)
        source, target = [], []
        for row, (to_commit, to_carry) in enumerate(zip(kept, carried, strict=True)):
            start = row * self.capacity
            for nodes, first in ((to_commit, self.row_lengths[row]), (to_carry, longest)):
                source += [start + before + node for node in nodes]
                target += [start + first + index for index in range(len(nodes))]
        if source != target:
            self.entries.move(from_host(source, self.device), from_host(target, self.device))
        if self.keeps_states:
            if any(kept):
                counts = from_host(list(map(len, kept)), self.device)
                self.recurrent.commit(_padded(kept, self.device), self.lengths, counts)
            self.recurrent.apply_commit(_padded(carried, self.device))
        self._set_lengths(row_lengths)
        self._extent.written = most

    def rollback(self, row_lengths: Sequence[int] | None = None) -> None:
        """Drops the nodes of the round, and all entries of each row beyond `row_lengths` if these are given."""
        if row_lengths is not None:
            assert all(new <= old for new, old in zip(row_lengths, self.row_lengths, strict=True))
            assert not self.keeps_states or list(row_lengths) == self.row_lengths, "states cannot be cropped"
            self._set_lengths(list(row_lengths))
        self._end_round()

    def clear_uncommitted(self) -> None:
        """Drops the nodes of the round and zeros their entries, which may hold NaN."""
        for states in self._stored:
            states.clear_uncommitted(self.row_lengths)
        self.rollback()

    # Rows, and the end of the call.

    def take_row(self, row: int) -> tuple[int, Any]:
        """A copy of a row's committed entries, for `put_rows`."""
        length = self.row_lengths[row]
        return length, [states.take_row(row, length) for states in self._stored]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Continues with these rows only, in this order. Called between rounds."""
        row_lengths = [self.row_lengths[row] for row in rows]
        for states in self._stored:
            states.keep_rows(rows, max(row_lengths))
        self._set_lengths(row_lengths)

    def put_rows(self, saved: dict[int, tuple[int, Any]]) -> None:
        """Inserts rows saved by `take_row`; each key is the row's index in the resulting batch."""
        batch = self.batch + len(saved)
        own = iter(self.row_lengths)
        row_lengths = [saved[row][0] if row in saved else next(own) for row in range(batch)]
        for index, states in enumerate(self._stored):
            states.put_rows({row: each[index] for row, (_, each) in saved.items()}, max(row_lengths))
        self._set_lengths(row_lengths)

    def join(self, others: Sequence[TreeCache], places: Sequence[int]) -> None:
        """The rows of others, of one row each, take these places, see `state.with_rows`. Called between rounds."""
        new = {place: other.take_row(0) for place, other in zip(places, others, strict=True)}
        row_lengths, longest = [*self.row_lengths], max(length for length, _ in new.values())
        for states in self._stored:
            states.reserve(max(self.longest, longest))
        for place in [place for place in places if place < len(row_lengths)]:
            row_lengths[place], saved = new.pop(place)
            for states, own in zip(self._stored, saved, strict=True):
                states.replace_row(place, own)
        self._set_lengths(row_lengths)
        if new:
            self.put_rows(new)

    def hand_back(self, like: Cache, length: int) -> None:
        """Writes the first `length` entries of every row to `like`, the caller's DynamicCache.

        `like` is then as plain decoding would have left it. This cache must not be used afterwards.
        """
        for states in self._stored:
            states.hand_back(like, length)
        self.release()

    def release(self) -> None:
        """Returns the buffers to the workspace, for the next call. The cache must not be used afterwards."""
        self.entries.release()


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[rows, longest] int64, padded with zeros."""
    longest = max(map(len, rows))
    return from_host([[*row, *[0] * (longest - len(row))] for row in rows], device).long()  # empty lists give floats
