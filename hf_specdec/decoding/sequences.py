"""Sequences: the tokens of every row, where each row stops, which rows remain in the batch, and streaming.

Rows grow by different numbers of tokens per round. Processors and stopping criteria expect rows of one length that grow
by one token per call. Those that are known to be stateless get rows of one length together, each with its own prefix.
For all others the rows grow in lockstep, one column after another, as in plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specdec.decoding.tree import from_host

# (source row of each row of the batch, number of new tokens included) -> one [batch, vocab] tensor per token, or None.
ScoresSoFar: TypeAlias = Callable[[list[int], int], tuple[Tensor, ...] | None]

T = TypeVar("T")
GROWTH = 256  # columns added at a time when the final length is not known


class Sequences:
    """Token ids of a batch, [batch, capacity] on the device, and their lengths on the host.

    Args:
        prompt_ids: [batch, seq] integers; what is generated is int64.
        stopping_criteria: of the `generate` call.
        pad_token_id: fills finished rows, as in plain decoding.
        streamer: of the `generate` call.
        lockstep: whether all rows grow together, by `append_column`, because code of the user is called in between.

    Attributes:
        rows: the remaining rows: indices of the rows of the batch that rounds still compute.
    """

    def __init__(
        self,
        prompt_ids: Tensor,
        stopping_criteria: StoppingCriteriaList,
        pad_token_id: int | None,
        streamer: BaseStreamer | None,
        *,
        lockstep: bool = False,
    ) -> None:
        batch, length = prompt_ids.shape
        self.lockstep = lockstep
        self.rows = list(range(batch))
        self._row_ids: Tensor | None = None  # `rows` on the device, once rows were dropped
        self.pad_token_id = pad_token_id
        self.ids = self._longer(prompt_ids.long(), GROWTH)
        self.prompt_length = length
        self.lengths = [length] * batch
        self.finished_at: list[int | None] = [None] * batch
        # As in plain decoding: with an end-of-text criterion finished rows are padded, without one they continue.
        self.pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._streamer = streamer
        self._streamed = length
        self._texts: list[list[int]] | None = None  # tokens of each row on the host, once they were asked for
        self._eos_ids: set[int] = set()
        self._max_length: int | None = None
        self._deadlines: list[MaxTimeCriteria] = []
        self._others = StoppingCriteriaList()
        for criterion in stopping_criteria:
            # These three are evaluated on the host, without a device sync. Exact types, since subclasses may differ.
            if type(criterion) is EosTokenCriteria:
                self._eos_ids.update(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                self._max_length = min(criterion.max_length, self._max_length or criterion.max_length)
            elif type(criterion) is MaxTimeCriteria:
                self._deadlines.append(criterion)
            else:
                self._others.append(criterion)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def done(self) -> bool:
        """Whether the loop may end: all rows have stopped, and each is as long as the output or will be padded."""
        stops = [stop for stop in self.finished_at if stop is not None]
        return len(stops) == self.batch and (self.pads_finished or min(self.lengths) >= max(stops))

    @property
    def active(self) -> list[bool]:
        """Per row, whether further tokens may become part of the output."""
        longest = max(self.lengths) + self.lockstep  # in lockstep, no row waits for another one
        return [
            stop is None or (not self.pads_finished and length < longest)
            for stop, length in zip(self.finished_at, self.lengths, strict=True)
        ]

    def of_remaining(self, values: Sequence[T]) -> list[T]:
        """Selects the values of the remaining rows from one value per row of the batch."""
        return [values[row] for row in self.rows]

    def of_batch(self, values: Sequence[int]) -> list[int]:
        """One number per row of the batch from one per remaining row; 0 for the others."""
        spread = [0] * self.batch
        for row, value in zip(self.rows, values, strict=True):
            spread[row] = value
        return spread

    def in_output(self, kept: Sequence[int]) -> list[int]:
        """How many of the tokens that each row of the batch kept in the last round are within the output.

        Fewer than `kept` only once all rows have stopped, if a row is longer than the output.
        """
        if not self.done:
            return list(kept)
        end = self._final_length()
        return [max(0, min(count, end - (length - count))) for count, length in zip(kept, self.lengths, strict=True)]

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of each row of the batch on the host, to be read only. The first call waits for the device."""
        if self._texts is None:
            self._texts = self.ids.tolist()
        for text, length in zip(self._texts, self.lengths, strict=True):
            del text[length:]  # tokens that the row did not keep
        return self._texts

    @property
    def remaining_ids(self) -> Tensor:
        """[remaining rows, capacity] int64 tokens; columns beyond a row's length are undefined."""
        return self.ids if self._row_ids is None else self.ids[self._row_ids]

    @property
    def finished_indices(self) -> list[int]:
        """Indices, among the remaining rows, of those to which no token can be added any more."""
        limit = 0 if self.pads_finished else self._max_length  # without padding, rows that have stopped may continue
        if limit is None:
            return []
        rows = enumerate(self.rows)
        return [index for index, row in rows if self.finished_at[row] is not None and self.lengths[row] >= limit]

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Continues with these of the remaining rows."""
        self.rows = [self.rows[index] for index in indices]
        self._row_ids = from_host(self.rows, self.ids.device)

    @property
    def is_observed(self) -> bool:
        """Whether a streamer, a time limit or a custom criterion observes the tokens."""
        return self._streamer is not None or bool(self._deadlines) or bool(self._others)

    @property
    def can_defer_read(self) -> bool:
        """Whether the tokens of a round may be appended after the next round was launched.

        No if the tokens are observed. No if a row has stopped, or will certainly stop with the tokens to be appended:
        the next round would be discarded.
        """
        ending = self._max_length is not None and max(self.lengths) + 1 >= self._max_length
        return not self.is_observed and not ending and not any(stop is not None for stop in self.finished_at)

    def reserve(self, columns: int) -> None:
        """Makes room for `columns` tokens after the longest row."""
        missing = max(self.lengths) + columns - self.ids.shape[1]
        if missing > 0:
            self.ids = self._longer(self.ids, missing + GROWTH)

    def _longer(self, ids: Tensor, columns: int) -> Tensor:
        """With room for more columns, which hold padding: in lockstep, that is what follows a finished row."""
        return torch.nn.functional.pad(ids, (0, columns), value=self.padding_id)

    @property
    def padding_id(self) -> int:
        """The pad token, or 0 where the call has none and no row is padded."""
        return self.pad_token_id or 0

    @property
    def columns(self) -> Tensor:
        """[batch, length] int64: all rows up to the longest one's end, in lockstep, with finished rows padded.

        A copy in memory of its own, as plain decoding passes it to processors and criteria, which may keep it.
        """
        return self.ids[:, : max(self.lengths)].clone(memory_format=torch.contiguous_format)

    def prefixes(self, length: int, rows: list[int]) -> Tensor:
        """[batch, length] int64: the prefixes of `rows`; all other rows are copies of the first of `rows`.

        Processors may look a row's place up, so they always get the whole batch and never a single row.
        """
        prefixes = self.ids[:, :length]
        if len(rows) == self.batch:
            return prefixes
        return prefixes[self.source_rows(rows)]

    def source_rows(self, rows: list[int]) -> list[int]:
        """For every row of the batch, the row whose values it has in `prefixes`."""
        own = set(rows)
        return [row if row in own else rows[0] for row in range(self.batch)]

    def by_length(self, rows: Iterable[int]) -> dict[int, list[int]]:
        """These rows, by their number of tokens."""
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.lengths[row], []).append(row)
        return groups

    def append(self, new: list[list[int]], scores: ScoresSoFar) -> list[int]:
        """Appends the new tokens of each remaining row, up to where plain decoding would have stopped.

        Args:
            new: the new tokens of each remaining row; ignored for rows that are not active.
            scores: returns the scores that plain decoding would pass to a criterion.

        Returns:
            How many tokens each row of the batch kept.
        """
        tokens: list[list[int]] = [[] for _ in range(self.batch)]
        for row, own in zip(self.rows, new, strict=True):
            tokens[row] = own
        active = [is_active and bool(own) for is_active, own in zip(self.active, tokens, strict=True)]
        self.reserve(max(map(len, tokens)))
        for row in range(self.batch):
            if active[row]:
                self._write(row, tokens[row])
        kept = [len(own) if is_active else 0 for own, is_active in zip(tokens, active, strict=True)]
        for row, count in self._stops(tokens, active, scores).items():
            self.finished_at[row] = self.lengths[row] + count
            if self.pads_finished:
                kept[row] = count
        for row, count in enumerate(kept):
            self.lengths[row] += count
        return kept

    def append_column(self, new: list[int], scores: tuple[Tensor, ...] | None) -> None:
        """In lockstep: appends one token to each active row, calls the criteria once, and streams the column.

        Args:
            new: one token per remaining row; ignored for rows that are not active.
            scores: of all columns so far, as plain decoding passes them to the criteria; None if the call keeps none.
        """
        active, late = self.active, self._late()
        self.reserve(1)
        running = [(row, token) for row, token in zip(self.rows, new, strict=True) if active[row]]
        for row, token in running:
            self._write(row, [token])
            self.lengths[row] += 1
        stops = self._others(self.columns, scores).tolist() if self._others else [False] * self.batch
        for row, token in running:
            length = self.lengths[row]
            if self.finished_at[row] is None and (late or stops[row] or self.ends(token, length)):
                self.finished_at[row] = length
        self.stream()

    def _stops(self, tokens: list[list[int]], active: list[bool], scores: ScoresSoFar) -> dict[int, int]:
        """By row, the number of its new tokens at which it stops; rows that go on are absent.

        As in plain decoding, criteria that read the text are called once per token for all rows of one length: reading
        what they say waits for the device.
        """
        stops: dict[int, int] = {}
        late = self._late()
        running = [row for row in range(self.batch) if active[row] and self.finished_at[row] is None]
        for count in range(1, 1 + max(map(len, tokens))):
            for length, group in self.by_length(running).items():
                found = [late] * self.batch
                if self._others and not late:
                    prefixes = self.prefixes(length + count, group)
                    found = self._others(prefixes, scores(self.source_rows(group), count)).tolist()
                stops |= {
                    row: count for row in group if found[row] or self.ends(tokens[row][count - 1], length + count)
                }
            running = [row for row in running if row not in stops and len(tokens[row]) > count]
        return stops

    def _late(self) -> bool:
        """Whether a `max_time` has passed."""
        return bool(self._deadlines) and any(
            time.time() - rule.initial_timestamp > rule.max_time for rule in self._deadlines
        )

    def ends(self, token: int, length: int) -> bool:
        """Whether end of text or the maximal length stops a row with this token, its `length`-th."""
        return token in self._eos_ids or (self._max_length is not None and length >= self._max_length)

    def _write(self, row: int, tokens: list[int]) -> None:
        self.ids[row].narrow(0, self.lengths[row], len(tokens)).copy_(from_host(tokens, self.ids.device))
        if self._texts is not None:  # otherwise it would be read back from the device
            self._texts[row][self.lengths[row] :] = tokens

    def stream(self) -> None:
        """Passes to the streamer what no later round can change."""
        if self._streamer is None:
            return
        texts = self.texts
        for column in range(self._streamed, self._final_length()):
            self._streamer.put(
                from_host(
                    [text[column] if column < len(text) else self.padding_id for text in texts], torch.device("cpu")
                )
            )
            self._streamed += 1

    def _final_length(self) -> int:
        """Columns of the output that no later round can change."""
        if self.done:
            return max(stop for stop in self.finished_at if stop is not None)
        growing = [
            length
            for length, stop in zip(self.lengths, self.finished_at, strict=True)
            if stop is None or not self.pads_finished
        ]
        return min(growing)

    def finish(self) -> Tensor:
        """Ends the stream; returns [batch, length] int64 as plain `generate` would."""
        output = self.ids[:, : self._final_length()].clone()
        for row, length in enumerate(self.lengths):
            if length < output.shape[1]:
                assert self.pad_token_id is not None, "a finished row is padded only where generate defines a pad token"
                output[row, length:] = self.pad_token_id
        if self._streamer is not None:
            self._streamer.end()
        return output
