"""A model continues many prompts of different lengths, a batch of them at a time, to the end of each text.

Rows that have ended leave the batch, and waiting prompts take their places. Keys and values are kept in buffers that
grow in steps: the host's own layers copy everything they hold for each token. `chat.py` has what is continued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_specdec.decoding.attention import tree_attention, usable
from hf_specdec.training.filters import LOOP, before_loop

GROWTH = 128  # entries by which a buffer grows
LEAVE_SHARE = 1 / 16  # of the batch: as many ended rows leave together, because leaving copies the cache


class BufferedLayer(DynamicLayer):
    """A layer of the host's cache that writes new entries into buffers; `keys` and `values` are views of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [batch, heads, new, head_dim] keys and values; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        start, end = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if self._buffers is None or self._buffers[0].shape[2] < end:
            self._buffers = _longer(self.keys, end + GROWTH), _longer(self.values, end + GROWTH)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def join(self, other: BufferedLayer, unused: int) -> None:
        """Adds the rows of another layer, after dropping the first `unused` columns; the last columns are aligned."""
        width = max(self.keys.shape[2] - unused, other.keys.shape[2])
        self._buffers = (
            _stacked(self.keys[:, :, unused:], other.keys, width),
            _stacked(self.values[:, :, unused:], other.values, width),
        )
        self.keys, self.values = (buffer[:, :, :width] for buffer in self._buffers)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, in one copy that has the buffers' room for further entries."""
        assert self._buffers is not None, "a layer that has read something"
        width = self.keys.shape[2]
        self._buffers = self._buffers[0][indices], self._buffers[1][indices]
        self.keys, self.values = (buffer[:, :, :width] for buffer in self._buffers)


def _longer(held: Tensor, entries: int) -> Tensor:
    """A buffer of so many entries that begins with those of `held`."""
    buffer = held.new_empty(*held.shape[:2], entries, held.shape[3])
    buffer[:, :, : held.shape[2]] = held
    return buffer


def _stacked(first: Tensor, second: Tensor, width: int) -> Tensor:
    """A buffer with the rows of both, whose first `width` columns hold their entries, aligned at the end."""
    buffer = first.new_zeros(len(first) + len(second), first.shape[1], width + GROWTH, first.shape[3])
    buffer[: len(first), :, width - first.shape[2] : width] = first
    buffer[len(first) :, :, width - second.shape[2] : width] = second
    return buffer


