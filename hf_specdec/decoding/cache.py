"""TreeCache: the keys and values of committed tokens, plus the nodes of the round in flight.

Every attention layer keeps all keys and values (sliding windows live in the masks only), each row of a batch has its
own length, and the buffers are zeroed, since a masked NaN would still poison a softmax. A round writes all its nodes
behind the longest row; `commit` then moves the accepted ones to the end of their own row, for all layers in one copy,
and rollback is forgetting the rest. The same cache serves targets and drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from hf_specdec.decoding.tree import count_up

GROWTH = 256  # entries added at a time when a row outgrows its capacity


class Extent:
    """What a cache shares with its layers: the length of the longest row, and nodes of the round that lie behind it.

    A reference from the layers to the cache itself would be a cycle, and its memory would wait for the collector.
    """

    longest: int | None = None  # None during prefill
    held: int = 0  # nodes of the round in flight that earlier forwards have written


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one attention layer, [batch, kv_heads, entries, head_dim] as the host model sees them."""

    is_sliding = False  # all entries are kept, so stock masks of the prefill must not shift
    is_croppable = False

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self.extent = extent

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
        start = self.extent.longest + self.extent.held
        stop = start + key_states.shape[2]
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_seq_length(self) -> int:
        if self.extent.longest is not None:
            return self.extent.longest + self.extent.held
        return self.keys.shape[2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """A cache for rounds of draft trees, in two phases: `prefill` (rows grow together), then rounds (rows diverge).

    Args:
        num_layers: attention layers that will write here.

    Attributes:
        row_lengths: committed entries of each row. Left padding counts: its entries exist, the mask hides them.
        lengths: the same as [batch] int64, on the device of the first layer.
    """

    def __init__(self, num_layers: int) -> None:
        self._extent = Extent()
        super().__init__(layers=[TreeCacheLayer(self._extent) for _ in range(num_layers)])
        self.row_lengths: list[int] = []
        self.lengths: Tensor
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
            kinds = sorted({type(layer).__name__ for layer in cache.layers})
            raise ValueError(
                f"past_key_values is a {type(cache).__name__} with layers {kinds}; speculative decoding can continue "
                "only a DynamicCache of full or sliding-window attention layers without offloading. Pass a "
                "DynamicCache, or leave past_key_values out."
            )
        own = cls(num_layers)
        for layer, source in zip(own.layers, cache.layers, strict=False):
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
    ) -> TreeCache:
        """A cache that starts with rounds at once, no entry committed, all layers of one shape on one device."""
        cache = cls(num_layers)
        nothing = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        for layer in cache.layers:
            layer.lazy_initialization(nothing, nothing)
        cache.begin_rounds(capacity)
        return cache

    @property
    def longest(self) -> int:
        """The largest of `row_lengths`."""
        assert self._extent.longest is not None, "the cache is still in its prefill phase"
        return self._extent.longest

    def begin_rounds(self, capacity: int) -> None:
        """Ends the prefill: moves every layer into preallocated buffers with room for `capacity` entries a row."""
        started = [layer for layer in self.layers if layer.is_initialized]
        batch, _, length, _ = started[0].keys.shape
        self.lengths = torch.empty(0, dtype=torch.int64, device=started[0].device)
        self._allocate(started, length, capacity)
        self._set_lengths([length] * batch)

    def _allocate(self, layers: Sequence[CacheLayerMixin], length: int, capacity: int) -> None:
        groups: dict[tuple[object, ...], list[tuple[CacheLayerMixin, str]]] = {}
        for layer in layers:
            for name in ("keys", "values"):
                _, kv_heads, _, head_dim = getattr(layer, name).shape
                groups.setdefault((kv_heads, head_dim, layer.dtype, layer.device), []).append((layer, name))
        self._slabs = []
        for (kv_heads, head_dim, dtype, device), members in groups.items():
            batch = getattr(*members[0]).shape[0]
            # Entries before heads: a row and an entry make one index, so that a commit is one gather, one scatter.
            shape = (len(members), batch, capacity, kv_heads, head_dim)
            slab = torch.zeros(shape, dtype=dtype, device=device)  # type: ignore[call-overload]
            torch.stack(
                [getattr(layer, name)[:, :, :length].transpose(1, 2) for layer, name in members],
                out=slab[:, :, :length],
            )
            for view, (layer, name) in zip(slab.transpose(2, 3), members, strict=True):
                setattr(layer, name, view)
            self._slabs.append(slab)
        # Where each row begins once rows and entries are one axis.
        self._row_starts = torch.arange(batch, device=self.lengths.device).unsqueeze(1) * capacity

    @property
    def capacity(self) -> int:
        """Entries a row can hold before the buffers must grow."""
        return self._slabs[0].shape[2]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.row_lengths)

    def reserve(self, nodes: int) -> None:
        """Makes room for a round of `nodes` nodes behind the longest row; grows the buffers in steps where needed."""
        if self.longest + nodes > self.capacity:
            started = [layer for layer in self.layers if layer.is_initialized]
            self._allocate(started, self.longest + self._extent.held, self.longest + nodes + GROWTH)

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
        longest = self.longest
        if batch == 1:
            source = path[0] + longest
            target = count_up(longest + steps, path.device, start=longest)
        else:
            source = (path + (self._row_starts + longest)).flatten()
            target = (count_up(steps, path.device) + (self._row_starts + self.lengths.unsqueeze(1))).flatten()
        for slab in self._slabs:
            flat = slab.view(slab.shape[0], batch * self.capacity, -1)
            kept = flat.index_select(1, source.to(slab.device))
            # Entries past a row's count land behind its new end, where nothing is read before it is written again.
            flat.index_copy_(1, target.to(slab.device), kept)
        self._set_lengths([length + count for length, count in zip(self.row_lengths, counts, strict=True)])

    def commit_first(self, counts: Sequence[int]) -> None:
        """Keeps the first `counts` nodes of the round, in order, at the end of each row: a commit of a chain.

        Where all rows have one length, the nodes already lie where they belong.
        """
        if min(self.row_lengths) == self.longest:
            self._set_lengths([length + count for length, count in zip(self.row_lengths, counts, strict=True)])
        else:
            steps = count_up(max(counts), self.lengths.device)
            self.commit(steps.expand(self.batch, -1), counts)

    def rollback(self, row_lengths: Sequence[int]) -> None:
        """Forgets all entries of each row beyond `row_lengths`."""
        assert all(new <= old for new, old in zip(row_lengths, self.row_lengths, strict=True))
        self._set_lengths(list(row_lengths))

    def _set_lengths(self, row_lengths: list[int]) -> None:
        self.row_lengths = row_lengths
        longest = max(row_lengths)
        if min(row_lengths) == longest:  # a view of one number: quicker than a new tensor
            length = count_up(longest + 1, self.lengths.device, start=longest)
            self.lengths = length if len(row_lengths) == 1 else length.expand(len(row_lengths))
        else:
            self.lengths = torch.as_tensor(np.array(row_lengths), device=self.lengths.device)
        self._extent.longest, self._extent.held = longest, 0

    def to_dynamic(self, like: Cache, length: int) -> None:
        """Makes `like`, the DynamicCache that the caller keeps, hold the first `length` entries of every row.

        Sliding layers receive their window only, as plain decoding would have left them. Nothing is copied: the
        tensors are views of this cache's buffers, which must not be written to afterwards.
        """
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
