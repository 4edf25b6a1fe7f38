"""Draft trees as tensors: tokens, parents, depths and the ancestor mask.

Pure functions and one dataclass: no model, no cache, no random numbers. Nodes are in topological order (a parent
before its children) and node 0 is the root, the last committed token, which the target has not seen yet. Rows of a
batch have the same number of nodes; `valid` marks padding. A chain is a tree with one path.
Source: DDTree, arXiv 2604.12989, Sections 4.2 and 4.4. `accept.py` has the acceptance rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_specdec.decoding.devices import abilities


@dataclass  # not frozen: on a CPU, making a frozen dataclass takes three times as long
class DraftTree:
    """What a drafter proposes in one round. Must not be changed after it is made.

    Attributes:
        token_ids: [batch, nodes] int64. Column 0 is the root.
        parents: [batch, nodes] int64. Index of each node's parent, smaller than the node's own; -1 at the root.
        depths: [batch, nodes] int64. 0 at the root.
        ancestor_mask: [batch, nodes, nodes] bool. True where the column is the row itself or one of its ancestors.
        valid: [batch, nodes] bool. False for padding and for all descendants of padding. The root is always valid.
        max_depth: no node is deeper. A number on the host, so that shapes do not depend on device values.
        finite: [batch] bool, or None for all True. False where the drafter's output was NaN or infinite; the root must
            be the only valid node of such a row.
        draft_probs: [batch, nodes - 1, vocab] float32 or None. Entry i is the distribution that the token of node i + 1
            was sampled from; the acceptance rule assumes that this is the exact sampling distribution. None for tokens
            chosen in any other way. Only chains have it. Whether a node is `valid` may depend on its ancestors' tokens,
            but not on its own.
        path_logprobs: [batch, nodes] floating, nats: the drafter's log-probability of the path to each node, or None.
            Nodes are then sorted by it in descending order; 0 at the root, -inf at padding. Sampled chains
            (`draft_probs`) must not have it: cutting them by what was sampled would change the output's distribution.
        no_drafts: [batch] bool, or None for all False. True for rows without drafts, whose NaN logits are accepted: in
            the prefill, and where `without_drafts` has removed all nodes but the root.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    ancestor_mask: Tensor
    valid: Tensor
    max_depth: int
    finite: Tensor | None = None
    draft_probs: Tensor | None = None
    path_logprobs: Tensor | None = None
    no_drafts: Tensor | None = None

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
        path_logprobs: Tensor | None = None,
    ) -> DraftTree:
        """Completes a tree given by its tokens and parents.

        Args:
            token_ids: [batch, nodes] int64.
            parents: [batch, nodes] int64, -1 at the root and smaller than the node's own index elsewhere.
            max_depth: an upper bound of the depth of any node.
            valid: [batch, nodes] bool; if omitted, all nodes of rows that are `finite`. Descendants of an invalid node
                become invalid too, and so does a node with an earlier sibling of the same token: the target's choice
                must select one child.
            finite: see `DraftTree.finite`.
            path_logprobs: see `DraftTree.path_logprobs`.

        Examples:
            >>> tree = DraftTree.from_parents(torch.tensor([[7, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]), max_depth=2)
            >>> tree.depths
            tensor([[0, 1, 1, 2]])
        """
        mask = ancestor_mask(parents, max_depth)
        usable = ~repeats_a_sibling(token_ids, parents)
        if valid is None and finite is not None:
            valid = _nodes_of_finite_rows(finite, token_ids.shape[1])
        if valid is not None:
            usable &= valid
        usable = (usable.unsqueeze(1) | ~mask).all(-1)
        depths = mask.sum(-1) - 1
        return cls(token_ids, parents, depths, mask, usable, max_depth, finite, path_logprobs=path_logprobs)

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        *,
        finite: Tensor | None = None,
        path_logprobs: list[list[float]] | None = None,
        device: torch.device | str | None = None,
    ) -> DraftTree:
        """A tree that was built in host memory.

        Args:
            token_ids: per row its tokens, root first. Rows may differ in length; shorter ones are padded.
            parents: per row the index of each node's parent, -1 at the root. No two children of a node carry the same
                token.
            finite: see `DraftTree.finite`.
            path_logprobs: per row as `DraftTree.path_logprobs`, without padding.
            device: of the tree's tensors.

        Examples:
            >>> tree = DraftTree.from_lists([[7, 1, 2, 3], [8, 4]], [[-1, 0, 0, 2], [-1, 0]])
            >>> tree.depths.tolist(), tree.valid.int().tolist()
            ([[0, 1, 1, 2], [0, 1, 1, 1]], [[1, 1, 1, 1], [1, 1, 0, 0]])
        """
        batch, nodes = len(token_ids), max(map(len, token_ids))
        depths = [[0] + [1] * (nodes - 1) for _ in range(batch)]  # padding nodes are children of the root
        rows = bytearray()  # of booleans: each node may attend to what its parent attends to, and to itself
        for row_parents, row_depths in zip(parents, depths, strict=True):
            start = len(rows)
            for node in range(nodes):
                parent = row_parents[node] if node < len(row_parents) else 0
                if node:
                    row_depths[node] = row_depths[parent] + 1
                    rows += rows[start + parent * nodes : start + (parent + 1) * nodes]
                else:
                    rows += bytes(nodes)
                rows[start + node * nodes + node] = True
        mask = np.frombuffer(rows, dtype=bool).reshape(batch, nodes, nodes)

        def padded(rows: Sequence[Sequence[Any]], padding: Sequence[Any]) -> list[list[Any]]:
            return [[*row, *[fill] * (nodes - len(row))] for row, fill in zip(rows, padding, strict=True)]

        roots = [tokens[0] for tokens in token_ids]
        ids, above, depth = from_host([padded(token_ids, roots), padded(parents, [0] * batch), depths], device)
        if path_logprobs is not None:
            scores = np.asarray(padded(path_logprobs, [-np.inf] * batch), dtype=np.float32)
        return cls(
            ids,
            above,
            depth,
            from_host(mask, device),
            from_host(padded([[True] * len(tokens) for tokens in token_ids], [False] * batch), device),
            max(map(max, depths)),
            finite,
            path_logprobs=None if path_logprobs is None else from_host(scores, device),
        )

    @classmethod
    def chain(
        cls,
        token_ids: Tensor,
        *,
        valid: Tensor | None = None,
        finite: Tensor | None = None,
        draft_probs: Tensor | None = None,
    ) -> DraftTree:
        """A tree with one path: `token_ids` [batch, nodes] int64 in order, root first.

        In each row of `valid`, all True entries must come before all False ones; if omitted, all nodes of rows that are
        `finite` are valid. The other arguments are attributes of the tree.
        """
        batch, nodes = token_ids.shape
        steps = torch.arange(nodes, device=token_ids.device)
        mask = (steps.unsqueeze(1) >= steps).expand(batch, nodes, nodes)
        if valid is None and finite is not None:
            valid = _nodes_of_finite_rows(finite, nodes)
        elif valid is None:
            valid = torch.ones_like(token_ids, dtype=torch.bool)
        depths = steps.expand(batch, nodes)
        return cls(token_ids, depths - 1, depths, mask, valid, nodes - 1, finite, draft_probs)

    @classmethod
    def root_only(cls, root_ids: Tensor) -> DraftTree:
        """A tree without drafts: `root_ids` [batch] int64. The round is then one plain decoding step."""
        return cls.chain(root_ids.unsqueeze(1))

    def first_nodes(self, count: int) -> DraftTree:
        """The root and the first `count` drafted nodes; they are a tree too, since parents come before children.

        Examples:
            >>> tree = DraftTree.from_lists([[7, 1, 2, 3]], [[-1, 0, 0, 2]])
            >>> tree.first_nodes(2).token_ids
            tensor([[7, 1, 2]])
        """
        nodes = 1 + count
        if nodes >= self.num_nodes:
            return self
        return replace(
            self,
            token_ids=self.token_ids[:, :nodes],
            parents=self.parents[:, :nodes],
            depths=self.depths[:, :nodes],
            ancestor_mask=self.ancestor_mask[:, :nodes, :nodes],
            valid=self.valid[:, :nodes],
            max_depth=min(self.max_depth, count),
            draft_probs=None if self.draft_probs is None else self.draft_probs[:, :count],
            path_logprobs=None if self.path_logprobs is None else self.path_logprobs[:, :nodes],
        )

    def without_descendants(self, nodes: Tensor) -> DraftTree:
        """The same tree without the descendants of these `nodes` [batch, nodes] bool, which themselves remain.

        Examples:
            >>> tree = DraftTree.from_lists([[7, 1, 2, 3]], [[-1, 0, 1, 0]])
            >>> tree.without_descendants(torch.tensor([[False, True, False, False]])).valid.int()
            tensor([[1, 1, 0, 1]], dtype=torch.int32)
        """
        own = torch.eye(self.num_nodes, dtype=torch.bool, device=nodes.device)
        valid = self.valid & ~(self.ancestor_mask & ~own & nodes.unsqueeze(1)).any(-1)
        logprobs = self.path_logprobs
        return replace(self, valid=valid, path_logprobs=None if logprobs is None else logprobs.where(valid, -torch.inf))

    def with_padding(self, nodes: int) -> DraftTree:
        """The same tree with `nodes` padding nodes appended: invalid children of the root with the root's token.

        Examples:
            >>> DraftTree.root_only(torch.tensor([7])).with_padding(1).valid
            tensor([[ True, False]])
        """
        rows, before = self.token_ids[:, :1].expand(-1, nodes), self.num_nodes
        mask = nn.functional.pad(self.ancestor_mask, (0, nodes, 0, nodes))
        own = torch.arange(before, before + nodes, device=rows.device)
        mask[:, own, own] = mask[:, own, 0] = True
        return replace(
            self,
            token_ids=torch.cat([self.token_ids, rows], 1),
            parents=torch.cat([self.parents, torch.zeros_like(rows)], 1),
            depths=torch.cat([self.depths, torch.ones_like(rows)], 1),
            ancestor_mask=mask,
            valid=torch.cat([self.valid, torch.zeros_like(rows, dtype=torch.bool)], 1),
            max_depth=max(1, self.max_depth),
            draft_probs=None,
            path_logprobs=None,
        )

    def up_to_depth(self, depths: Tensor) -> DraftTree:
        """The same tree; nodes deeper than `depths` [batch] int64, at least 0, become invalid."""
        valid = self.valid & (self.depths <= depths.to(self.depths.device).unsqueeze(1))
        return replace(self, valid=valid)

    def without_drafts(self, rows: Tensor) -> DraftTree:
        """The same tree without drafts in `rows` [batch] bool: all other nodes become padding, `finite` becomes False.

        Examples:
            >>> tree = DraftTree.from_lists([[7, 1], [8, 4]], [[-1, 0], [-1, 0]])
            >>> tree = tree.without_drafts(torch.tensor([False, True]))
            >>> tree.token_ids.tolist(), tree.valid.int().tolist()
            ([[7, 1], [8, 8]], [[1, 1], [1, 0]])
        """
        kept = ~rows.unsqueeze(1).expand_as(self.valid)
        kept[:, 0] = True
        return replace(
            self,
            token_ids=self.token_ids.where(kept, self.token_ids[:, :1]),
            valid=self.valid & kept,
            finite=~rows if self.finite is None else self.finite & ~rows,
            no_drafts=rows if self.no_drafts is None else self.no_drafts | rows,
        )

    def of_rows(self, rows: Sequence[int]) -> DraftTree:
        """Selects rows."""
        index = from_host(rows, self.token_ids.device)
        return self._changed(lambda part: part[index])

    def of_row(self, row: int) -> DraftTree:
        """Selects one row, without a copy."""
        return self._changed(lambda part: part[row : row + 1])

    def to(self, device: torch.device) -> DraftTree:
        """The same tree on another device; from host memory it comes without a device sync."""
        own = self.token_ids.device
        ahead = abilities(own).host_memory and abilities(device).works_ahead  # see `from_host`
        return self if own == device else self._changed(lambda part: part.to(device, non_blocking=ahead))

    def read(self) -> list[tuple[list[int], list[int], list[int], list[float] | None]]:
        """Of each row `token_ids`, `parents`, `valid` and `path_logprobs` on the host, in one transfer.

        Examples:
            >>> DraftTree.from_lists([[7, 1, 2, 3]], [[-1, 0, 0, 2]]).read()
            [([7, 1, 2, 3], [-1, 0, 0, 2], [1, 1, 1, 1], None)]
        """
        integers, scores = [self.token_ids, self.parents, self.valid], self.path_logprobs
        if scores is None:
            return [(*row, None) for row in torch.stack([part.long() for part in integers], 1).tolist()]
        # Ids are exact in float32, since no vocabulary has 2^24 tokens.
        rows = torch.stack(
            [part.to(torch.promote_types(scores.dtype, torch.float32)) for part in (*integers, scores)], 1
        )
        return [(*([int(number) for number in part] for part in row), logprobs) for *row, logprobs in rows.tolist()]

    def _changed(self, change: Callable[[Tensor], Tensor]) -> DraftTree:
        changed: dict[str, Any] = {name: change(each) for name, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **changed)

    def within_vocabulary(self, vocab_size: int) -> DraftTree:
        """The same tree; nodes with ids outside [0, vocab_size), which the target cannot embed, become invalid."""
        if abilities(self.token_ids.device).host_memory:  # reading values needs no sync there
            least, most = self.token_ids.aminmax()
            if least >= 0 and most < vocab_size:
                return self
        inside = (self.token_ids >= 0) & (self.token_ids < vocab_size)
        inside[:, 0] = True
        valid = self.valid & (inside.unsqueeze(1) | ~self.ancestor_mask).all(-1)
        return replace(self, token_ids=self.token_ids.where(valid, self.token_ids[:, :1]), valid=valid)


