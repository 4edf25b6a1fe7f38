"""A model continues many prompts of different lengths in one batch, to the end of each text.

Rows that have ended leave the batch. Keys and values are kept in buffers that grow in steps: the host's own layers copy
everything they hold for each token. `chat.py` has what is continued.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_specdec.decoding.attention import tree_attention, usable

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

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, in tensors of their own."""
        super().batch_select_indices(indices)
        self._buffers = None


def _longer(held: Tensor, entries: int) -> Tensor:
    """A buffer of so many entries that begins with those of `held`."""
    buffer = held.new_empty(*held.shape[:2], entries, held.shape[3])
    buffer[:, :, : held.shape[2]] = held
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
) -> list[list[int]]:
    """Continues each prompt until a token of `ends`, or as far as its room allows.

    Args:
        model: the target.
        prompts: token ids.
        room: most tokens of each continuation.
        temperatures: of each continuation; 0 is greedy.
        draw: on the model's device, for sampling.
        ends: tokens that end a continuation.

    Returns:
        The tokens of each continuation, including the one that ended it.
    """
    width = max(map(len, prompts))
    device = model.device
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    temperature = torch.tensor(temperatures, device=device)
    written: list[list[int]] = [[] for _ in prompts]
    rows, running = list(range(len(prompts))), set(range(len(prompts)))  # rows in the batch, and those not ended
    cache = buffered_cache(model)
    attention = tree_attention(model.config.get_text_config(decoder=True)) if usable(model) else nullcontext()
    while True:
        with attention:
            outputs = model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        chosen = choose(outputs.logits[:, -1], temperature, draw)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row in running:
                written[row].append(token)
                if token in ends or len(written[row]) == room[row]:
                    running.remove(row)
        if not running:
            return written
        if len(rows) - len(running) >= max(1, LEAVE_SHARE * len(rows)):
            kept = torch.tensor([index for index, row in enumerate(rows) if row in running], device=device)
            cache.batch_select_indices(kept)
            mask, positions, temperature, chosen = mask[kept], positions[kept], temperature[kept], chosen[kept]
            rows = [row for row in rows if row in running]
        ids, positions = chosen.unsqueeze(1), positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)


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
