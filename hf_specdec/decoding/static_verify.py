"""StaticVerify: a target's verify forward in shapes and addresses that do not change from round to round.

What `TargetModel.verify` does, for `graphs.py` to capture: trees padded to a bucket of nodes, the prefix to a bucket of
entries, everything a round brings written into the same tensors. Masks are made inside the captured forward, from row
lengths that stay on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_specdec.decoding.graphs import NODE_BUCKETS, Workspace, nodes_bucket, prefix_bucket, write_tree
from hf_specdec.decoding.masks import node_mask
from hf_specdec.decoding.tree import DraftTree

if TYPE_CHECKING:
    from hf_specdec.decoding.target import TargetModel


def capacity_for(entries: int) -> int:
    """Entries of a buffer that lasts for rows of `entries`, nodes of a round included, in sizes that calls share."""
    return prefix_bucket(entries) + NODE_BUCKETS[-1]


class StaticVerify:
    """Verifies the trees of one call.

    Args:
        workspace: of the target's model, claimed for this call.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __call__(
        self, target: TargetModel, tree: DraftTree, position_ids: Tensor, first: int = 0, lead: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [batch, nodes, vocab] float32 and features; good until the next call.

        Args:
            target: of this call; its rows' prompts are intervals (`prompt_starts`).
            tree: what to verify.
            position_ids: [batch, nodes] int64.
            first: runs nodes from this index on, see `TargetModel.verify`.
            lead: nodes before the one that is to lie where the nodes of a round always lie, see there.
        """
        cache, nodes = target.cache, nodes_bucket(tree.num_nodes - first)
        if not first:  # else the round goes on where it began
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

        inputs = self.workspace.inputs(key, make)
        starts = target.prompt_starts
        assert starts is not None
        own = slice(first, None)
        values = (tree.token_ids[:, own], position_ids[:, own], tree.depths, tree.ancestor_mask[:, own], cache.lengths)
        write_tree(inputs, (*values, starts))
        logits, *features = self.workspace.run(key, lambda: _forward(self.workspace, inputs, at), target.model)
        real = slice(0, tree.num_nodes - first)
        return logits[:, real], features[0][:, real] if features else None


def _forward(workspace: Workspace, inputs: tuple[Tensor, ...], at: int) -> tuple[Tensor, ...]:
    """The forward that is captured, of whichever call has the workspace."""
    target: TargetModel | None = workspace.owner() if workspace.owner is not None else None
    assert target is not None
    token_ids, position_ids, depths, sees, lengths, starts = inputs
    masks = {
        kind: node_mask(sees, depths, lengths, at, target.dtype, window=sight.window, chunk=sight.chunk, starts=starts)
        for kind, sight in target.sights.items()
    }
    with target.own_attention:
        outputs = target.model(
            input_ids=token_ids,
            attention_mask=target.masks_as_wanted(masks),
            position_ids=position_ids,
            past_key_values=target.cache,
            use_cache=True,
            return_dict=True,
        )
    features = target.read_taps()
    logits = outputs.logits.to(torch.float32)
    return (logits,) if features is None else (logits, features)
