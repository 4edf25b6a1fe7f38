"""TreeCache: the keys and values of committed tokens, plus the nodes of the round in flight.

Every attention layer keeps all keys and values (sliding windows live in the masks only), each row of a batch has its
own length, and the buffers are zeroed, since a masked NaN would still poison a softmax. A round writes all its nodes
behind the longest row; `commit` then moves the accepted ones to the end of their own row, for all layers in one copy,
and rollback is forgetting the rest. The same cache serves targets and drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from hf_specdec.decoding.graphs import Workspace
from hf_specdec.decoding.tree import count_up, from_host

GROWTH = 256  # entries added at a time when a row outgrows its capacity


class Extent:
    """What a cache shares with its layers: the length of the longest row, and nodes of the round that lie behind it.

    A reference from the layers to the cache itself would be a cycle, and its memory would wait for the collector.
    """

    longest: int | None = None  # None during prefill
    nodes_at: int | None = None  # where the nodes of a round lie, if not right behind the longest row
    held: int = 0  # nodes of the round in flight that earlier forwards have written
    contiguous: bool = False  # whether layers get entries as copies, each a block of memory of its own

    @property
    def node_start(self) -> int:
        """The entry of a round's first node."""
        assert self.longest is not None
        return self.longest if self.nodes_at is None else self.nodes_at


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one attention layer, [batch, kv_heads, entries, head_dim] as the host model sees them."""

    is_sliding = False  # all entries are kept, so stock masks of the prefill must not shift
    is_croppable = False

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self.extent = extent
        self.window: int | None = None  # entries that the host's own cache would show a query, its own included

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Adds [batch, kv_heads, new, head_dim] entries; returns all entries that a query may be allowed to see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.extent.longest is None:  # prefill: all rows grow alike, in chunks as the host likes
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
            return self.keys, self.values
        start = self.extent.node_start + self.extent.held
        stop = start + key_states.shape[2]
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        keys, values = self.keys[:, :, :stop], self.values[:, :, :stop]
        return (keys.contiguous(), values.contiguous()) if self.extent.contiguous else (keys, values)

    def get_seq_length(self) -> int:
        if not self.is_initialized:  # nor will it be: cross-attention without anything to attend to
            return 0
        if self.extent.longest is not None:
            return self.extent.node_start + self.extent.held
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """A cache for rounds of draft trees, in two phases: `prefill` (rows grow together), then rounds (rows diverge).

    Args:
        num_layers: attention layers that will write here.

    Attributes:
        device: of the first layer; known from the first round on.
    """

    device: torch.device

    def __init__(self, num_layers: int) -> None:
        self._extent = Extent()
        super().__init__(layers=[TreeCacheLayer(self._extent) for _ in range(num_layers)])
        self._row_lengths: list[int] = []
        # What each commit that the host has not read yet can add at most, and what tells how much it has added.
        self._unread: list[tuple[int, Callable[[], list[int]]]] = []
        self._lengths: Tensor | None = None  # as a tensor, once it has been asked for
        self.workspace: Workspace | None = None  # where buffers come from, if they outlive the call
        self._slabs: list[Tensor] = []  # each [keys and values of some layers, batch, capacity, kv_heads, head_dim]

    @classmethod
    def continuing(cls, cache: Cache, num_layers: int) -> TreeCache:
        """A TreeCache in its prefill phase that holds what `cache` (a DynamicCache that the user passed) holds.

        Sliding layers of a DynamicCache have dropped what no later query can see; zeros stand in for those entries.

        Raises:
            ValueError: `cache` is of a class whose content cannot be taken over exactly.
        """
        known = isinstance(cache, DynamicCache) and not cache.offloading
        if not known or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
            kinds = sorted({type(layer).__name__ for layer in getattr(cache, "layers", ())})
            raise ValueError(
                f"past_key_values is a {type(cache).__name__} with layers {kinds}; speculative decoding can continue "
                "only a DynamicCache of full or sliding-window attention layers without offloading. Pass a "
                "DynamicCache, or leave past_key_values out."
            )
        own = cls(num_layers)
        for layer, source in zip(own.layers, cache.layers, strict=False):
            layer.window = source.sliding_window if isinstance(source, DynamicSlidingWindowLayer) else None
            if source.is_initialized and source.keys.numel():
                missing = source.get_seq_length() - source.keys.shape[2]
                padding = (0, 0, missing, 0)
                layer.lazy_initialization(source.keys, source.values)
                layer.keys = torch.nn.functional.pad(source.keys, padding)
                layer.values = torch.nn.functional.pad(source.values, padding)
        return own

    @classmethod
    def empty(
        cls,
        num_layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = GROWTH,
        workspace: Workspace | None = None,
    ) -> TreeCache:
        """A cache that starts with rounds at once, no entry committed, all layers of one shape on one device."""
        cache = cls(num_layers)
        cache.workspace = workspace
        nothing = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        for layer in cache.layers:
            layer.lazy_initialization(nothing, nothing)
        cache.begin_rounds(capacity)
        return cache

    @property
    def row_lengths(self) -> list[int]:
        """Committed entries of each row, left padding included: it exists, and the mask hides it.

        After `commit_unread` to be asked only when its counts are known.
        """
        if self._unread:
            self._catch_up()
        assert not self._unread, "the host has not read yet how many entries the last round has committed"
        return self._row_lengths

    @property
    def lengths(self) -> Tensor:
        """`row_lengths` as [batch] int64, on the device of the first layer."""
        if self._lengths is None:
            if self.is_even:  # a view of one number: quicker than a new tensor
                length = count_up(self.longest + 1, self.device, start=self.longest)
                self._lengths = length if self.batch == 1 else length.expand(self.batch)
            else:
                self._lengths = from_host(self.row_lengths, self.device)
        return self._lengths

    @property
    def is_even(self) -> bool:
        """Whether all rows have one length."""
        return min(self.row_lengths) == self.longest

    @property
    def longest(self) -> int:
        """The largest of `row_lengths`; after `commit_unread` the most it can be, until the counts are known."""
        if self._unread:
            self._catch_up()
        assert self._extent.longest is not None, "the cache is still in its prefill phase"
        return self._extent.longest

    def _catch_up(self) -> None:
        """Takes note of what earlier commits have added, as far as the host knows by now; the device always has."""
        while self._unread and (counts := self._unread[0][1]()):
            self._row_lengths = [length + count for length, count in zip(self._row_lengths, counts, strict=True)]
            del self._unread[0]
            self._extent.longest = max(self._row_lengths) + sum(most for most, _ in self._unread)

    def spread(self, order: Tensor, mask: Tensor) -> None:
        """Moves entry i of each row to entry `order[row, i]`, all [batch, entries]; zeros where `mask` is False.

        During prefill.
        """
        for layer in self.layers:
            if layer.is_initialized:
                target = order.to(layer.device)[:, None, :, None]
                seen = mask.to(layer.device)[:, None, :, None]
                for name in ("keys", "values"):
                    held = getattr(layer, name)
                    moved = torch.empty_like(held).scatter_(2, target.expand_as(held), held)
                    setattr(layer, name, moved.masked_fill_(~seen, 0))

    def begin_rounds(self, capacity: int, *, contiguous: bool = False) -> None:
        """Ends the prefill: moves every layer into preallocated buffers with room for `capacity` entries a row.

        Args:
            capacity: grows where it does not suffice.
            contiguous: layers get copies of their entries, contiguous as in the host's cache, in place of views.
        """
        started = [layer for layer in self.layers if layer.is_initialized]
        batch, _, length, _ = started[0].keys.shape
        self.device = started[0].device
        self._extent.contiguous = contiguous and batch > 1  # one row is one block as it lies
        self._allocate(started, length, capacity)
        self._set_lengths([length] * batch)

    def _allocate(self, layers: Sequence[CacheLayerMixin], length: int, capacity: int) -> None:
        groups: dict[tuple[object, ...], list[tuple[CacheLayerMixin, str]]] = {}
        for layer in layers:
            for name in ("keys", "values"):
                _, kv_heads, _, head_dim = getattr(layer, name).shape
                groups.setdefault((kv_heads, head_dim, layer.dtype, layer.device), []).append((layer, name))
        before, self._slabs = self._slabs, []
        for (kv_heads, head_dim, dtype, device), members in groups.items():
            batch = getattr(*members[0]).shape[0]
            # Entries before heads: a row and an entry make one index, so that a commit is one gather, one scatter.
            shape = (len(members), batch, capacity, kv_heads, head_dim)
            slab = self._new_slab(shape, dtype, device)  # type: ignore[arg-type]
            torch.stack(
                [getattr(layer, name)[:, :, :length].transpose(1, 2) for layer, name in members],
                out=slab[:, :, :length],
            )
            for view, (layer, name) in zip(slab.transpose(2, 3), members, strict=True):
                setattr(layer, name, view)
            self._slabs.append(slab)
        if self.workspace is not None:
            for slab in before:
                self.workspace.give_back(slab)
        # Where each row begins once rows and entries are one axis.
        self._row_starts = torch.arange(batch, device=self.device).unsqueeze(1) * capacity

    def _new_slab(self, shape: tuple[int, ...], dtype: Any, device: Any) -> Tensor:
        if self.workspace is not None:
            return self.workspace.take(shape, dtype, device)
        with torch.inference_mode(False):  # what `to_dynamic` hands out is the caller's
            return torch.zeros(shape, dtype=dtype, device=device)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the buffers."""
        return tuple(slab.data_ptr() for slab in self._slabs)

    @property
    def node_start(self) -> int:
        """The entry of a round's first node; all before it are the prefix, or unused."""
        return self._extent.node_start

    def place_nodes(self, at: int | None) -> None:
        """The next round's nodes are written from this entry on, which no row reaches; None: behind the longest.

        A fixed place makes shapes and addresses of a forward independent of how long the rows are.
        """
        assert at is None or self.longest <= at
        self._extent.nodes_at = at

    def release(self) -> None:
        """Gives the buffers back to the workspace, for the next call; the cache is of no use afterwards."""
        if self.workspace is not None:
            for slab in self._slabs:
                self.workspace.give_back(slab)
            self._slabs = []
            self.workspace.release()

    @property
    def capacity(self) -> int:
        """Entries a row can hold before the buffers must grow."""
        return self._slabs[0].shape[2]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self._row_lengths)

    def reserve(self, nodes: int) -> None:
        """Makes room for a round of `nodes` nodes behind the longest row; grows the buffers in steps where needed."""
        needed = max(self.longest, self.node_start) + nodes
        if needed > self.capacity:
            started = [layer for layer in self.layers if layer.is_initialized]
            self._allocate(started, self.node_start + self._extent.held, needed + GROWTH)

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

    def commit(self, path: Tensor, counts: Sequence[int]) -> None:
        """Keeps the first nodes of `path` at the end of each row and forgets all other nodes of the round.

        Args:
            path: [batch, steps] int64, node indices within the round just written, in ascending order. Entries
                beyond a row's count may be any node index.
            counts: how many entries of `path` each row keeps.
        """
        batch, steps = path.shape
        first, longest = self.node_start, self.longest
        if batch == 1:
            source = path[0] + first
            target = count_up(longest + steps, path.device, start=longest)
        else:
            source = (path + (self._row_starts + first)).flatten()
            target = (count_up(steps, path.device) + (self._row_starts + self.lengths.unsqueeze(1))).flatten()
        for slab in self._slabs:
            flat = slab.view(slab.shape[0], batch * self.capacity, -1)
            kept = flat.index_select(1, source.to(slab.device))
            # Entries past a row's count land behind its new end, where nothing is read before it is written again.
            flat.index_copy_(1, target.to(slab.device), kept)
        self._set_lengths([length + count for length, count in zip(self.row_lengths, counts, strict=True)])

    def commit_unread(self, path: Tensor, counts: Tensor, known: Callable[[], list[int]]) -> None:
        """`commit` with counts that only the device knows yet.

        Args:
            path: as there; `steps` entries behind a row's end must fit into the buffer, as the nodes of a round do.
            counts: [batch] int64, on the device.
            known: gives the same numbers once the host has read them, an empty list until then.
        """
        batch, steps = path.shape
        source = (path + (self._row_starts + self.node_start)).flatten()
        target = (count_up(steps, path.device) + (self._row_starts + self.lengths.unsqueeze(1))).flatten()
        for slab in self._slabs:
            flat = slab.view(slab.shape[0], batch * self.capacity, -1)
            flat.index_copy_(1, target.to(slab.device), flat.index_select(1, source.to(slab.device)))
        self._extent.longest = self.longest + steps
        self._unread.append((steps, known))
        self._lengths = self.lengths + counts
        self._extent.held, self._extent.nodes_at = 0, None

    def commit_first(self, counts: Sequence[int]) -> None:
        """Keeps the first `counts` nodes of the round, in order, at the end of each row: a commit of a chain.

        Where all rows have one length, the nodes already lie where they belong.
        """
        if min(self.row_lengths) == self.node_start:
            self._set_lengths([length + count for length, count in zip(self.row_lengths, counts, strict=True)])
        else:
            steps = count_up(max(counts), self.device)
            self.commit(steps.expand(self.batch, -1), counts)

    def commit_lead(self, count: int) -> None:
        """Keeps the first `count` nodes at the end of each row; the round goes on, and its others count from 0 now."""
        start = self.node_start + count
        if count:
            self.commit_first([count] * self.batch)
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
        if longest + most > self.capacity:
            started = [layer for layer in self.layers if layer.is_initialized]
            self._allocate(started, before + self._extent.held, longest + most + GROWTH)
        source, target = [], []
        for row, (keeps, holds) in enumerate(zip(kept, held, strict=True)):
            start = row * self.capacity
            for nodes, first in ((keeps, self.row_lengths[row]), (holds, longest)):
                source += [start + before + node for node in nodes]
                target += [start + first + place for place in range(len(nodes))]
        if source != target:
            for slab in self._slabs:
                flat = slab.view(slab.shape[0], self.batch * self.capacity, -1)
                old, new = from_host(source, slab.device), from_host(target, slab.device)
                flat.index_copy_(1, new, flat.index_select(1, old))
        self._set_lengths(row_lengths)
        self._extent.held = most

    def rollback(self, row_lengths: Sequence[int] | None = None) -> None:
        """Forgets the nodes of the round; and all entries of each row beyond `row_lengths`, if these are given."""
        if row_lengths is not None:
            assert all(new <= old for new, old in zip(row_lengths, self.row_lengths, strict=True))
            self._set_lengths(list(row_lengths))
        self._extent.held, self._extent.nodes_at = 0, None

    def wipe(self) -> None:
        """Forgets the nodes of the round; zeros where they lay, and where the host's own cache has dropped entries.

        Masks alone do not hide NaN there: 0 * NaN is NaN.
        """
        for slab in self._slabs:
            for row, length in enumerate(self.row_lengths):
                slab[:, row, length:] = 0
        for layer in self.layers:
            if layer.is_initialized and layer.window is not None:
                for row, length in enumerate(self.row_lengths):
                    for held in (layer.keys, layer.values):
                        held[row, :, : max(0, length + 1 - layer.window)] = 0
        self.rollback()

    def _set_lengths(self, row_lengths: list[int]) -> None:
        self._row_lengths, self._lengths, self._unread = row_lengths, None, []
        self._extent.longest, self._extent.held, self._extent.nodes_at = max(row_lengths), 0, None

    def entries_of(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of a row's committed keys and values, [kv_heads, entries, head_dim] per layer that has any."""
        length = self.row_lengths[row]
        return [
            (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
            for layer in self.layers
            if layer.is_initialized
        ]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only, in this order; between rounds."""
        self._replace_rows(
            [self.row_lengths[row] for row in rows],
            lambda held, length, _: held[from_host(rows, held.device), :, :length],
        )

    def insert_rows(self, aside: dict[int, list[tuple[Tensor, Tensor]]]) -> None:
        """Brings rows back that `entries_of` gave; each takes the place of its key among all rows.

        Args:
            aside: index in the whole batch -> entries per layer.
        """
        batch = self.batch + len(aside)
        own = [row for row in range(batch) if row not in aside]
        lengths = dict(zip(own, self.row_lengths, strict=True))
        lengths |= {row: entries[0][0].shape[1] for row, entries in aside.items()}

        def joined(held: Tensor, length: int, place: tuple[int, int]) -> Tensor:
            layer, part = place
            everything = held.new_zeros(batch, held.shape[1], length, held.shape[3])
            everything[own, :, : min(length, held.shape[2])] = held[:, :, :length]
            for row, entries in aside.items():
                kept = entries[layer][part]
                everything[row, :, : kept.shape[1]] = kept
            return everything

        self._replace_rows([lengths[row] for row in range(batch)], joined)

    def _replace_rows(self, row_lengths: list[int], change: Callable[[Tensor, int, tuple[int, int]], Tensor]) -> None:
        """`change(held, longest, (layer, 0 for keys or 1 for values))` gives a layer's new [batch, ...] entries."""
        longest, capacity = max(row_lengths), self.capacity
        started = [layer for layer in self.layers if layer.is_initialized]
        for index, layer in enumerate(started):
            layer.keys = change(layer.keys, longest, (index, 0))
            layer.values = change(layer.values, longest, (index, 1))
        self._allocate(started, longest, max(capacity, longest))
        self._set_lengths(row_lengths)

    def to_dynamic(self, like: Cache, length: int) -> None:
        """Makes `like`, the DynamicCache that the caller keeps, hold the first `length` entries of every row.

        Sliding layers receive their window only, as plain decoding would have left them. Where buffers are at
        least half full nothing is copied: the tensors are views of them, which must not be written to afterwards. Else
        copies let them go. Buffers of a workspace, which will be written to, are copied and given back.
        """
        copies = self.workspace is not None or 2 * length < self.capacity
        while len(like.layers) < len(self.layers):  # a DynamicCache() made without a config grows as it is used
            like.layers.append(DynamicLayer())
        for own, layer in zip(self.layers, like.layers, strict=False):
            if not own.is_initialized:
                continue
            start = 0
            if isinstance(layer, DynamicSlidingWindowLayer):
                start = max(0, length - layer.sliding_window + 1)
                layer.cumulative_length = length
            layer.lazy_initialization(own.keys, own.values)
            layer.keys, layer.values = own.keys[:, :, start:length], own.values[:, :, start:length]
            if copies:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        self.release()
