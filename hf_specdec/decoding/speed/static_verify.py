"""`static_verify`: a target's verify forward with the same shapes and addresses in every round.

It does what `TargetModel.verify` does, in a form that `cuda_graphs.py` can capture: the tree is padded to a bucket of
nodes, the prefix to a bucket of entries, and the values of a round are written into the same tensors. The captured
forward computes the masks, from row lengths on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_specdec.decoding.speed.cuda_graphs import DRAFT_SIZES, Workspace, nodes_bucket, prefix_bucket, write_tree
from hf_specdec.decoding.targets.masks import node_mask
from hf_specdec.decoding.tree import DraftTree


def capacity_for(entries: int) -> int:
    """Entries of a buffer for rows of `entries` and the nodes of a round; rounded up, so that calls share buffers."""
    return prefix_bucket(entries) + 1 + DRAFT_SIZES[-1]


def static_verify(
    workspace: Workspace, target: Any, tree: DraftTree, position_ids: Tensor, first: int = 0, lead: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Logits [batch, nodes, vocab] float32 and features; valid until the next call.

    Args:
        workspace: of the target's model, reserved for this call.
        target: the `TargetModel` of this call. Each prompt is one interval of entries (`prompt_starts`).
        tree: to verify.
        position_ids: [batch, nodes] int64.
        first: runs nodes from this index on, see `TargetModel.verify`.
        lead: the node with this index is written at the bucket's entry, and those before it are committed next,
            see `TargetModel.verify`.
    """
    cache, nodes = target.cache, nodes_bucket(tree.num_nodes - first)
    if not first:  # otherwise the nodes are written where the round began
        cache.place_nodes(prefix_bucket(cache.longest + lead) - lead)
    at = cache.node_start
    cache.reserve(first + nodes)
    batch, device = cache.batch, cache.lengths.device
    key = (batch, nodes, first, at, target.feature_layers, cache.addresses)

    def make() -> tuple[Tensor, ...]:
        numbers = torch.zeros(2, batch, nodes, dtype=torch.int64, device=device)
        depths, rows = numbers.new_zeros(batch, first + nodes), numbers.new_zeros(2, batch)
        itself = torch.eye(nodes, dtype=torch.bool, device=device)
        sees = torch.nn.functional.pad(itself, (first, 0)).repeat(batch, 1, 1)
        return (*numbers, depths, sees, *rows)

    inputs = workspace.inputs(key, make)
    starts = target.prompt_starts
    assert starts is not None
    own = slice(first, None)
    values = (tree.token_ids[:, own], position_ids[:, own], tree.depths, tree.ancestor_mask[:, own], cache.lengths)
    write_tree(inputs, (*values, starts))
    logits, *features = workspace.run(key, lambda: _forward(workspace, inputs, at), target.model)
    real = slice(0, tree.num_nodes - first)
    return logits[:, real], features[0][:, real] if features else None


def _forward(workspace: Workspace, inputs: tuple[Tensor, ...], at: int) -> tuple[Tensor, ...]:
    """The forward to capture, for the call that currently owns the workspace."""
    target: Any = workspace.owner() if workspace.owner is not None else None
    assert target is not None
    token_ids, position_ids, depths, sees, lengths, starts = inputs
    masks = {
        kind: node_mask(
            sees, depths, lengths, at, target.dtype, window=limits.window, chunk=limits.chunk, starts=starts
        )
        for kind, limits in target.ranges.items()
    }
    with target.own_attention:
        outputs = target.model(
            input_ids=token_ids,
            attention_mask=target.masks_for_host(masks),
            position_ids=position_ids,
            use_cache=True,
            return_dict=True,
            **{target.cache_name: target.cache},
        )
    features = target.read_taps()
    logits = outputs.logits.to(torch.float32)
    return (logits,) if features is None else (logits, features)
