"""Recurrent: layers that keep a state of one size in place of an entry per token, and convolutions before them.

During a round the state stays what it was before the root, and the layer keeps a tape: what each node would add to it
(`rules.py` writes it). A commit notes the path; the state at its end is computed from base and tape when the next round
begins, in one step per layer, so that counts may live on the device only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from hf_specdec.decoding.layers.base import Extent, LayerStates
from hf_specdec.decoding.layers.entries import EntriesLayer
from hf_specdec.decoding.layers.nodes import nodes_under_way
from hf_specdec.decoding.tree import from_host, pick

# From a base [batch, ...], what the nodes of a path add, each [batch, steps, ...], and which of them are kept
# [batch, steps] bool, to the state at the end of the path.
Advance = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]


@dataclass
class Tape:
    """What the nodes of a round add to the states of one layer.

    Attributes:
        inputs: of the convolutions, by the number of the state, [batch, channels, nodes].
        parts: of the recurrence, each [batch, nodes, ...].
        advance: how they change the state; None for a layer that has only convolutions.
        after: in place of all these the states after each node, [batch, nodes, ...], in the order of
            `RecurrentLayer.states`, of a layer that has stepped from node to node (`stepped.py`).
    """

    inputs: dict[int, Tensor] = field(default_factory=dict)
    parts: tuple[Tensor, ...] = ()
    advance: Advance | None = None
    after: list[Tensor] = field(default_factory=list)

    def of(self, nodes: Tensor | int | None) -> Tape:
        """The tape of some nodes: of these [batch, nodes] int64, of all from a number on, of none."""
        if nodes is None:
            return Tape()
        if isinstance(nodes, int):
            inputs = {index: each[:, :, nodes:] for index, each in self.inputs.items()}
            parts, after = ([each[:, nodes:] for each in these] for these in (self.parts, self.after))
        else:
            inputs = {index: pick(each.mT, nodes).mT for index, each in self.inputs.items()}
            parts, after = ([pick(each, nodes) for each in these] for these in (self.parts, self.after))
        return Tape(inputs, tuple(parts), self.advance, after)

    def add(self, held: int, parts: Sequence[Tensor], advance: Advance) -> tuple[Tensor, ...]:
        """Notes nodes behind the first `held`; returns the parts of all nodes."""
        if held:
            parts = [torch.cat([before[:, :held], new], 1) for before, new in zip(self.parts, parts, strict=True)]
        self.parts, self.advance = tuple(parts), advance
        return self.parts


class RecurrentLayer(LinearAttentionLayer):
    """The states of one layer as the host reads and writes them; during a prefill they are the host's own matter.

    Args:
        extent: of the cache.
        number_of_states: see the host's class.

    Attributes:
        seen: tokens of this call's prefill.
    """

    is_compileable = False

    def __init__(self, extent: Extent, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.extent, self.tape, self.seen = extent, Tape(), 0

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Takes the inputs of new tokens, [batch, channels, new]; returns the window and all inputs behind it."""
        if self.extent.longest is None:
            self.seen += conv_states.shape[-1] if state_idx == 0 else 0
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        nodes = nodes_under_way()
        assert nodes is not None, "rounds run on the nodes of a tree"
        nodes.layer = self
        if self.extent.held:
            conv_states = torch.cat([self.tape.inputs[state_idx][:, :, : self.extent.held], conv_states], -1)
        self.tape.inputs[state_idx] = conv_states
        # Channels lie side by side, as a convolution over the nodes of a tree wants them.
        return torch.cat([self.conv_states[state_idx].mT, conv_states.mT], 1).mT

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Takes the state after new tokens; during a round it is left as it is, see `Tape`."""
        if self.extent.longest is None:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return recurrent_states

    def states(self) -> list[tuple[dict[int, Any], int]]:
        """Where the tensors lie, each [batch, ...]: the dict that holds it, and its key there."""
        return [
            (kind, index)
            for kind in (self.conv_states, self.recurrent_states)
            for index, held in kind.items()
            if held is not None
        ]

    def take_over(self, source: LinearAttentionLayer) -> None:
        """Begins with copies of what a layer of a DynamicCache holds."""
        _copy_states(source, self)

    def hand_back(self, layer: LinearAttentionLayer) -> None:
        """Makes a layer of the caller's cache hold copies of the states."""
        _copy_states(self, layer)


