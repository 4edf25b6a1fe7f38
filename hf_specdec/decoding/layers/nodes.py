"""The nodes of a round, as layers that step from token to token need to know them while a forward runs on a tree."""

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
    """What the nodes of a round lie behind.

    Attributes:
        lengths: [batch] int64, committed entries of each row, left padding included.
        entries: of the cache, up to the first node.
        prompt_mask: [batch, prompt] bool, which of the first entries may be seen; None for all.
    """

    lengths: Tensor
    entries: int
    prompt_mask: Tensor | None


class NodesOfRound:
    """The nodes of the forward under way, and the layer that it has come to.

    Args:
        tree: of the round.
        first: nodes before this one were run by earlier forwards of the round.
        prefix: what the nodes lie behind.

    Attributes:
        layer: the layer with states that the forward has come to; None before the first.
    """

    def __init__(self, tree: DraftTree, first: int, prefix: Prefix) -> None:
        self.tree, self.first, self.prefix = tree, first, prefix
        self.layer: Any = None
        self._made: dict[Any, Tensor] = {}  # for the layers of a forward, which ask for the same

    def entries(self, device: torch.device) -> Tensor:
        """[batch, new] int64: the entry of the cache at which plain decoding would have each new node."""
        lengths, depths = self.prefix.lengths.to(device), self.tree.depths.to(device)
        return lengths.unsqueeze(1) + depths[:, self.first :]

    def places(self, device: torch.device) -> Tensor:
        """[batch, prefix + nodes] int64: the place of every key in the text of its row, padding not counted."""
        prefix, lengths = self.prefix, self.prefix.lengths.to(device)
        seen = torch.ones(len(lengths), prefix.entries, dtype=torch.int64, device=device)
        if prefix.prompt_mask is not None:
            seen[:, : prefix.prompt_mask.shape[1]] = prefix.prompt_mask.to(device)
        hidden = (1 - seen).sum(1, keepdim=True)
        nodes = lengths.unsqueeze(1) - hidden + self.tree.depths.to(device)
        return torch.cat([(seen.cumsum(1) - 1).clamp(min=0), nodes], 1)

    @property
    def longest_text(self) -> int:
        """No key has a place beyond this number of tokens."""
        return self.prefix.entries + self.tree.max_depth + 1

    def ancestors(self, device: torch.device) -> Tensor:
        """[batch, nodes, nodes] bool of all nodes of the round."""
        return self.tree.ancestor_mask.to(device)

    def path_sums(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[batch, nodes, nodes], 1 where a node is on the path to another: what sums along paths are a product with."""
        key = ("sums", dtype, device)
        if key not in self._made:
            self._made[key] = self.ancestors(device).to(dtype)
        return self._made[key]

    def apart(self, device: torch.device) -> Tensor:
        """[batch, 1, new, nodes] bool, True where a node is not on the path to a new one."""
        key = ("apart", device)
        if key not in self._made:
            self._made[key] = ~self.ancestors(device)[:, None, self.first :]
        return self._made[key]

    def columns(self, kernel: int, device: torch.device) -> Tensor:
        """[batch, nodes, kernel] int64: for each node of the round the last `kernel` places of its path, its own last.

        Nodes count from 0, what lies before the root from -1 downwards.
        """
        key = ("columns", kernel, device)
        if key not in self._made:
            mask = self.ancestors(device)
            # A node's path has its nodes in ascending order: count them from the end.
            behind = mask.flip(-1).cumsum(-1).flip(-1)
            counts = behind[..., :1]
            steps = torch.arange(kernel, 0, -1, device=device)
            place = (mask.unsqueeze(2) & (behind.unsqueeze(2) == steps.view(-1, 1))).int().argmax(-1)
            self._made[key] = place.where(steps <= counts, counts - steps)
        return self._made[key]

    def parents(self, device: torch.device) -> Tensor:
        """[batch, nodes] int64; -1 for the root."""
        return self.columns(2, device)[..., 0]


class _Now(threading.local):
    nodes: NodesOfRound | None = None


_NOW = _Now()


@contextmanager
def on_nodes(tree: DraftTree, first: int, prefix: Prefix) -> Iterator[NodesOfRound]:
    """Forwards made in this thread meanwhile run on the nodes of `tree` from `first` on."""
    nodes = _NOW.nodes = NodesOfRound(tree, first, prefix)
    try:
        yield nodes
    finally:
        _NOW.nodes = None


@contextmanager
def on_rows() -> Iterator[None]:
    """What runs in this thread meanwhile runs on rows of tokens, although a round is under way."""
    nodes, _NOW.nodes = _NOW.nodes, None
    try:
        yield
    finally:
        _NOW.nodes = nodes


def nodes_under_way() -> NodesOfRound | None:
    """The nodes that this thread's forward runs on; None where it runs on rows of tokens."""
    return _NOW.nodes
