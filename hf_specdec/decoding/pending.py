"""PendingChain: a chain of draft nodes on its way through the target's layers, for drafters that are the target itself.

Such a drafter looks at a node after a few layers and decides there what to draft next. The chain keeps the hidden state
of every node at the layer where it stands (one state per node, whatever the length of the prompt), and brings nodes
that lag behind up in one batch as soon as a later node needs their keys and values: a node never runs a layer before
the nodes above it have run it, and never runs one twice. `TargetModel.verify` lets a tree with such a chain go on from
where it stands, so that every node has then passed every layer, and the target's cache holds what a whole forward
would have left there.
Source: SpecBound (bounded speculation with cached states), Section 2.3, Figures 2 and 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_specdec.decoding.modes import inference_on_cpu

if TYPE_CHECKING:
    from hf_specdec.decoding.target import TargetModel


class PendingChain:
    """Nodes of one round, root first; rows of a batch stand at the same layers.

    Args:
        target: whose layers are run.
        root_positions: [batch] int64, `target.root_positions()` at the start of the round.
        width: most nodes that the chain may get, root included.
    """

    def __init__(self, target: TargetModel, root_positions: Tensor, width: int) -> None:
        self.target, self.slices, self.cache = target, target.slices, target.cache
        self.width, self.num_nodes = width, 0
        self.cache.reserve(width)
        self._template = target.chain_template(len(root_positions), width)
        self._positions = target.position_ids(self._template, root_positions)
        self._masks: dict[str, Tensor] | None = None
        self._rotary: dict[str, tuple[Tensor, Tensor]] | None = None
        # [(layers passed, [batch, nodes, hidden])] in the order of the nodes: no node has passed more than its parent.
        self._segments: list[tuple[int, Tensor]] = []

    @property
    def num_states(self) -> int:
        """Hidden states kept per row: one per node."""
        return sum(states.shape[1] for _, states in self._segments)

    @property
    def layers_passed(self) -> list[int]:
        """How many layers each node has passed."""
        return [passed for passed, states in self._segments for _ in range(states.shape[1])]

    def extend(self, token_ids: Tensor) -> None:
        """Adds a node per row below the last one: [batch] int64. It has passed no layer yet."""
        assert self.num_nodes < self.width, f"the chain was made for {self.width} nodes"
        node = slice(self.num_nodes, self.num_nodes + 1)
        with inference_on_cpu(token_ids.device):
            hidden = self.slices.embed(token_ids.unsqueeze(1), self._positions[:, node])
            if self._rotary is None:  # for all nodes to come
                self._rotary = self.slices.rotary(hidden, self._positions)
        self._segments.append((0, hidden))
        self.num_nodes += 1

    def advance(self, layer: int) -> Tensor:
        """Brings the last node to where it has passed `layer` layers; nodes above it are taken along where needed.

        Returns:
            [batch, hidden], the last node's state there.
        """
        segments = self._segments
        with inference_on_cpu(segments[-1][1].device):
            while segments[-1][0] < layer:
                passed, states = segments.pop()
                while segments and segments[-1][0] == passed:
                    states = torch.cat([segments.pop()[1], states], dim=1)
                stop = min(layer, segments[-1][0]) if segments else layer
                segments.append((stop, self._run(states, passed, stop)))
        return segments[-1][1][:, -1]

    def finish(self) -> Tensor:
        """All nodes through all remaining layers: [batch, nodes, vocab], the target's logits."""
        self.advance(self.slices.num_layers)
        states = torch.cat([states for _, states in self._segments], dim=1)
        with inference_on_cpu(states.device):
            return self.slices.logits(states)

    def _run(self, states: Tensor, first: int, last: int) -> Tensor:
        """Layers `first` to `last` - 1 for the last nodes of the chain, as many as there are states."""
        start, stop = self.num_nodes - states.shape[1], self.num_nodes
        assert self._rotary is not None
        nodes = slice(start, stop)
        masks = None
        if states.shape[1] > 1 or not self.target.all_entries_visible:
            if self._masks is None:
                self._masks = self.target.attention_masks(self._template)
            entries = self.cache.longest + stop
            masks = {kind: mask[:, :, nodes, :entries] for kind, mask in self._masks.items()}
        self.target.num_layers_run += last - first
        with self.cache.behind(start), self.target.own_attention:
            return self.slices.run(
                states,
                first,
                last,
                position_ids=self._positions[:, nodes],
                rotary={kind: (cos[:, nodes], sin[:, nodes]) for kind, (cos, sin) in self._rotary.items()},
                masks=masks,
                cache=self.cache,
            )
