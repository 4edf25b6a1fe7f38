"""Draft trees as tensors: tokens, parents, depths and the ancestor mask.

Pure functions and one frozen dataclass: no model, no cache, no random numbers. Nodes are in topological order (a parent
before its children) and node 0 is the root, the last committed token, which the target has not seen yet. Rows of a
batch share the number of nodes and differ in everything else; `valid` tells padding from nodes. A chain is a tree.
Source: DDTree, arXiv 2604.12989, Sections 4.2 and 4.4. What the target makes of a tree is decided in `acceptance.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """What a drafter proposes in one round.

    Attributes:
        token_ids: [batch, nodes] int64. Column 0 is the root.
        parents: [batch, nodes] int64. Index of each node's parent, smaller than the node's own; -1 at the root.
        depths: [batch, nodes] int64. 0 at the root.
        ancestor_mask: [batch, nodes, nodes] bool. True where the column is the row itself or one of its ancestors.
        valid: [batch, nodes] bool. False for padding and for everything below padding. The root is always valid.
        max_depth: no node is deeper (known to the host, so that shapes never wait for the device).
        finite: [batch] bool, or None for all True. False where the drafter's output was NaN or infinite; such a row
            must have no valid node but the root.
        children: per row (parent, token) -> node for all valid nodes, or None. A drafter that builds trees in host
            memory knows it anyway; the accepted path is then a few look-ups instead of tensor operations.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    ancestor_mask: Tensor
    valid: Tensor
    max_depth: int
    finite: Tensor | None = None
    children: list[dict[tuple[int, int], int]] | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes per row, root included."""
        return self.token_ids.shape[1]

    @classmethod
    def from_parents(
        cls,
        token_ids: Tensor,
        parents: Tensor,
        max_depth: int,
        *,
        valid: Tensor | None = None,
        finite: Tensor | None = None,
    ) -> DraftTree:
        """Completes a tree given by its tokens and parents.

        Args:
            token_ids: [batch, nodes] int64.
            parents: [batch, nodes] int64, -1 at the root and smaller than the node's own index elsewhere.
            max_depth: an upper bound of the depth of any node.
            valid: [batch, nodes] bool, True where omitted. A node below an invalid one becomes invalid too, and so
                does a node with an earlier sibling of the same token: the target's choice must name one child.
            finite: see `DraftTree.finite`.

        Example:
            >>> tree = DraftTree.from_parents(torch.tensor([[7, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]), max_depth=2)
            >>> tree.depths
            tensor([[0, 1, 1, 2]])
        """
        mask = ancestor_mask(parents, max_depth)
        usable = ~repeats_a_sibling(token_ids, parents)
        if valid is not None:
            usable &= valid
        # A node is usable when no ancestor (itself included) is unusable.
        usable = (usable.unsqueeze(1) | ~mask).all(-1)
        return cls(token_ids, parents, mask.sum(-1) - 1, mask, usable, max_depth, finite)

    @classmethod
    def chain(cls, token_ids: Tensor, *, valid: Tensor | None = None, finite: Tensor | None = None) -> DraftTree:
        """A tree with one path: `token_ids` [batch, nodes] int64 in order, root first; `valid` must be a prefix."""
        batch, nodes = token_ids.shape
        steps = torch.arange(nodes, device=token_ids.device)
        mask = (steps.unsqueeze(1) >= steps).expand(batch, nodes, nodes)
        if valid is None:
            valid = torch.ones_like(token_ids, dtype=torch.bool)
        depths = steps.expand(batch, nodes)
        return cls(token_ids, depths - 1, depths, mask, valid, nodes - 1, finite)

    @classmethod
    def root_only(cls, root_ids: Tensor) -> DraftTree:
        """No draft at all: `root_ids` [batch] int64. The round is then one plain decoding step."""
        return cls.chain(root_ids.unsqueeze(1))

    def within_vocabulary(self, vocab_size: int) -> DraftTree:
        """The same tree without nodes that the target cannot embed: ids outside [0, vocab_size) become invalid."""
        if self.children is not None and all(
            0 <= token < vocab_size for known in self.children for _, token in known
        ):
            return self
        inside = (self.token_ids >= 0) & (self.token_ids < vocab_size)
        inside[:, 0] = True
        valid = self.valid & (inside.unsqueeze(1) | ~self.ancestor_mask).all(-1)
        token_ids = self.token_ids.where(valid, self.token_ids[:, :1])
        return replace(self, token_ids=token_ids, valid=valid, children=None)


def count_up(count: int, device: torch.device) -> Tensor:
    """[count] int64: 0, 1, 2, ... as a view of a tensor made once per device; small new tensors are dear on a CPU."""
    numbers = _NUMBERS.get(device)
    if numbers is None or len(numbers) < count:
        with torch.inference_mode(False):  # it outlives the call, whatever mode the call runs in
            numbers = _NUMBERS[device] = torch.arange(max(count, 1024), device=device)
    return numbers[:count]


_NUMBERS: dict[torch.device, Tensor] = {}


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """Which nodes are on the path from the root to each node, by doubling: log2(max_depth) batched products.

    Args:
        parents: [batch, nodes] int64, -1 at the root.
        max_depth: an upper bound of the depth of any node.

    Returns:
        [batch, nodes, nodes] bool, True where the column is the row itself or an ancestor.

    Example:
        >>> ancestor_mask(torch.tensor([[-1, 0, 1]]), max_depth=2).int()
        tensor([[[1, 0, 0],
                 [1, 1, 0],
                 [1, 1, 1]]], dtype=torch.int32)
    """
    nodes = parents.shape[1]
    index = torch.arange(nodes, device=parents.device)
    reached = ((parents.unsqueeze(-1) == index) | (index.unsqueeze(-1) == index)).float()
    steps = 1
    while steps < max_depth:
        reached = torch.bmm(reached, reached)
        steps *= 2
    return reached > 0


def repeats_a_sibling(token_ids: Tensor, parents: Tensor) -> Tensor:
    """[batch, nodes] bool: True where an earlier node has the same parent and the same token."""
    nodes = token_ids.shape[1]
    # One key per (parent, token) pair; ids may be negative or out of vocabulary, so the pair is compared, not hashed.
    same = (token_ids.unsqueeze(-1) == token_ids.unsqueeze(1)) & (parents.unsqueeze(-1) == parents.unsqueeze(1))
    index = torch.arange(nodes, device=token_ids.device)
    return (same & (index.unsqueeze(-1) > index)).any(-1)
