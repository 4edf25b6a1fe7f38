"""Recurrent: layers with a state of fixed size instead of an entry per token, and the convolutions before them.

During a round the layer keeps the state before the root, the base, and records on a tape what each node adds to it
(`rules.py`). A commit records the path. When the next round begins, the state at the end of the path is computed from
base and tape, in one step per layer; the counts may still be known on the device only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from hf_specdec.decoding.targets.entries import EntriesLayer, Extent
from hf_specdec.decoding.targets.nodes import current_nodes
from hf_specdec.decoding.tree import from_host, pick

# (base [batch, ...], parts of the nodes of a path, each [batch, steps, ...], which nodes are kept [batch, steps] bool)
# -> the state at the end of the path
Advance = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]


@dataclass
class Tape:
    """What the nodes of a round add to the states of one layer.

    Attributes:
        inputs: of the convolutions, by the index of the state, [batch, channels, nodes].
        parts: of the recurrence, each [batch, nodes, ...].
        advance: computes the new state from them; None for a layer that has only convolutions.
        after: for layers that run level by level (`stepped.py`), instead of all these: the states after each node,
            [batch, nodes, ...], in the order of `RecurrentLayer.states`.
    """

    inputs: dict[int, Tensor] = field(default_factory=dict)
    parts: tuple[Tensor, ...] = ()
    advance: Advance | None = None
    after: list[Tensor] = field(default_factory=list)

    def of(self, nodes: Tensor | int | None) -> Tape:
        """The tape of these nodes: [batch, nodes] int64; an index: all nodes from it on; None: no nodes."""
        if nodes is None:
            return Tape()
        if isinstance(nodes, int):
            inputs = {index: each[:, :, nodes:] for index, each in self.inputs.items()}
            parts, after = ([each[:, nodes:] for each in these] for these in (self.parts, self.after))
        else:
            inputs = {index: pick(each.mT, nodes).mT for index, each in self.inputs.items()}
            parts, after = ([pick(each, nodes) for each in these] for these in (self.parts, self.after))
        return Tape(inputs, tuple(parts), self.advance, after)

    def add(self, first: int, parts: Sequence[Tensor], advance: Advance) -> tuple[Tensor, ...]:
        """Records new nodes after the first `first` ones; returns the parts of all nodes."""
        if first:
            parts = [torch.cat([before[:, :first], new], 1) for before, new in zip(self.parts, parts, strict=True)]
        self.parts, self.advance = tuple(parts), advance
        return self.parts


class RecurrentLayer(LinearAttentionLayer):
    """The states of one layer as transformers reads and writes them. During a prefill transformers' class updates them.

    Args:
        extent: of the cache.
        number_of_states: see transformers' class.

    Attributes:
        seen: tokens of this call's prefill.
    """

    is_compileable = False

    def __init__(self, extent: Extent, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.extent, self.tape, self.seen = extent, Tape(), 0

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Receives the inputs of new tokens, [batch, channels, new]; returns the window followed by all inputs."""
        if self.extent.longest is None:
            self.seen += conv_states.shape[-1] if state_idx == 0 else 0
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        nodes = current_nodes()
        assert nodes is not None, "rounds run on the nodes of a tree"
        nodes.layer = self
        if self.extent.written:
            conv_states = torch.cat([self.tape.inputs[state_idx][:, :, : self.extent.written], conv_states], -1)
        self.tape.inputs[state_idx] = conv_states
        # Channels are contiguous, as `rules.convolution` needs them.
        return torch.cat([self.conv_states[state_idx].mT, conv_states.mT], 1).mT

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Receives the state after new tokens. A round does not change the stored state, see `Tape`."""
        if self.extent.longest is None:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return recurrent_states

    def states(self) -> list[tuple[dict[int, Any], int]]:
        """The state tensors, each [batch, ...], as pairs of the dict that contains it and its key."""
        return [
            (kind, index)
            for kind in (self.conv_states, self.recurrent_states)
            for index, state in kind.items()
            if state is not None
        ]

    def load_from(self, source: LinearAttentionLayer) -> None:
        """Copies the states of a DynamicCache layer."""
        _copy_states(source, self)


def _advance(layers: Sequence[RecurrentLayer], path: Tensor, counts: Tensor) -> None:
    """Moves the states of layers to the end of the first `counts` [batch] nodes of `path` [batch, steps].

    Layers whose tensors have the same shapes are computed together.
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
                    "A layer with states has run on the nodes of a tree without the rule that replaces transformers' "
                    "function: its forward was replaced after the trial of this target. Restore it, or generate "
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
    windows = torch.cat([layer.conv_states[index] for layer, index in members])
    inputs = torch.cat([layer.tape.inputs[index] for layer, index in members])
    width = windows.shape[-1]
    # The new window is the last `width` columns of the old one followed by the inputs along the path.
    step = counts.unsqueeze(1) - width + torch.arange(width, device=path.device)
    column = (width + path.gather(1, step.clamp(min=0))).where(step >= 0, width + step).to(windows.device)
    column = column.repeat(len(members), 1).unsqueeze(1).expand_as(windows)
    moved = torch.cat([windows, inputs], -1).gather(2, column)
    for (layer, index), window in zip(members, moved.chunk(len(members)), strict=True):
        layer.conv_states[index] = window


