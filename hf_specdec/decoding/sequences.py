"""Sequences: the tokens of every row, where each row stops, which rows are left, and what the streamer has been told.

Rows of a batch grow by different numbers of tokens per round, while processors and stopping criteria expect a batch
whose rows have one length, one token more than the last time. This file bridges the two: whatever is asked about a row
is asked with that row's own prefix, token by token, in the order plain decoding would have asked.
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

# (rows to stand in the batch, how many of their new tokens count) -> one [batch, vocab] tensor per token, or None.
ScoresSoFar: TypeAlias = Callable[[list[int], int], tuple[Tensor, ...] | None]

T = TypeVar("T")
GROWTH = 256  # columns added at a time when the final length is not known


class Sequences:
    """Token ids of a batch, [batch, capacity] on the device and their lengths on the host.

    Args:
        prompt_ids: [batch, seq] integers; what is generated is int64.
        stopping_criteria: of the `generate` call.
        pad_token_id: what a finished row is filled with, where plain decoding would do so.
        streamer: of the `generate` call.

    Attributes:
        rows: of the batch, those that rounds are still made for; "live" are values of these rows.
    """

    def __init__(
        self,
        prompt_ids: Tensor,
        stopping_criteria: StoppingCriteriaList,
        pad_token_id: int | None,
        streamer: BaseStreamer | None,
    ) -> None:
        batch, length = prompt_ids.shape
        self.rows = list(range(batch))
        self._row_ids: Tensor | None = None  # the same on the device, once rows were dropped
        self.ids = torch.nn.functional.pad(prompt_ids.long(), (0, GROWTH))
        self.prompt_length = length
        self.lengths = [length] * batch
        self.finished_at: list[int | None] = [None] * batch
        self.pad_token_id = pad_token_id
        # As in plain decoding: with an end-of-text criterion finished rows are padded, without one they go on.
        self.pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._streamer = streamer
        self._streamed = length
        self._eos_ids: set[int] = set()
        self._max_length: int | None = None
        self._deadlines: list[MaxTimeCriteria] = []
        self._others = StoppingCriteriaList()
        for criterion in stopping_criteria:
            # These three are answered on the host, without a look at the device; exact types, since subclasses differ.
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
        """Whether the loop may end: all rows have stopped, and none lags behind the last one to stop."""
        stops = [stop for stop in self.finished_at if stop is not None]
        return len(stops) == self.batch and (self.pads_finished or min(self.lengths) >= max(stops))

    @property
    def active(self) -> list[bool]:
        """Per row, whether further tokens of it may end up in the output."""
        longest = max(self.lengths)
        return [
            stop is None or (not self.pads_finished and length < longest)
            for stop, length in zip(self.finished_at, self.lengths, strict=True)
        ]

    def live(self, values: Sequence[T]) -> list[T]:
        """Of one value per row of the batch those of live rows."""
        return [values[row] for row in self.rows]

    def lasting(self, kept: Sequence[int]) -> list[int]:
        """Of the tokens that rows kept in the last round, those that the output may still hold, per row of the batch.

        They are fewer once all rows have stopped, if some went past the end of the output.
        """
        if not self.done:
            return list(kept)
        end = self._settled_length()
        return [max(0, min(count, end - (length - count))) for count, length in zip(kept, self.lengths, strict=True)]

    @property
    def overrun(self) -> list[int]:
        """Rows that have stopped and go on, since plain decoding would, for as long as others do."""
        if self.pads_finished or self.done:
            return []
        return [row for row, stop in enumerate(self.finished_at) if stop is not None]

    @property
    def live_ids(self) -> Tensor:
        """[live rows, capacity] int64 tokens; columns beyond a row's length hold anything."""
        return self.ids if self._row_ids is None else self.ids[self._row_ids]

    @property
    def finished_places(self) -> list[int]:
        """Of the live rows those that nothing can be added to any more."""
        if not any(self.finished_at):
            return []
        return [place for place, finished in enumerate(self.live(self.finished)) if finished]

    def keep_rows(self, places: Sequence[int]) -> None:
        """Rounds go on for these of the live rows."""
        self.rows = [self.rows[place] for place in places]
        self._row_ids = from_host(self.rows, self.ids.device)

    @property
    def finished(self) -> list[bool]:
        """Per row, whether nothing can be added to it any more; other rows that are not active only wait."""
        return [
            stop is not None and (self.pads_finished or (self._max_length is not None and length >= self._max_length))
            for stop, length in zip(self.finished_at, self.lengths, strict=True)
        ]

    @property
    def watched(self) -> bool:
        """Whether somebody reads along, or is asked at each token."""
        return self._streamer is not None or bool(self._deadlines) or bool(self._others)

    @property
    def can_wait(self) -> bool:
        """Whether tokens may be added when the round after theirs is under way.

        Not where somebody reads along or is asked at each token, nor where rows have ended or are sure to end with the
        tokens to be added: the round after would be in vain.
        """
        ending = self._max_length is not None and max(self.lengths) + 1 >= self._max_length
        return not self.watched and not ending and not any(stop is not None for stop in self.finished_at)

    def reserve(self, columns: int) -> None:
        """Makes room for `columns` tokens behind the longest row."""
        missing = max(self.lengths) + columns - self.ids.shape[1]
        if missing > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, missing + GROWTH))

    def prefixes(self, length: int, rows: list[int]) -> Tensor:
        """[batch, length] int64: the prefixes of `rows`; the other rows hold a copy of the first of `rows`.

        Processors and criteria may keep state per batch, so they always see the whole batch and never a single row.
        """
        prefixes = self.ids[:, :length]
        if len(rows) == self.batch:
            return prefixes
        return prefixes[self._stand_ins(rows)]

    def _stand_ins(self, rows: list[int]) -> list[int]:
        own = set(rows)
        return [row if row in own else rows[0] for row in range(self.batch)]

    def for_each_length(
        self, rows: Iterable[int], extra: int, ask: Callable[[int, list[int], list[int]], Tensor]
    ) -> list[tuple[list[int], Tensor]]:
        """Calls `ask(length, rows, stand_ins)` once per distinct length of `rows`, counted `extra` tokens further on.

        `stand_ins` gives for every row of the batch the row whose values it should carry in that call.
        """
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.lengths[row] + extra, []).append(row)
        return [(group, ask(length, group, self._stand_ins(group))) for length, group in groups.items()]

    def append(self, new: list[list[int]], scores: ScoresSoFar) -> list[int]:
        """Adds each live row's new tokens, up to where plain decoding would have stopped.

        Args:
            new: per live row its new tokens; ignored for rows that are not active.
            scores: gives the scores that plain decoding would hand to a criterion.

        Returns:
            How many tokens each row of the batch kept.
        """
        tokens: list[list[int]] = [[] for _ in range(self.batch)]
        for row, own in zip(self.rows, new, strict=True):
            tokens[row] = own
        active = [going and bool(own) for going, own in zip(self.active, tokens, strict=True)]
        self.reserve(max(map(len, tokens)))
        for row in range(self.batch):
            if active[row]:
                self._write(row, tokens[row])
        if self._others:
            kept = self._keep_step_by_step(tokens, active, scores)
        else:
            late = self._late()
            kept = [0] * self.batch
            for row, going in enumerate(active):
                if going:
                    kept[row] = self._keep(row, tokens[row], late)
        for row, count in enumerate(kept):
            self.lengths[row] += count
        return kept

    def _keep(self, row: int, tokens: list[int], late: bool) -> int:
        """How many of its new tokens a row keeps where the host answers all criteria; notes where it stops."""
        length = self.lengths[row]
        within = self._max_length is None or length + len(tokens) < self._max_length
        if within and not late and self._eos_ids.isdisjoint(tokens):
            return len(tokens)
        for token in tokens:
            length += 1
            if self.finished_at[row] is None and (late or self.ends(token, length)):
                self.finished_at[row] = length
                if self.pads_finished:
                    break
        return length - self.lengths[row]

    def _late(self) -> bool:
        return bool(self._deadlines) and any(
            time.time() - rule.initial_timestamp > rule.max_time for rule in self._deadlines
        )

    def ends(self, token: int, length: int) -> bool:
        """Whether a row stops with this token, as its `length`-th, for a reason that the host can tell at once."""
        return token in self._eos_ids or (self._max_length is not None and length >= self._max_length)

    def _keep_step_by_step(self, tokens: list[list[int]], active: list[bool], scores: ScoresSoFar) -> list[int]:
        """The same where criteria are asked that want to see all rows as plain decoding shows them, token by token."""
        kept = [0] * self.batch
        going = [row for row in range(self.batch) if active[row]]
        while going:
            stopped = self._check_stops([row for row in going if self.finished_at[row] is None], kept, tokens, scores)
            for row in going:
                kept[row] += 1
                if row in stopped:
                    self.finished_at[row] = self.lengths[row] + kept[row]
            going = [
                row
                for row in going
                if kept[row] < len(tokens[row]) and (self.finished_at[row] is None or not self.pads_finished)
            ]
        return kept

    def _write(self, row: int, tokens: list[int]) -> None:
        self.ids[row].narrow(0, self.lengths[row], len(tokens)).copy_(from_host(tokens, self.ids.device))

    def _check_stops(
        self,
        rows: list[int],
        kept: list[int],
        tokens: list[list[int]],
        scores: ScoresSoFar,
    ) -> set[int]:
        """The rows among `rows` that stop with their next token."""
        late = self._late()
        stopped = {row for row in rows if late or self.ends(tokens[row][kept[row]], self.lengths[row] + kept[row] + 1)}
        if rows:
            step = kept[rows[0]]  # all rows that still go on have kept equally many of their new tokens

            def ask(length: int, group: list[int], stand_ins: list[int]) -> Tensor:
                return self._others(self.prefixes(length, group), scores(stand_ins, step + 1))

            for group, verdict in self.for_each_length(rows, step + 1, ask):
                stops = verdict.tolist()
                stopped.update(row for row in group if stops[row])
        return stopped

    def stream(self) -> None:
        """Hands the streamer what no later round can change."""
        if self._streamer is None:
            return
        for column in range(self._streamed, self._settled_length()):
            self._streamer.put(torch.tensor([self._token_at(row, column) for row in range(self.batch)]))
            self._streamed = column + 1

    def _settled_length(self) -> int:
        """Columns of the output that no later round can change."""
        if self.done:
            return max(stop for stop in self.finished_at if stop is not None)
        waiting = [
            length
            for length, stop in zip(self.lengths, self.finished_at, strict=True)
            if stop is None or not self.pads_finished
        ]
        return min(waiting)

    def _token_at(self, row: int, column: int) -> int:
        if column < self.lengths[row]:
            return int(self.ids[row, column])
        assert self.pad_token_id is not None, "a finished row is padded only where generate defines a pad token"
        return self.pad_token_id

    def finish(self) -> Tensor:
        """Ends the stream; returns [batch, length] int64 as plain `generate` would."""
        length = self._settled_length()
        output = self.ids[:, :length].clone()
        for row in range(self.batch):
            if self.lengths[row] < length:
                assert self.pad_token_id is not None, "a finished row is padded only where generate defines a pad token"
                output[row, self.lengths[row] :] = self.pad_token_id
        if self._streamer is not None:
            self._streamer.end()
        return output