def _advance(layers: Sequence[RecurrentLayer], path: Tensor, counts: Tensor) -> None:
    """Moves the states of layers to the end of the first `counts` [batch] nodes of `path` [batch, steps].

    Layers whose tensors have one shape are moved together.
    """
    windows, recurrences = defaultdict(list), defaultdict(list)
    for layer in layers:
        tape, base = layer.tape, layer.recurrent_states[0]
        if tape.after:
            _advance_stepped(layer, path, counts)
            continue
        for index, inputs in tape.inputs.items():
            windows[inputs.shape, inputs.dtype, inputs.device, layer.conv_states[index].shape].append((layer, index))
        if base is not None:
            if tape.advance is None:
                raise RuntimeError(
                    "A layer with states has run on the nodes of a tree without the function that stands in for the "
                    "host's: something has replaced its forward since this target was tried. Put it back, or generate "
                    "without assistant_model."
                )
            shapes = tuple(part.shape for part in tape.parts)
            recurrences[tape.advance, base.shape, base.dtype, base.device, shapes].append(layer)
    for members in windows.values():
        _advance_windows(members, path, counts)
    for (advance, *_), group in recurrences.items():
        bases = torch.cat([layer.recurrent_states[0] for layer in group])
        paths = path.to(bases.device).repeat(len(group), 1)
        kept = torch.arange(path.shape[1], device=bases.device) < counts.to(bases.device).repeat(len(group)).unsqueeze(
            1
        )
        parts = [pick(torch.cat(part), paths) for part in zip(*(layer.tape.parts for layer in group), strict=True)]
        for layer, state in zip(group, advance(bases, parts, kept).to(bases.dtype).chunk(len(group)), strict=True):
            layer.recurrent_states[0] = state


def _advance_stepped(layer: RecurrentLayer, path: Tensor, counts: Tensor) -> None:
    path, counts = path.to(layer.device), counts.to(layer.device)
    last = path.gather(1, (counts - 1).clamp(min=0).unsqueeze(1))
    for (kind, index), states in zip(layer.states(), layer.tape.after, strict=True):
        moves = (counts > 0).view(-1, *[1] * (states.dim() - 2))
        kind[index] = pick(states, last)[:, 0].where(moves, kind[index])


def _advance_windows(members: Sequence[tuple[RecurrentLayer, int]], path: Tensor, counts: Tensor) -> None:
    held = torch.cat([layer.conv_states[index] for layer, index in members])
    inputs = torch.cat([layer.tape.inputs[index] for layer, index in members])
    width = held.shape[-1]
    # The last of what the window and the inputs along the path are together.
    place = counts.unsqueeze(1) - width + torch.arange(width, device=path.device)
    column = (width + path.gather(1, place.clamp(min=0))).where(place >= 0, width + place).to(held.device)
    column = column.repeat(len(members), 1).unsqueeze(1).expand_as(held)
    moved = torch.cat([held, inputs], -1).gather(2, column)
    for (layer, index), window in zip(members, moved.chunk(len(members)), strict=True):
        layer.conv_states[index] = window


def _copy_states(source: LinearAttentionLayer, target: LinearAttentionLayer) -> None:
    for name in ("conv_states", "recurrent_states"):
        held = {index: None if each is None else each.clone() for index, each in getattr(source, name).items()}
        setattr(target, name, held)
    copy_notes(source, target)


