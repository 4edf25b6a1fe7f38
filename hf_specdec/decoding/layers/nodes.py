"""The nodes of a round, as layers that step from token to token need to know them while a forward runs on a tree."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_specdec.decoding.tree import DraftTree


class NodesOfRound:
    """The nodes of the forward under way, and the layer that it has come to.

    Args:
        tree: of the round.
        first: nodes before this one were run by earlier forwards of the round.

    Attributes:
        calls: how often a rule has run.
    """

    def __init__(self, tree: DraftTree, first: int) -> None:
        self.tree, self.first = tree, first
        self.layer: Any = None
        self.calls = 0
        self._columns: dict[int, Tensor] = {}

    def ancestors(self, device: torch.device) -> Tensor:
        """[batch, nodes, nodes] bool of all nodes of the round."""
        return self.tree.ancestor_mask.to(device)

    def columns(self, kernel: int, device: torch.device) -> Tensor:
        """[batch, nodes, kernel] int64: for each node of the round the last `kernel` places of its path, its own last.

        Nodes count from 0, what lies before the root from -1 downwards.
        """
        if kernel not in self._columns:
            mask = self.ancestors(device)
            # A node's path has its nodes in ascending order: count them from the end.
            behind = mask.flip(-1).cumsum(-1).flip(-1)
            counts = behind[..., :1]
            steps = torch.arange(kernel, 0, -1, device=device)
            place = (mask.unsqueeze(2) & (behind.unsqueeze(2) == steps.view(-1, 1))).int().argmax(-1)
            self._columns[kernel] = place.where(steps <= counts, counts - steps)
        return self._columns[kernel]

    def parents(self, device: torch.device) -> Tensor:
        """[batch, nodes] int64; -1 for the root."""
        return self.columns(2, device)[..., 0]


class _Now(threading.local):
    nodes: NodesOfRound | None = None


_NOW = _Now()


@contextmanager
def on_nodes(tree: DraftTree, first: int) -> Iterator[NodesOfRound]:
    """Forwards made in this thread meanwhile run the host's recurrences on the nodes of `tree` from `first` on."""
    nodes = _NOW.nodes = NodesOfRound(tree, first)
    try:
        yield nodes
    finally:
        _NOW.nodes = None


def nodes_under_way() -> NodesOfRound | None:
    """The nodes that this thread's forward runs on; None where it runs on rows of tokens."""
    return _NOW.nodes
