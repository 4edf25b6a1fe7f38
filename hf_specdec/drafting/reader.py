"""CommittedReader: what drafters with a cache of their own share in one `generate` call.

Tokens that were committed since the last draft are pending. One forward of the drafter reads them, appends their
entries to its cache, and gives what drafting starts from. It is the same function in all rounds: eagerly it runs over
as many columns as there are pending tokens, right behind the longest row of the cache; captured
(`decoding/speed/cuda_graphs.py`) over a fixed number of columns, at a fixed entry. Rows of different lengths are padded
on the right, prompts too, so that one mask covers both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.exchange import Committed
from hf_specdec.decoding.speed.cuda_graphs import CompileMode, nodes_bucket, prefix_bucket, static_calls
from hf_specdec.decoding.speed.static_verify import capacity_for
from hf_specdec.decoding.state import joined
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import from_host, pick

# Layers, heads, width of keys, of values (None: as keys), and of an indexer's keys (None: no indexer).
EntryShape = tuple[int, int, int, int | None, int | None]


@dataclass(frozen=True)
class NewTokens:
    """The tokens that a forward reads, and where their entries are written.

    Attributes:
        at: the first new entry in the cache, behind those of earlier tokens.
        even: whether all rows have `at` earlier entries and no padding, so that nothing has to be hidden.
        lengths: [batch] int64, earlier entries of each row.
        counts: [batch] int64, new tokens of each row, the first ones; padding follows.
        token_ids: [batch, new] int64.
        position_ids: [batch, new] int64.
        features: [batch, new, taps * hidden], of the drafter's dtype.
    """

    at: int
    even: bool
    lengths: Tensor
    counts: Tensor
    token_ids: Tensor
    position_ids: Tensor
    features: Tensor

    @functools.cached_property
    def last(self) -> Tensor:
        """[batch, 1] int64, the column of each row's last token; 0 in rows without one."""
        return (self.counts - 1).clamp(min=0).unsqueeze(1)

    def following(self, root_ids: Tensor) -> Tensor:
        """[batch, new] int64: the token after each one; after the last it is the root."""
        return self.token_ids.roll(-1, dims=1).scatter(1, self.last, root_ids.unsqueeze(1))

    def at_last(self, values: Tensor, before: Tensor | None) -> Tensor:
        """[batch, new, ...] -> [batch, 1, ...] at each row's last token; `before` in rows without new tokens."""
        index = self.last.view(-1, 1, *[1] * (values.dim() - 2)).expand(-1, 1, *values.shape[2:])
        found = values.gather(1, index)
        if before is None or self.even:
            return found
        return found.where((self.counts > 0).view(-1, *[1] * (found.dim() - 1)), before)

    def causal_mask(self, each: int = 1) -> Tensor | None:
        """[batch, new, at + new] bool: a token sees its row's earlier entries, and new ones up to its own.

        None for an empty cache without padding, where attention is causal without a mask. `each` is the number of
        entries of a token, numbered in order.
        """
        if self.even and not self.at:
            return None
        order = torch.arange(self.token_ids.shape[1] * each, device=self.token_ids.device)
        counts = self.counts if each == 1 else self.counts * each
        own = (order.unsqueeze(1) >= order) & (order < counts[:, None, None])
        return behind_committed(own, self.at, self.lengths)


def behind_committed(own: Tensor, at: int, lengths: Tensor) -> Tensor:
    """The mask of a forward's own entries, with each row's committed entries, all visible, in front.

    Args:
        own: [batch, queries, entries] bool.
        at: entries in front, [batch, queries, at + entries] in all.
        lengths: [batch] int64, how many of them are committed.
    """
    past = torch.arange(at, device=own.device) < lengths.unsqueeze(1)
    return torch.cat([past.unsqueeze(1).expand(-1, own.shape[1], -1), own], -1)


def last_features(committed: Committed, before: Tensor | None = None) -> Tensor:
    """[batch, taps * hidden]: the target's features at each row's last committed token.

    Args:
        committed: of the prefill or a round.
        before: the result before it, for rows that have committed nothing.
    """
    features, valid = committed.features, committed.valid
    assert features is not None, "feature_layers() has requested them"
    if valid is None:
        return features[:, -1]
    valid = valid.to(features.device)
    last = (valid * torch.arange(valid.shape[1], device=valid.device)).amax(1, keepdim=True)
    found = pick(features, last).squeeze(1)
    return found if before is None else found.where(valid.any(1, keepdim=True), before)