def buffered_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache of the model; its layers with full attention are buffered."""
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@torch.inference_mode()
def continuations(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    room: Sequence[int],
    temperatures: Sequence[float],
    draw: torch.Generator,
    ends: Set[int],
    at_once: int,
) -> list[list[int]]:
    """Continues each prompt until a token of `ends`, as far as its room allows, or until it loops.

    Args:
        model: the target.
        prompts: token ids.
        room: most tokens of each continuation.
        temperatures: of each continuation; 0 is greedy.
        draw: on the model's device, for sampling.
        ends: tokens that end a continuation.
        at_once: rows of a forward.

    Returns:
        The tokens of each continuation, including the one that ended it.
    """
    temperature = torch.tensor(temperatures, device=model.device)
    written: list[list[int]] = [[] for _ in prompts]
    waiting = deque(range(len(prompts)))
    ended: set[int] = set()
    batch = _Batch(model)
    while waiting or batch.rows:
        if waiting and len(batch.rows) < at_once and (batch.takes_more or not batch.rows):
            new = [waiting.popleft() for _ in range(min(len(waiting), at_once - len(batch.rows)))]
            batch.add(new, [prompts[row] for row in new])
        chosen = choose(batch.logits, temperature[batch.rows], draw)
        running = []
        for index, (row, token) in enumerate(zip(batch.rows, chosen.tolist(), strict=True)):
            text = written[row]
            if row not in ended:
                text.append(token)
                # Not for each token: it reads the whole text.
                loops = len(text) % LOOP == 0 and len(before_loop(text)) < len(text)
                if token in ends or len(text) == room[row] or loops:
                    ended.add(row)
                else:
                    running.append(index)
        leaving = len(batch.rows) - len(running)
        if leaving >= max(1, LEAVE_SHARE * len(batch.rows)):
            chosen = chosen[running]
            batch.keep(running)
        if batch.rows:
            batch.step(chosen)
    return written


class _Batch:
    """Rows with left padding, and the logits of their next tokens.

    Attributes:
        rows: number of the prompt of each row.
        logits: [rows, vocab].
        takes_more: whether rows may join others that have begun: every layer must be a `BufferedLayer`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.rows: list[int] = []
        self.attention: AbstractContextManager[Any] = nullcontext()
        if usable(model):
            self.attention = tree_attention(model.config.get_text_config(decoder=True))
        self.takes_more = all(type(layer) is BufferedLayer for layer in buffered_cache(model).layers)

    def add(self, rows: list[int], prompts: Sequence[Sequence[int]]) -> None:
        """Reads prompts; their rows follow those of the batch."""
        width, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        cache, positions = buffered_cache(self.model), (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(ids, mask, positions, cache)
        if not self.rows:
            self.rows, self.cache, self.mask, self.positions, self.logits = rows, cache, mask, positions[:, -1:], logits
            return
        # Columns that no row uses any more are dropped; the shorter part is padded on the left.
        unused = int(self.mask.any(0).long().argmax())
        for own, new in zip(self.cache.layers, cache.layers, strict=True):
            own.join(new, unused)
        masks, widest = (self.mask[:, unused:], mask), max(self.mask.shape[1] - unused, width)
        self.mask = torch.cat([nn.functional.pad(each, (widest - each.shape[1], 0)) for each in masks])
        self.positions = torch.cat([self.positions, positions[:, -1:]])
        self.logits = torch.cat([self.logits, logits])
        self.rows += rows

    def keep(self, indices: list[int]) -> None:
        """The other rows leave."""
        self.rows = [self.rows[index] for index in indices]
        if indices:
            kept = torch.tensor(indices, device=self.mask.device)
            self.cache.batch_select_indices(kept)
            self.mask, self.positions = self.mask[kept], self.positions[kept]

    def step(self, token_ids: Tensor) -> None:
        """Reads one token of each row, [rows] int64."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], 1)
        self.positions = self.positions + 1
        mask = self.mask
        if self.takes_more:
            # Additive, for `tree_attention`; the host's own attention takes 4 times as long with heads in groups.
            mask = torch.where(mask[:, None, None].bool(), 0.0, float("-inf")).to(self.logits.dtype)
        self.logits = self._forward(token_ids.unsqueeze(1), mask, self.positions, self.cache)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        with self.attention:
            outputs = self.model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = outputs.logits[:, -1]
        return logits


def choose(logits: Tensor, temperature: Tensor, draw: torch.Generator) -> Tensor:
    """The next token of each row: the argmax, or a draw at the row's temperature.

    A draw takes one uniform number per row and searches the running sum of the probabilities: `torch.multinomial` draws
    one number for each token of the vocabulary, which takes several times as long.

    Args:
        logits: [batch, vocab].
        temperature: [batch], 0 for the argmax.
        draw: on the same device.

    Returns:
        [batch] int64.
    """
    uniform = torch.rand(len(logits), 1, generator=draw, device=logits.device)
    chosen = logits.argmax(-1)
    sampled = temperature > 0
    if bool(sampled.any()):
        scaled = logits[sampled].float() / temperature[sampled].unsqueeze(1)
        summed = scaled.softmax(-1).cumsum(-1)
        # Strictly above: a token of probability 0 adds nothing to the sum, and is never found.
        found = torch.searchsorted(summed, uniform[sampled] * summed[:, -1:], right=True).squeeze(1)
        chosen[sampled] = found.clamp(max=logits.shape[-1] - 1)
    return chosen
