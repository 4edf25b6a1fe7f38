"""The state of EAGLE drafters in one `generate` call: their cache of committed pairs.

A pair is a committed token and the target's features before it. The pairs of a round are appended to the cache in one
forward, after the token that follows the last of them, the next root, is known. Source: EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.generator import Committed
from hf_specdec.decoding.graphs import CompileMode, nodes_bucket, prefix_bucket, static_calls
from hf_specdec.decoding.masks import additive
from hf_specdec.decoding.modules import check_table, table_rows
from hf_specdec.decoding.static_verify import capacity_for
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import from_host
from hf_specdec.drafters.vocabulary import known_ids


class PairCache:
    """The committed pairs of each row.

    Args:
        drafter: an `Eagle3Drafter`, or one with its interface.
        target: of the call.
        depth: most tokens of a drafted path.
        room: cache entries that drafting needs after the pairs.
        compile_mode: see `DrafterOptions`.
    """

    def __init__(self, drafter: Any, target: TargetModel, *, depth: int, room: int, compile_mode: CompileMode) -> None:
        self.drafter, self.room = drafter, room
        self.own_embeddings = drafter.config.own_embeddings
        self.embeddings: nn.Module = (
            drafter.embed_tokens if self.own_embeddings else target.model.get_input_embeddings()
        )
        check_table(self.embeddings)
        self.vocab_size: int  # columns of the target's logits
        self.cache: TreeCache | None = None
        self.pending: Committed | None = None
        self.calls = static_calls(self, drafter, (self.embeddings,), compile_mode)
        self.width = nodes_bucket(depth + 1)  # most tokens that a round commits
        self.target = target  # the capacity of its cache limits the length of rows
        # [batch, hidden], the drafter's output at each row's last pair.
        self.last_outputs: Tensor | None = None

    def observe(self, committed: Committed) -> None:
        self.pending = committed if self.pending is None else self.pending.followed_by(committed)
        self.vocab_size = committed.target_logits.shape[-1]

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.keep_rows(rows)
        self.pending = None if self.pending is None else self.pending.of_rows(rows)
        if self.last_outputs is not None:
            self.last_outputs = self.last_outputs[from_host(rows, self.last_outputs.device)]

    def close(self) -> None:
        if self.calls is not None:
            self.calls.workspace.release()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, hidden] of the drafter's dtype, on its device."""
        table: Any = self.embeddings
        if self.own_embeddings:  # the target may have tokens that this table lacks
            token_ids = known_ids(token_ids, table.num_embeddings)
        # Subclasses of nn.Embedding may scale their outputs; drafters are trained on the unscaled table.
        return table_rows(table, token_ids).to(device=self.drafter.device, dtype=self.drafter.dtype)

    def append_pairs(self, root_ids: Tensor) -> Tensor:
        """Appends the pairs committed since the last round; returns each row's output at its last pair.

        Args:
            root_ids: [batch] int64.

        Returns:
            [batch, hidden].
        """
        drafter, pending = self.drafter, self.pending
        assert pending is not None, "draft() before the prefill was observed"
        assert pending.features is not None
        device, dtype = drafter.device, drafter.dtype
        batch, new = pending.token_ids.shape
        if self.cache is None:
            capacity = new + self.room + 256
            if self.calls is not None:  # buffers with the target's capacity suffice for the whole call
                capacity = max(self.target.cache.capacity, capacity_for(capacity))
            layers, heads, key_dim, value_dim, index_dim = drafter.entry_shape
            self.cache = TreeCache.empty(
                layers, batch, heads, key_dim, value_dim=value_dim, index_dim=index_dim, dtype=dtype, device=device,
                capacity=capacity, workspace=None if self.calls is None else self.calls.workspace,
            )  # fmt: skip
        if self.calls is not None and pending.tree is not None and new <= self.width:
            return self._append_captured(root_ids, pending)
        self.cache.reserve(new + self.room)

        last = root_ids.new_full((batch, 1), new - 1)
        if pending.valid is not None:
            last = (pending.valid * torch.arange(new, device=root_ids.device)).amax(1, keepdim=True)
        # The token after each committed one; after the last of a row this is the root.
        next_ids = pending.token_ids.roll(-1, dims=1).scatter(1, last, root_ids.unsqueeze(1))
        mask, is_causal = self._pair_mask(pending, new)
        outputs = drafter(
            self.embed(next_ids),
            drafter.fuse(pending.features.to(device=device, dtype=dtype)),
            pending.position_ids.to(device),
            mask=mask,
            is_causal=is_causal,
            cache=self.cache,
        )
        outputs = outputs.gather(1, last.to(device).unsqueeze(-1).expand(-1, -1, outputs.shape[-1])).squeeze(1)
        if self.last_outputs is not None and 0 in pending.num_committed:
            # A finished row has no new pair: its output stays.
            moved = pending.counts.to(device).tensor > 0
            outputs = outputs.where(moved.unsqueeze(1), self.last_outputs)
        if pending.tree is None and pending.valid is not None:
            # Left padding comes first: commit the other pairs, in order.
            padding = (~pending.valid).to(device=device, dtype=torch.int8)
            self.cache.commit(padding.argsort(dim=1, stable=True), pending.counts.to(device))
        else:
            self.cache.commit_first(pending.counts.to(device))
        self.pending, self.last_outputs = None, outputs
        return outputs

    def _append_captured(self, root_ids: Tensor, pending: Committed) -> Tensor:
        """`append_pairs` for the pairs of a round, in one captured launch."""
        assert self.cache is not None
        assert self.calls is not None
        assert self.last_outputs is not None
        assert pending.features is not None
        counts = pending.counts.to(self.drafter.device)
        at = prefix_bucket(self.cache.longest)
        self.cache.place_nodes(at)
        self.cache.reserve(self.width + self.room)
        (outputs,) = self.calls(
            ("pairs", at, self.cache.addresses),
            functools.partial(_pairs, at),
            root_ids,
            self.cache.lengths,
            counts.tensor,
            self.last_outputs,
            padded=(pending.token_ids, pending.position_ids, pending.features),
            width=self.width,
        )
        self.cache.commit_first(counts)
        self.pending, self.last_outputs = None, outputs
        return outputs

    def _pair_mask(self, pending: Committed, new: int) -> tuple[Tensor | None, bool]:
        """Additive [batch, 1, new, cached + new] or None, and whether the attention is causal without a mask."""
        cache = self.cache
        assert cache is not None
        if pending.valid is None and cache.longest == 0:
            return None, True
        causal = torch.ones(new, new, dtype=torch.bool, device=self.drafter.device).tril()
        block = causal.expand(cache.batch, new, new)
        if pending.valid is not None:
            block = block & pending.valid.to(self.drafter.device).unsqueeze(1)
        return self.additive(block, cache.longest, cache.lengths), False

    def additive(self, block: Tensor, at: int, lengths: Tensor) -> Tensor:
        """An additive mask: each row's earlier entries, and those of this round as `block` says.

        Args:
            block: [batch, queries, entries of this round] bool.
            at: earlier entries in the cache.
            lengths: [batch] int64, how many of them are visible in each row.
        """
        entries = torch.arange(at, device=block.device)
        past = (entries < lengths.unsqueeze(1)).unsqueeze(1).expand(-1, block.shape[1], -1)
        return additive(torch.cat([past, block], dim=-1), self.drafter.dtype)


