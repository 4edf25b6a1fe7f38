"""The nodes of the current forward, for layers whose computation depends on the order of tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specdec.decoding.tree import DraftTree


@dataclass(frozen=True)
class Prefix:
    """The cache entries before the nodes of a round.

    Attributes:
        lengths: [batch] int64, committed entries of each row, left padding included.
        entries: number of entries before the first node.
        prompt_mask: [batch, prompt] bool, which of the first entries may be attended to; None for all.
    """

    lengths: Tensor
    entries: int
    prompt_mask: Tensor | None


@dataclass(frozen=True)
class Paths:
    """Some nodes of one row whose paths have one length, with the cache entries that each of them attends to.

    Attributes:
        row: of the batch.
        nodes: [nodes] int64, as indices into the nodes of the forward.
        entries: [nodes, length] int64, in the order of the text; None if that is the first `length` for all of them.
        length: number of entries that each attends to.
        mask: [length] bool, False at padding; None if plain decoding passes no mask.
    """

    row: int
    nodes: Tensor
    entries: Tensor | None
    length: int
    mask: Tensor | None

    def entries_of(self, stored: Tensor) -> Tensor:
        """[batch, heads, all, dim] -> [nodes, heads, length, dim], for each node its own."""
        own = stored[self.row]
        if self.entries is None:
            return own[:, : self.length].expand(len(self.nodes), -1, -1, -1)
        return own.index_select(1, self.entries.flatten()).unflatten(1, self.entries.shape).transpose(0, 1)


class NodesOfRound:
    """The nodes of the current forward, and the layer that is being computed.

    Args:
        tree: of the round.
        first: nodes before this one were run by earlier forwards of the round.
        prefix: the entries before the nodes.
        alone: whether each node attends as in plain decoding, see `same_bits.py`.

    Attributes:
        layer: the cache layer with states that was last used by the forward; None before the first.
    """

    def __init__(self, tree: DraftTree, first: int, prefix: Prefix, alone: bool = False) -> None:
        self.tree, self.first, self.prefix, self.alone = tree, first, prefix, alone
        self.layer: Any = None
        self._cached: dict[Any, Tensor] = {}  # tensors that all layers of a forward share
        self._paths: list[Paths] | None = None

    def entries(self, device: torch.device) -> Tensor:
        """[batch, new] int64: the cache entry that each new node would have in plain decoding."""
        lengths, depths = self.prefix.lengths.to(device), self.tree.depths.to(device)
        return lengths.unsqueeze(1) + depths[:, self.first :]

    def key_positions(self, device: torch.device) -> Tensor:
        """[batch, prefix + nodes] int64: the position of every key in the text of its row, padding not counted."""
        prefix, lengths = self.prefix, self.prefix.lengths.to(device)
        seen = torch.ones(len(lengths), prefix.entries, dtype=torch.int64, device=device)
        if prefix.prompt_mask is not None:
            seen[:, : prefix.prompt_mask.shape[1]] = prefix.prompt_mask.to(device)
        hidden = (1 - seen).sum(1, keepdim=True)
        nodes = lengths.unsqueeze(1) - hidden + self.tree.depths.to(device)
        return torch.cat([(seen.cumsum(1) - 1).clamp(min=0), nodes], 1)

    @property
    def longest_text(self) -> int:
        """All positions of keys are smaller than this."""
        return self.prefix.entries + self.tree.max_depth + 1

    def ancestors(self, device: torch.device) -> Tensor:
        """[batch, nodes, nodes] bool of all nodes of the round."""
        return self.tree.ancestor_mask.to(device)

    def path_sums(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[batch, nodes, nodes], 1 where the column is on the path to the row: a product with it sums along paths."""
        key = ("sums", dtype, device)
        if key not in self._cached:
            self._cached[key] = self.ancestors(device).to(dtype)
        return self._cached[key]

    def not_on_path(self, device: torch.device) -> Tensor:
        """[batch, 1, new, nodes] bool, True where the column is not on the path to the new node of the row."""
        key = ("not_on_path", device)
        if key not in self._cached:
            self._cached[key] = ~self.ancestors(device)[:, None, self.first :]
        return self._cached[key]

    def columns(self, kernel: int, device: torch.device) -> Tensor:
        """[batch, nodes, kernel] int64: the last `kernel` indices of the path to each node, which is the last of them.

        Nodes are numbered from 0, tokens before the root from -1 downwards.
        """
        key = ("columns", kernel, device)
        if key not in self._cached:
            mask = self.ancestors(device)
            # The nodes of a path are in ascending order: count them from the end.
            from_end = mask.flip(-1).cumsum(-1).flip(-1)
            counts = from_end[..., :1]
            steps = torch.arange(kernel, 0, -1, device=device)
            index = (mask.unsqueeze(2) & (from_end.unsqueeze(2) == steps.view(-1, 1))).int().argmax(-1)
            self._cached[key] = index.where(steps <= counts, counts - steps)
        return self._cached[key]

    def paths(self) -> list[Paths]:
        """All nodes of the forward, grouped by row and length of path; on the device of the tree."""
        if self._paths is None:
            self._paths = [paths for row in range(len(self.tree.token_ids)) for paths in self._paths_of_row(row)]
        return self._paths

    def _paths_of_row(self, row: int) -> Iterator[Paths]:
        prefix, length = self.prefix, int(self.prefix.lengths[row])
        sees = self.tree.ancestor_mask[row, self.first :]
        steps = sees.sum(-1)
        for count in steps.unique().tolist():
            nodes = (steps == count).nonzero().squeeze(1)
            own = prefix.entries + sees[nodes].nonzero()[:, 1].view(len(nodes), count)
            entries = torch.cat([torch.arange(length, device=own.device).expand(len(nodes), -1), own], 1)
            is_first = bool((entries == torch.arange(length + count, device=own.device)).all())
            mask = None
            if prefix.prompt_mask is not None:
                mask = torch.ones(length + count, dtype=torch.bool, device=own.device)
                mask[: prefix.prompt_mask.shape[1]] = prefix.prompt_mask[row]
            yield Paths(row, nodes, None if is_first else entries, length + count, mask)

    def parents(self, device: torch.device) -> Tensor:
        """[batch, nodes] int64; -1 for the root."""
        return self.columns(2, device)[..., 0]


class _Current(threading.local):
    nodes: NodesOfRound | None = None


_CURRENT = _Current()


@contextmanager
def on_nodes(tree: DraftTree, first: int, prefix: Prefix, *, alone: bool = False) -> Iterator[NodesOfRound]:
    """In this context, forwards of this thread run on the nodes of `tree` from `first` on."""
    nodes = _CURRENT.nodes = NodesOfRound(tree, first, prefix, alone)
    try:
        yield nodes
    finally:
        _CURRENT.nodes = None


@contextmanager
def on_token_rows() -> Iterator[None]:
    """In this context, forwards of this thread run on rows of tokens, even inside `on_nodes`."""
    nodes, _CURRENT.nodes = _CURRENT.nodes, None
    try:
        yield
    finally:
        _CURRENT.nodes = nodes


def current_nodes() -> NodesOfRound | None:
    """The nodes that this thread's forward runs on; None if it runs on rows of tokens."""
    return _CURRENT.nodes