def from_host(values: Sequence[Any] | np.ndarray, device: torch.device | str | None) -> Tensor:
    """A small tensor of numbers on the host, copied to a device without a device sync.

    `torch.tensor(values, device=...)` would wait for the copy.

    Examples:
        >>> from_host([3, 1], "cpu")
        tensor([3, 1])
    """
    # NumPy converts a list faster than torch. CUDA reads the numbers before `to` returns, so that non_blocking is safe;
    # on Apple devices that is not certain.
    tensor = torch.from_numpy(np.asarray(values))
    return tensor if device is None else tensor.to(device, non_blocking=abilities(torch.device(device)).works_ahead)


def pick(values: Tensor, nodes: Tensor) -> Tensor:
    """`values` [batch, nodes, ...] at the indices `nodes` [batch, steps] int64: [batch, steps, ...].

    Examples:
        >>> pick(torch.tensor([[5, 6, 7]]), torch.tensor([[2, 0]]))
        tensor([[7, 5]])
    """
    if nodes.shape[0] == 1:  # one operation; `gather` needs three
        return values.index_select(1, nodes[0])
    index = nodes.view(*nodes.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """Which nodes are on the path from the root to each node; found by following the parents `max_depth` times.

    Args:
        parents: [batch, nodes] int64, -1 at the root.
        max_depth: an upper bound of the depth of any node.

    Returns:
        [batch, nodes, nodes] bool, True where the column is the row itself or an ancestor.

    Examples:
        >>> ancestor_mask(torch.tensor([[-1, 0, 1]]), max_depth=2).int()
        tensor([[[1, 0, 0],
                 [1, 1, 0],
                 [1, 1, 1]]], dtype=torch.int32)
    """
    batch, nodes = parents.shape
    above = parents.clamp(min=0)  # the root is its own parent here
    paths = [torch.arange(nodes, device=parents.device).expand(batch, nodes)]
    for _ in range(max_depth):
        paths.append(above.gather(1, paths[-1]))
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=parents.device)
    return mask.scatter_(2, torch.stack(paths, dim=-1), True)


def _nodes_of_finite_rows(finite: Tensor, nodes: int) -> Tensor:
    """[batch, nodes] bool: True at all nodes of rows that are `finite` [batch], and at the root of the others."""
    valid = finite.unsqueeze(1).expand(-1, nodes).clone()
    valid[:, 0] = True
    return valid


def repeats_a_sibling(token_ids: Tensor, parents: Tensor) -> Tensor:
    """[batch, nodes] bool: True where an earlier node has the same parent and the same token."""
    nodes = token_ids.shape[1]
    same = (token_ids.unsqueeze(-1) == token_ids.unsqueeze(1)) & (parents.unsqueeze(-1) == parents.unsqueeze(1))
    index = torch.arange(nodes, device=token_ids.device)
    return (same & (index.unsqueeze(-1) > index)).any(-1)