def _pairs(
    at: int,
    pairs: PairCache,
    root_ids: Tensor,
    lengths: Tensor,
    counts: Tensor,
    last_outputs: Tensor,
    token_ids: Tensor,
    position_ids: Tensor,
    features: Tensor,
) -> tuple[Tensor]:
    """`PairCache.append_pairs` after the prompt, in fixed shapes, for `decoding/graphs.py` to capture.

    Args:
        at: where the new pairs' entries begin in the cache, after those of earlier pairs.
        pairs: of the call.
        root_ids: [batch] int64.
        lengths: [batch] int64, earlier pairs of each row.
        counts: [batch] int64, new pairs of each row, the first of `width`.
        last_outputs: [batch, hidden], for rows without new pairs.
        token_ids: [batch, width] int64, committed tokens.
        position_ids: [batch, width] int64, of the committed tokens.
        features: [batch, width, taps * hidden], of the committed tokens.
    """
    drafter, width = pairs.drafter, token_ids.shape[1]
    last = (counts - 1).clamp(min=0).unsqueeze(1)
    next_ids = token_ids.roll(-1, dims=1).scatter(1, last, root_ids.unsqueeze(1))
    indices = torch.arange(width, device=token_ids.device)
    block = (indices.unsqueeze(1) >= indices) & (indices < counts[:, None, None])
    outputs = drafter(
        pairs.embed(next_ids),
        drafter.fuse(features.to(drafter.dtype)),
        position_ids,
        mask=pairs.additive(block, at, lengths),
        cache=pairs.cache,
    )
    outputs = outputs.gather(1, last.unsqueeze(-1).expand(-1, -1, outputs.shape[-1])).squeeze(1)
    return (outputs.where(counts.unsqueeze(1) > 0, last_outputs),)
