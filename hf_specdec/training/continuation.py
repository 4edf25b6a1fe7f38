"""A model continues many prompts of different lengths, a batch of them at a time, to the end of each text.

A task is a generator: it yields a `Prompt`, is sent the tokens that the model wrote, and may yield a next one. Prompts
of all tasks share the batch: a task whose next prompt goes on from what its row has read keeps the row; otherwise a
waiting prompt takes its place. Keys and values are kept in buffers that grow in steps: transformers' own layers copy
everything they hold for each token. `conversation_answers.py` and `text.py` have the tasks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Generator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_specdec.decoding.speed.cudnn import without_cudnn_attention
from hf_specdec.decoding.targets.attention import tree_attention, usable
from hf_specdec.decoding.upstream import cache_name, takes_positions
from hf_specdec.training.filters import LOOP, before_loop

SIMILAR = 0.7  # prompts that are read together are at least this much of the longest
GROWTH = 128  # entries by which a buffer grows
CHANGED_SHARE = 1 / 16  # of the batch: as many ended rows are replaced together, because prompts are read together
READ_IN_STEPS = 16  # tokens; a prompt that goes on from its row by at most so many reads them one a step
Result = TypeVar("Result")


@dataclass(eq=False)
class Prompt:
    """What is to be continued, and what was written so far.

    Attributes:
        ids: token ids.
        room: most tokens to write.
        temperature: 0 is greedy.
        ends: tokens that end the text.
        text: the tokens written.
        ended: whether no token follows.
        task: its number.
        unread: the last of `ids`, which its row has still to read.
    """

    ids: Sequence[int]
    room: int
    temperature: float
    ends: Set[int]
    text: list[int] = field(default_factory=list)
    ended: bool = False
    task: int = 0
    unread: list[int] = field(default_factory=list)

    def append(self, token: int) -> bool:
        """Whether the text ends with this token."""
        self.text.append(token)
        # Not for each token: it reads the whole text.
        loops = len(self.text) % LOOP == 0 and len(before_loop(self.text)) < len(self.text)
        self.ended = token in self.ends or len(self.text) == self.room or loops
        return self.ended


class BufferedLayer(DynamicLayer):
    """A layer of transformers' cache that writes new entries into buffers; `keys` and `values` are views of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers: list[Tensor] = []
        self._first = 0  # column of the buffers with which `keys` and `values` begin

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [batch, heads, new, head_dim] keys and values; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        held, width = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if not self._buffers or self._buffers[0].shape[2] < self._first + width:
            self._copy(0, width - held)
        self._show(width)
        self.keys[:, :, held:], self.values[:, :, held:] = key_states, value_states
        return self.keys, self.values

    def drop(self, columns: int) -> None:
        """Drops the first columns; a negative number adds columns before them."""
        width = self.keys.shape[2] - columns
        if columns < 0:
            self._copy(-columns, 0)
        else:
            self._first += columns
        self._show(width)

    def replace(self, places: Sequence[int], other: BufferedLayer, columns: Sequence[Tensor]) -> None:
        """These columns of each row of another layer take the places of rows; their ends are aligned."""
        for row, (place, used) in enumerate(zip(places, columns, strict=True)):
            self.keys[place, :, -len(used) :] = other.keys[row].index_select(1, used)
            self.values[place, :, -len(used) :] = other.values[row].index_select(1, used)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps these rows, in one copy that has the buffers' room for further entries."""
        self._buffers = [buffer[beam_idx] for buffer in self._buffers]
        self._show(self.keys.shape[2])

    def _copy(self, before: int, after: int) -> None:
        """New buffers, with so many columns around the entries, and some more."""
        pad = (0, 0, before, after + GROWTH)
        self._buffers, self._first = [nn.functional.pad(held, pad) for held in (self.keys, self.values)], 0

    def _show(self, width: int) -> None:
        self.keys, self.values = (buffer[:, :, self._first : self._first + width] for buffer in self._buffers)