def _copy_states(source: LinearAttentionLayer, target: LinearAttentionLayer) -> None:
    for name in ("conv_states", "recurrent_states"):
        states = {index: None if each is None else each.clone() for index, each in getattr(source, name).items()}
        setattr(target, name, states)
    copy_flags(source, target)


def copy_flags(source: LinearAttentionLayer, target: LinearAttentionLayer) -> None:
    """Copies the attributes that describe a layer's states, but not the states."""
    flags = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
    for name in flags:
        setattr(target, name, dict(getattr(source, name)))
    target.dtype, target.device = source.dtype, source.device


class HybridLayer(RecurrentLayer, EntriesLayer):
    """A layer with states and entries: attention in parallel with or after a recurrence."""

    def __init__(self, extent: Extent, number_of_states: int = 1) -> None:
        EntriesLayer.__init__(self, extent)
        RecurrentLayer.__init__(self, extent, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # transformers passes keys and values as positional arguments, states as keyword arguments.
        (EntriesLayer if args else RecurrentLayer).lazy_initialization(self, *args, **kwargs)

    def load_from(self, source: Any) -> None:
        EntriesLayer.load_from(self, source)
        RecurrentLayer.load_from(self, source)

    get_max_length = EntriesLayer.get_max_length


class Recurrent:
    """All layers of one cache that have states; methods as of `Entries`.

    States cannot be cropped: after `commit` the new ones are computed from those before the round.

    Args:
        layers: as transformers reads and writes them.
        extent: of the cache.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin], extent: Extent) -> None:
        self.all_layers, self.extent = layers, extent
        self.layers = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        self._pending: tuple[Tensor, Tensor] | None = None  # path and counts of the last commit

    @property
    def device(self) -> torch.device:
        """Of the first layer."""
        return self.layers[0].device

    @property
    def batch(self) -> int:
        """Number of rows."""
        kind, index = self.layers[0].states()[0]
        return len(kind[index])

    def reserve(self, entries: int) -> None:
        """Computes the states if a new round begins."""
        if not self.extent.written:
            self.apply_commit()

    def commit(self, path: Tensor, lengths: Tensor, counts: Tensor) -> None:
        self.apply_commit()
        self._pending = path, counts

    def apply_commit(self, carried: Tensor | int | None = None) -> None:
        """Computes the states after the last commit.

        Args:
            carried: nodes that become nodes 0, 1, ... of the next round, and stay on the tape: [batch, nodes] int64, or
                an index: all nodes from this one on. None for no nodes.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            _advance(self.layers, *pending)
        if pending is not None or carried is not None:
            for layer in self.layers:
                layer.tape = layer.tape.of(carried)

    def clear_uncommitted(self, row_lengths: Sequence[int]) -> None:
        """Empties the tapes; states do not contain nodes that were not committed."""
        self.apply_commit()
        for layer in self.layers:
            layer.tape = Tape()

    def take_row(self, row: int, length: int) -> list[list[Tensor]]:
        self.apply_commit()
        return [[kind[index][row].clone() for kind, index in layer.states()] for layer in self.layers]

    def replace_row(self, row: int, saved: list[list[Tensor]]) -> None:
        self.apply_commit()
        for layer, parts in zip(self.layers, saved, strict=True):
            for (kind, index), part in zip(layer.states(), parts, strict=True):
                kind[index] = kind[index].index_copy(0, from_host([row], part.device), part.unsqueeze(0))

    def keep_rows(self, rows: Sequence[int], longest: int) -> None:
        self.apply_commit()
        for layer in self.layers:
            for kind, name in layer.states():
                kind[name] = kind[name][from_host(rows, layer.device)]

    def put_rows(self, saved: dict[int, list[list[Tensor]]], longest: int) -> None:
        self.apply_commit()
        for layer_index, layer in enumerate(self.layers):
            for number, (kind, index) in enumerate(layer.states()):
                own = iter(kind[index])
                batch = len(kind[index]) + len(saved)
                kind[index] = torch.stack(
                    [saved[row][layer_index][number] if row in saved else next(own) for row in range(batch)]
                )

    def hand_back(self, like: Cache, length: int) -> None:
        self.apply_commit()
        for own, layer in zip(self.all_layers, like.layers, strict=False):
            if isinstance(own, RecurrentLayer):
                _copy_states(own, layer)
