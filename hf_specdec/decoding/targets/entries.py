"""Entries: keys and values of softmax attention, one entry per token. Nodes are written after the longest row.

All entries are kept; sliding windows exist only in the masks. New buffers are zeroed, because the attention output is
NaN if a masked entry is NaN. Layers of one shape share a buffer, so that a commit is one gather and one scatter for all
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hf_specdec.decoding.speed.cuda_graphs import Workspace
from hf_specdec.decoding.tree import from_host

GROWTH = 256  # least entries added when a row outgrows its capacity; long rows grow by a quarter
SLAB_BYTES = 1 << 28  # of one buffer, if it is of several layers: while it is filled, these are stored twice


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


class EntriesLayer(CacheLayerMixin):
    """Keys and values of one attention layer, [batch, kv_heads, entries, head_dim] as the model sees them."""

    is_sliding = False  # all entries are kept, so transformers' masks of the prefill must not be shifted
    is_croppable = False

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self.extent = extent
        self.window: int | None = None  # entries that transformers' own cache would give a query, its own included
        self.dropped = 0  # entries that the caller's cache had dropped before this call
        self.contiguous = False  # whether a forward gets contiguous copies of the entries

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the attributes that have an entry per token."""
        return ("keys", "values")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends [batch, kv_heads, new, head_dim] entries; returns all entries that a query may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.extent.longest is None:  # prefill: all rows grow alike, in transformers' chunks
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
            return self.keys, self.values
        start, new = self.extent.node_start + self.extent.written, key_states.shape[2]
        self.keys.narrow(2, start, new).copy_(key_states)  # faster than slicing; this runs in every layer
        self.values.narrow(2, start, new).copy_(value_states)
        keys, values = self.keys.narrow(2, 0, start + new), self.values.narrow(2, 0, start + new)
        return (keys.contiguous(), values.contiguous()) if self.contiguous else (keys, values)

    def load_from(self, source: CacheLayerMixin) -> None:
        """Loads the entries of a DynamicCache layer; entries that its window has dropped become zeros."""
        self.window = source.sliding_window if isinstance(source, DynamicSlidingWindowLayer) else None
        if source.is_initialized and source.keys is not None and source.keys.numel():
            self.dropped = source.get_seq_length() - source.keys.shape[2]
            padding = (0, 0, self.dropped, 0)
            self.lazy_initialization(source.keys, source.values)
            self.keys = nn.functional.pad(source.keys, padding)
            self.values = nn.functional.pad(source.values, padding)

    def hand_back_more(self, layer: Any, length: int) -> None:
        """Writes what has an entry per token besides keys and values to a layer of the caller's cache."""

    def get_seq_length(self) -> int:
        if not self.is_initialized:  # cross-attention without inputs is never initialized
            return 0
        if self.extent.longest is not None:
            return self.extent.node_start + self.extent.written
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class IndexedLayer(EntriesLayer):
    """With the keys of an indexer, which selects the entries that attention reads: [batch, 1, entries, index_dim]."""

    def __init__(self, extent: Extent) -> None:
        super().__init__(extent)
        self.index: Tensor | None = None  # some layers of a model with indexers have none

    @property
    def names(self) -> tuple[str, ...]:
        return ("keys", "values") if self.index is None else ("keys", "values", "index")

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Appends [batch, new, index_dim] entries; returns all entries that a query may attend to."""
        new = indexer_key_states.unsqueeze(1)
        if self.extent.longest is None:
            self.index = new if self.index is None else torch.cat([self.index, new], 2)
            return self.index.squeeze(1)
        assert self.index is not None, "a round follows a prefill"
        start = self.extent.node_start + self.extent.written
        self.index.narrow(2, start, new.shape[2]).copy_(new)
        return self.index.narrow(2, 0, start + new.shape[2]).squeeze(1)

    def load_from(self, source: Any) -> None:
        super().load_from(source)
        if source.is_indexer_initialized:
            self.index = source.indexer_keys.unsqueeze(1)

    def hand_back_more(self, layer: Any, length: int) -> None:
        if self.index is not None:
            layer.lazy_initialization_indexer(self.index)
            layer.indexer_keys = self.index[:, 0, :length].clone()


class Entries:
    """All attention layers of one cache. A round does not change what was stored before it.

    Args:
        layers: as transformers reads and writes them; layers that were never written to are skipped.
        extent: of the cache.
        workspace: provides buffers that are reused by later calls, or None.
    """

    def __init__(self, layers: Sequence[Any], extent: Extent, workspace: Workspace | None) -> None:
        self.layers = [layer for layer in layers if isinstance(layer, EntriesLayer) and layer.is_initialized]
        self.all_layers, self.extent, self.workspace = layers, extent, workspace
        self._slabs: list[Tensor] = []  # each [keys and values of some layers, batch, capacity, kv_heads, head_dim]

    @property
    def device(self) -> torch.device:
        """Of the first layer."""
        return self.layers[0].device

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.layers[0].keys.shape[0]

    @property
    def capacity(self) -> int:
        """Entries a row can hold before the buffers must grow."""
        return self._slabs[0].shape[2] if self._slabs else 0

    @property
    def addresses(self) -> tuple[int, ...]:
        """Data pointers of the buffers."""
        return tuple(slab.data_ptr() for slab in self._slabs)

    def begin_rounds(self, capacity: int, *, contiguous: bool) -> None:
        """Ends the prefill; rows may hold `capacity` entries, and more after `reserve`."""
        if self.layers:
            for layer in self.layers:
                layer.contiguous = contiguous and self.batch > 1  # a single row is contiguous without a copy
            self._allocate(self.layers[0].keys.shape[2], capacity)

    def reserve(self, entries: int) -> None:
        """Makes room for this many entries per row, nodes included."""
        if self.layers and entries > self.capacity:
            self._allocate(self.extent.node_start + self.extent.written, entries + max(GROWTH, entries // 4))

    def _allocate(self, length: int, capacity: int) -> None:
        groups: dict[tuple[Any, ...], list[tuple[EntriesLayer, str]]] = {}
        for layer in self.layers:
            for name in layer.names:
                stored = getattr(layer, name)
                kind = (stored.shape[1], stored.shape[3], stored.dtype, stored.device)
                groups.setdefault(kind, []).append((layer, name))
        before, self._slabs = self._slabs if self.workspace is not None else [], []
        for (kv_heads, head_dim, dtype, device), members in groups.items():
            # Entries before heads: row and entry then form one index, so that a commit is one gather and one scatter.
            size = self.batch * capacity * kv_heads * head_dim * dtype.itemsize  # 0 where a layer keeps no values
            most = max(1, SLAB_BYTES // max(1, size))
            for first in range(0, len(members), most):
                some = members[first : first + most]
                slab = self._new_slab((len(some), self.batch, capacity, kv_heads, head_dim), dtype, device)
                torch.stack(
                    [getattr(layer, name)[:, :, :length].transpose(1, 2) for layer, name in some],
                    out=slab[:, :, :length],
                )
                for view, (layer, name) in zip(slab.transpose(2, 3), some, strict=True):
                    setattr(layer, name, view)
                self._slabs.append(slab)
        if self.workspace is not None:
            for slab in before:
                self.workspace.give_back(slab)

    def _new_slab(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.workspace is not None:
            return self.workspace.take(shape, dtype, device)
        with torch.inference_mode(False):  # `hand_back` passes views of it to the caller
            return torch.zeros(shape, dtype=dtype, device=device)

    def release(self) -> None:
        """Returns the buffers to the workspace, for the next call. The entries must not be used afterwards."""
        if self.workspace is not None:
            for slab in self._slabs:
                self.workspace.give_back(slab)
            self._slabs = []
            self.workspace.release()

    def commit(self, path: Tensor, lengths: Tensor, counts: Tensor) -> None:
        """Appends nodes of the round to each row.

        Args:
            path: [batch, steps] int64 nodes in ascending order. Columns beyond a row's count are ignored.
            lengths: [batch] int64, entries of each row before the commit.
            counts: [batch] int64, nodes of the path that each row keeps.
        """
        batch, steps = path.shape
        # Entries beyond a row's count are written after its new end; they are overwritten before they are read.
        source, target = path + self.extent.node_start, lengths.unsqueeze(1) + torch.arange(steps, device=path.device)
        if batch > 1:
            rows = torch.arange(batch, device=path.device).unsqueeze(1) * self.capacity
            source, target = source + rows, target + rows
        self.move(source.flatten(), target.flatten())

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies entries; both arguments [moved] int64, flat indices row * capacity + entry."""
        for slab in self._slabs:
            flat = slab.view(slab.shape[0], self.batch * self.capacity, -1)
            flat.index_copy_(1, target.to(slab.device), flat.index_select(1, source.to(slab.device)))

    def clear_uncommitted(self, row_lengths: Sequence[int]) -> None:
        """Zeros the entries of nodes, and those that transformers' own cache would have dropped.

        They may hold NaN, and masks do not stop NaN, because 0 * NaN is NaN.
        """
        for slab in self._slabs:
            for row, length in enumerate(row_lengths):
                slab[:, row, length:] = 0
        for layer in self.layers:
            if layer.window is not None:
                for row, length in enumerate(row_lengths):
                    for stored in (layer.keys, layer.values):
                        stored[row, :, : max(0, length + 1 - layer.window)] = 0

    def take_row(self, row: int, length: int) -> list[list[Tensor]]:
        """A copy of a row's content, for `put_rows`."""
        return [[getattr(layer, name)[row, :, :length].clone() for name in layer.names] for layer in self.layers]

    def replace_row(self, row: int, saved: list[list[Tensor]]) -> None:
        """Writes what `take_row` has saved in the place of a row, with zeros behind it, where the row may hold NaN."""
        for layer, parts in zip(self.layers, saved, strict=True):
            for name, part in zip(layer.names, parts, strict=True):
                stored, length = getattr(layer, name)[row], part.shape[1]
                stored[:, :length] = part
                stored[:, length:] = 0

    def keep_rows(self, rows: Sequence[int], longest: int) -> None:
        """Continues with these rows only, in this order."""
        self._replace(longest, lambda stored, _: stored[from_host(rows, stored.device), :, :longest])

    def put_rows(self, saved: dict[int, list[list[Tensor]]], longest: int) -> None:
        """Inserts rows saved by `take_row`; each key is the row's index in the resulting batch."""

        def joined(stored: Tensor, index: tuple[int, int]) -> Tensor:
            (layer, part), own = index, iter(stored[:, :, :longest])
            batch = len(stored) + len(saved)
            rows = [saved[row][layer][part] if row in saved else next(own) for row in range(batch)]
            return torch.stack([nn.functional.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows])

        self._replace(longest, joined)

    def _replace(self, longest: int, change: Callable[[Tensor, tuple[int, int]], Tensor]) -> None:
        """Replaces all entries: `change(stored, (layer, index of the name))` returns new ones, `longest` per row."""
        capacity = self.capacity
        if self.workspace is None:
            self._slabs = []  # each is freed with the last of its layers
        for index, layer in enumerate(self.layers):
            for part, name in enumerate(layer.names):
                setattr(layer, name, change(getattr(layer, name), (index, part)))
        self._allocate(longest, max(capacity, longest))

    def hand_back(self, like: Cache, length: int) -> None:
        """Writes to `like`, the caller's cache, what plain decoding would have left after `length` tokens.

        Sliding layers get only their window, unless they record their past.
        If the buffers are at least half full, the caller gets views, and the buffers must not be written to afterwards.
        Otherwise the caller gets copies, so that the buffers can be freed. Buffers of a workspace are always copied,
        because later calls write to them.
        """
        copies = self.workspace is not None or 2 * length < self.capacity
        last = max((index for index, layer in enumerate(self.all_layers) if layer in self.layers), default=-1)
        while len(like.layers) <= last:  # a DynamicCache() without a config adds layers when they are first used
            like.layers.append(DynamicLayer())
        for own, layer in zip(self.all_layers, like.layers, strict=False):
            if own not in self.layers:
                continue
            start = 0
            if isinstance(layer, DynamicSlidingWindowLayer):
                start = own.dropped if layer.record_past else max(0, length - layer.sliding_window + 1)
                layer.cumulative_length = length
            layer.lazy_initialization(own.keys, own.values)
            layer.keys, layer.values = own.keys[:, :, start:length], own.values[:, :, start:length]
            if copies:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
            own.hand_back_more(layer, length)