def buffered_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache of the model; its layers with full attention are buffered."""
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@without_cudnn_attention()
@torch.inference_mode()
def continued(
    model: PreTrainedModel,
    tasks: Sequence[Generator[Prompt, list[int], Result]],
    draws: Sequence[Random],
    at_once: int,
) -> list[Result]:
    """Runs all tasks; each prompt is continued to its end, as far as its room allows, or until the text loops.

    Args:
        model: the target.
        tasks: each is sent the tokens of its last prompt, including the one that ended them.
        draws: of each task, for sampling: a text does not depend on those beside it, except by rounding.
        at_once: rows of a forward.

    Returns:
        What each task returned.
    """
    results: dict[int, Result] = {}
    waiting: list[Prompt] = []  # by length: prompts of similar length are read together, with little padding

    def go_on(task: int, row: Prompt | None = None) -> Prompt | None:
        """The next prompt of a task, if it follows soon on what its row has read; otherwise it waits for a row."""
        try:
            prompt = tasks[task].send(row.text) if row else next(tasks[task])
        except StopIteration as stop:
            results[task] = stop.value
            return None
        prompt.task = task
        read = [*row.ids, *row.text] if row else []
        unread = [*prompt.ids[len(read) :]]
        if row and [*prompt.ids] == read + unread and len(unread) <= READ_IN_STEPS:
            prompt.unread = unread
            return prompt
        insort(waiting, prompt, key=lambda row: len(row.ids))
        return None

    def longest(count: int, least: float) -> list[Prompt]:
        """At most so many prompts that are at least `least` times as long as the longest one."""
        taken = [row for row in waiting[-count:] if len(row.ids) >= least * len(waiting[-1].ids)]
        del waiting[-len(taken) :]
        return taken

    for task in range(len(tasks)):
        go_on(task)
    # All but the last tokens, of which each row needs one to read.
    same = takewhile(lambda column: len({*column}) == 1, zip(*(row.ids[:-1] for row in waiting), strict=False))
    batch = _Batch(model, [column[0] for column in same])
    while waiting or batch.rows:
        ended = [index for index, row in enumerate(batch.rows) if row.ended]
        if not batch.rows:
            batch.begin(longest(at_once, 0.0 if batch.pads else 1.0))
        elif len(ended) >= max(1, CHANGED_SHARE * len(batch.rows)):
            if waiting and batch.takes_more:
                batch.replace(ended, longest(len(ended), SIMILAR))
            else:
                batch.keep([index for index, row in enumerate(batch.rows) if not row.ended])
                continue
        # 24 bits, as many as a float32 below 1 has. Only of rows that are written: others wait for a time that varies.
        uniform = [0.0 if row.ended or row.unread else draws[row.task].getrandbits(24) / 2**24 for row in batch.rows]
        tokens = choose(batch.logits, [row.temperature for row in batch.rows], uniform).tolist()
        for index, row in enumerate(batch.rows):
            if row.unread:
                tokens[index] = row.unread.pop(0)
            elif not row.ended and row.append(tokens[index]):
                batch.rows[index] = go_on(row.task, row) or row
        batch.step(torch.tensor(tokens, device=model.device))
    return [results[task] for task in range(len(tasks))]


class _Batch:
    """Rows with left padding, and the logits of their next tokens.

    Attributes:
        beginning: tokens with which most prompts begin.
        known: layers of transformers' cache that have read them.
        rows: the prompts.
        logits: [rows, vocab].
        grouped: whether the model attends with `tree_attention`.
        pads: whether prompts of different lengths may be read together: without positions, padding would count.
        takes_more: whether rows may take the places of others: besides, every layer must be a `BufferedLayer`.
    """

    def __init__(self, model: PreTrainedModel, beginning: list[int]) -> None:
        self.model, self.beginning = model, beginning
        self.rows: list[Prompt] = []
        self.known: Sequence[Any] = []
        self.grouped, config = usable(model), model.config.get_text_config(decoder=True)
        self.attention: AbstractContextManager[Any] = tree_attention(config) if self.grouped else nullcontext()
        self.pads = takes_positions(model)
        self.takes_more = self.pads and all(type(layer) is BufferedLayer for layer in buffered_cache(model).layers)
        if self.takes_more and beginning:
            self.known = self._read([Prompt(beginning, 0, 0.0, set())])[0].layers

    def begin(self, rows: list[Prompt]) -> None:
        """Reads the prompts of these rows."""
        first = rows[:1] if self.takes_more else rows
        self.rows, (self.cache, self.mask, self.positions, self.logits) = first, self._read(first)
        if self.takes_more and len(rows) > 1:  # the other rows take the places of copies, without the padding
            self.keep([0] * len(rows))
            self.replace(range(1, len(rows)), rows[1:])

    def replace(self, places: Sequence[int], rows: list[Prompt]) -> None:
        """Reads prompts; their rows take the first of these places."""
        cache, mask, positions, logits = self._read(rows)
        at, columns = torch.tensor(places[: len(rows)], device=mask.device), [row.nonzero()[:, 0] for row in mask]
        width = max(map(len, columns))
        self.mask[at] = 0
        # Columns that no row uses any more are dropped.
        unused = min(int(self.mask.any(0).long().argmax()), self.mask.shape[1] - width)
        self.mask = nn.functional.pad(self.mask, (-unused, 0))
        self.mask[at, -width:] = mask.sort(1).values[:, -width:]
        self.positions[at], self.logits[at] = positions, logits
        for own, new in zip(self.cache.layers, cache.layers, strict=True):
            own.drop(unused)
            own.replace(places[: len(rows)], new, columns)
        for place, row in zip(places, rows, strict=False):
            self.rows[place] = row

    def keep(self, indices: list[int]) -> None:
        """The other rows leave."""
        self.rows = [self.rows[index] for index in indices]
        kept = torch.tensor(indices, dtype=torch.int64, device=self.mask.device)
        self.cache.reorder_cache(kept)  # every kind of layer has it
        self.mask, self.positions, self.logits = self.mask[kept], self.positions[kept], self.logits[kept]

    def step(self, token_ids: Tensor) -> None:
        """Reads one token of each row, [rows] int64."""
        self.mask = nn.functional.pad(self.mask, (0, 1), value=1)
        self.positions = self.positions + 1
        mask = self.mask
        if self.takes_more and self.grouped:
            # Additive, for `tree_attention`; transformers' own attention takes 4 times as long with heads in groups.
            mask = torch.where(mask[:, None, None].bool(), 0.0, float("-inf")).to(self.logits.dtype)
        self.logits = self._forward(token_ids.unsqueeze(1), mask, self.positions, self.cache)

    def _read(self, rows: list[Prompt]) -> tuple[DynamicCache, Tensor, Tensor, Tensor]:
        """Cache, mask, [rows, 1] positions and logits of prompts, padded on the left or after the known beginning."""
        cache, device, known = buffered_cache(self.model), self.model.device, 0
        prompts = [row.ids for row in rows]
        if all([*ids[: len(self.beginning)]] == self.beginning for ids in prompts):
            for own, first in zip(cache.layers, self.known, strict=False):  # none for the beginning itself
                known = first.keys.shape[2]
                own.update(*(part.expand(len(prompts), -1, -1, -1) for part in (first.keys, first.values)))
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + [*prompt[known:]] for prompt in prompts], device=device)
        mask = torch.ones(len(prompts), width, dtype=torch.int64, device=device)
        for own_mask, prompt in zip(mask, prompts, strict=True):
            own_mask[known : known + width - len(prompt)] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, known:]
        return cache, mask, positions[:, -1:], self._forward(ids, mask, positions, cache)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        arguments: dict[str, Any] = {cache_name(self.model): cache}
        if self.pads:
            arguments |= {"attention_mask": mask, "position_ids": positions}
        with self.attention:
            logits: Tensor = self.model(ids, use_cache=True, logits_to_keep=1, **arguments).logits[:, -1]
        return logits


def choose(logits: Tensor, temperatures: Sequence[float], uniform: Sequence[float]) -> Tensor:
    """The next token of each row: the argmax, or a draw at the row's temperature.

    A draw takes one uniform number per row and searches the running sum of the probabilities: `torch.multinomial` draws
    one number for each token of the vocabulary, which takes several times as long.

    Args:
        logits: [batch, vocab].
        temperatures: of the rows, 0 for the argmax.
        uniform: of the rows, at least 0 and below 1.

    Returns:
        [batch] int64.
    """
    chosen = logits.max(-1).indices  # on a CPU, argmax takes 2 to 4 times as long in bfloat16
    sampled = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if sampled:
        scaled = logits[sampled].float() / torch.tensor([[temperatures[row]] for row in sampled], device=logits.device)
        summed = scaled.softmax(-1).cumsum(-1)
        # Strictly above: a token of probability 0 adds nothing to the sum, and is never found.
        drawn = torch.tensor([[uniform[row]] for row in sampled], device=logits.device)
        found = torch.searchsorted(summed, drawn * summed[:, -1:], right=True).squeeze(1)
        chosen[sampled] = found.clamp(max=logits.shape[-1] - 1)
    return chosen