class LastStates:
    """Part of what drafts from the target's state at the last committed token alone.

    Attributes:
        last_states: [batch, taps * hidden], of each row; set by the first `observe`, of the prefill.
    """

    last_states: Any = None

    def observe(self, committed: Committed) -> None:
        """See `TreeCandidateGenerator.observe`."""
        self.last_states = last_features(committed, self.last_states)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See `TreeCandidateGenerator.keep_rows`."""
        self.last_states = self.last_states[from_host(rows, self.last_states.device)]

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        """See `TreeCandidateGenerator.join`."""
        self.last_states = joined(self.last_states, [other.last_states for other in others], places)


class CommittedReader:
    """Reads committed tokens with a drafter; subclasses draft.

    Args:
        drafter: of the call.
        target: of the call.
        entry_shape: of the drafter's entries.
        borrowed: modules of the target that the drafter runs.
        most: most tokens that a round commits.
        room: most entries of drafted tokens.
        entries: of a token.
        compile_mode: see `DrafterOptions`.

    Attributes:
        cache: a `TreeCache` of committed tokens, and of drafted ones within a round; None before the first `read`.
        pending: tokens that are not in it yet.
        last: per row, from where drafting starts: the result of the last `read`, [batch, ...] each.
        calls: the captured computations of a round; None if nothing is captured.
        drafts_early: see `TreeCandidateGenerator`.
    """

    def __init__(
        self,
        drafter: Any,
        target: TargetModel,
        entry_shape: EntryShape,
        *,
        borrowed: Sequence[nn.Module],
        most: int,
        room: int,
        entries: int = 1,
        compile_mode: CompileMode,
    ) -> None:
        self.drafter, self.target, self.entry_shape, self.entries = drafter, target, entry_shape, entries
        self.device, self.dtype = drafter.device, drafter.dtype  # transformers searches the parameters for each access
        self.width, self.room = nodes_bucket(most), room
        self.cache: Any = None
        self.pending: Committed | None = None
        self.last: tuple[Tensor, ...] = ()
        self.calls = static_calls(self, drafter, borrowed, compile_mode)
        self.drafts_early = self.calls is not None

    def observe(self, committed: Committed) -> None:
        """See `TreeCandidateGenerator.observe`."""
        self.pending = committed if self.pending is None else self.pending.followed_by(committed)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See `TreeCandidateGenerator.keep_rows`."""
        if self.cache is not None:
            self.cache.keep_rows(rows)
        self.pending = None if self.pending is None else self.pending.of_rows(rows)
        index = from_host(rows, self.device)
        self.last = tuple(part[index] for part in self.last)

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        """See `TreeCandidateGenerator.join`."""
        assert self.pending is not None, "a round was observed since the last draft"
        self.cache.join([other.cache for other in others], places)
        self.pending = self.pending.joined([other.pending for other in others], places)
        parts = zip(self.last, *(other.last for other in others), strict=True)
        self.last = tuple(joined(own, new, places) for own, *new in parts)

    def close(self) -> None:
        """Ends the call; the next call may then reuse the captured computations."""
        if self.calls is not None:
            self.calls.workspace.release()

    def take_pending(self) -> Committed:
        """The pending tokens, padded on the right, on the drafter's device, with features in its dtype."""
        pending, device = self.pending, self.device
        assert pending is not None, "draft() before the prefill was observed"
        self.pending = None
        if pending.tree is None and pending.valid is not None:
            pending = pending.aligned()
        assert pending.features is not None
        return replace(
            pending,
            token_ids=pending.token_ids.to(device),
            features=pending.features.to(device=device, dtype=self.dtype),
            position_ids=pending.position_ids.to(device),
            counts=pending.counts.to(device),
        )

    def read(
        self,
        step: Callable[..., tuple[Tensor, ...]],
        *values: Tensor,
        pending: Committed | None = None,
        key: Hashable = (),
        room: int = 0,
    ) -> tuple[Tensor, ...]:
        """`step(reader, new, *values)` for the pending tokens, whose entries it appends to the cache.

        Args:
            step: the drafter's forward; captured if drafting is, so that it must depend on `key`, the shapes, and what
                does not change during the call.
            values: [batch, ...] each.
            pending: from `take_pending`, or a part of it; None for all.
            key: see `StaticCalls`.
            room: drafted entries that the step writes after those of the tokens, and which are dropped.
        """
        pending = self.take_pending() if pending is None else pending
        batch, new = pending.token_ids.shape
        if self.cache is None:
            self.cache = self._make_cache(batch, new)
        cache, calls = self.cache, self.calls
        columns: Any = (pending.token_ids, pending.position_ids, pending.features)
        values = (cache.lengths, pending.counts.tensor, *values)
        if calls is not None and pending.tree is not None and new <= self.width:
            at = self.place(self.width * self.entries + room)
            call = functools.partial(_read, step, at, False, len(values))
            name = ("read", step, key, at, cache.addresses)
            found = calls(name, call, *values, padded=columns, width=self.width)
        else:
            cache.reserve(new * self.entries + room)
            even = pending.valid is None and cache.is_even
            found = _read(step, cache.longest, even, len(values), self, *values, *columns)
        cache.commit_first(pending.counts.times(self.entries))
        return found

    def run(self, step: Callable[..., tuple[Tensor, ...]], *values: Tensor, key: Hashable = ()) -> tuple[Tensor, ...]:
        """`step(at, reader, *values)`, for entries of drafted tokens from `at` on; dropped afterwards."""
        at = self.place(self.room)
        if self.calls is None:
            found = step(at, self, *values)
        else:
            name = ("run", step, key, at, self.cache.addresses)
            found = self.calls(name, functools.partial(step, at), *values)
        self.cache.rollback()
        return found

    def place(self, entries: int) -> int:
        """Reserves so many entries behind the committed ones; returns where they begin, in captured rounds a bucket."""
        at = self.cache.longest
        if self.calls is not None:
            at = prefix_bucket(at)
            self.cache.place_nodes(at)
        self.cache.reserve(entries)
        return at

    def _make_cache(self, batch: int, new: int) -> TreeCache:
        capacity = (new + 256) * self.entries + self.room
        if self.calls is not None:  # buffers with the target's capacity suffice for the whole call
            capacity = max(self.target.cache.capacity * self.entries, capacity_for(capacity))
        layers, heads, key_dim, value_dim, index_dim = self.entry_shape
        return TreeCache.empty(
            layers, batch, heads, key_dim, value_dim=value_dim, index_dim=index_dim, dtype=self.dtype,
            device=self.device, capacity=capacity, workspace=None if self.calls is None else self.calls.workspace,
        )  # fmt: skip


def _read(
    step: Callable[..., tuple[Tensor, ...]], at: int, even: bool, count: int, reader: CommittedReader, *values: Tensor
) -> tuple[Tensor, ...]:
    """`step` with the first two and the last three values as `NewTokens`; there are `count` before the latter."""
    new = NewTokens(at, even, *values[:2], *values[count:])
    return step(reader, new, *values[2:count])