def copy_notes(source: LinearAttentionLayer, target: LinearAttentionLayer) -> None:
    """Has a layer believe of its states what another knows of its own."""
    known = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
    for name in known:
        setattr(target, name, dict(getattr(source, name)))
    target.dtype, target.device = source.dtype, source.device


class HybridLayer(RecurrentLayer, EntriesLayer):
    """A layer with states and entries: attention beside or behind a recurrence."""

    def __init__(self, extent: Extent, number_of_states: int = 1) -> None:
        EntriesLayer.__init__(self, extent)
        RecurrentLayer.__init__(self, extent, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # The host gives keys and values by place, states by name.
        (EntriesLayer if args else RecurrentLayer).lazy_initialization(self, *args, **kwargs)

    def take_over(self, source: Any) -> None:
        EntriesLayer.take_over(self, source)
        RecurrentLayer.take_over(self, source)

    def get_max_length(self) -> int:
        return -1


class Recurrent(LayerStates):
    """All layers of one cache that keep states.

    Args:
        layers: as the host reads and writes them.
        extent: of the cache.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin], extent: Extent) -> None:
        self.all_layers, self.extent = layers, extent
        self.layers = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        self._pending: tuple[Tensor, Tensor] | None = None  # path and counts of a commit

    @property
    def device(self) -> torch.device:
        """Of the first layer."""
        return self.layers[0].device

    @property
    def batch(self) -> int:
        """Number of rows."""
        kind, index = self.layers[0].states()[0]
        return len(kind[index])

    def begin_rounds(self, capacity: int, *, contiguous: bool) -> None:
        """Nothing grows."""

    def reserve(self, entries: int) -> None:
        """A round begins, unless it goes on."""
        if not self.extent.held:
            self.settle()

    def commit(self, path: Tensor, lengths: Tensor, counts: Tensor) -> None:
        self.settle()
        self._pending = path, counts

    def keep_nodes(self, nodes: Tensor | int) -> None:
        self.settle(nodes)

    def settle(self, held: Tensor | int | None = None) -> None:
        """Computes the states that the last commit has come to; `held` nodes go on into the next round."""
        pending, self._pending = self._pending, None
        if pending is not None:
            _advance(self.layers, *pending)
        if pending is not None or held is not None:
            for layer in self.layers:
                layer.tape = layer.tape.of(held)

    def wipe(self, row_lengths: Sequence[int]) -> None:
        """States hold nothing of nodes that were not kept."""
        self.settle()
        for layer in self.layers:
            layer.tape = Tape()

    def take_row(self, row: int, length: int) -> list[list[Tensor]]:
        self.settle()
        return [[kind[index][row].clone() for kind, index in layer.states()] for layer in self.layers]

    def return_to(self, row: int, states: list[list[Tensor]]) -> None:
        """Gives a row the states that `take_row` gave."""
        self.settle()
        for layer, kept in zip(self.layers, states, strict=True):
            for (kind, index), state in zip(layer.states(), kept, strict=True):
                kind[index] = kind[index].index_copy(0, from_host([row], layer.device), state.unsqueeze(0))

    def keep_rows(self, rows: Sequence[int], longest: int) -> None:
        self.settle()
        for layer in self.layers:
            for kind, name in layer.states():
                kind[name] = kind[name][from_host(rows, layer.device)]

    def put_rows(self, aside: dict[int, list[list[Tensor]]], longest: int) -> None:
        self.settle()
        for place, layer in enumerate(self.layers):
            for number, (kind, index) in enumerate(layer.states()):
                own = iter(kind[index])
                batch = len(kind[index]) + len(aside)
                kind[index] = torch.stack(
                    [aside[row][place][number] if row in aside else next(own) for row in range(batch)]
                )

    def hand_back(self, like: Cache, length: int) -> None:
        self.settle()
        for own, layer in zip(self.all_layers, like.layers, strict=False):
            if isinstance(own, RecurrentLayer):
                own.hand_back(layer)
