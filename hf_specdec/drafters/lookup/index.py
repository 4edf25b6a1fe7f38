"""SuffixIndex: texts, with all their positions sorted by the tokens before them, read backwards.

Positions with the same preceding tokens are adjacent in this order, and the longer their common context, the closer
they are. So one binary search finds the last tokens of a text, and its neighbours are the matches, longest first. A
token takes 12 bytes; a new one is inserted by moving part of an array.

Related: suffix arrays of reversed text; the counted suffix trees of SuffixDecoding (arXiv 2411.04975, Section 3).
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

BYTES = 4  # of a token
SEPARATOR = -1  # between texts; not a token id
SORT_ABOVE = 0.1  # if the share of new positions is larger, all are sorted again


class SuffixIndex:
    """Texts of token ids, searchable for continuations. Safe to use from several threads.

    Args:
        longest: most tokens before a position that are compared.
        max_tokens: above this size the oldest quarter of the tokens is dropped; None for no limit.

    Example:
        >>> index = SuffixIndex(longest=4)
        >>> index.extend([5, 6, 7, 8, 3, 6, 7, 9, 5, 6])
        >>> index.matches([5, 6], most=3), index.continuation(2, 2)
        ([(2, 2), (6, 1)], [7, 8])
    """

    def __init__(self, longest: int = 32, max_tokens: int | None = None) -> None:
        self.longest, self.max_tokens = longest, max_tokens
        self._lock = threading.RLock()
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()

    def clear(self) -> None:
        """Removes all texts."""
        with self._lock:
            self._tokens = array("i")
            self._positions = array("i")  # of continuations, sorted by `_before`
            self._backwards = bytearray()  # the tokens in reverse order, after unused bytes
            self._room = 0  # number of tokens that fit into the unused bytes

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the last text."""
        with self._lock:
            self._append(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds a separate text."""
        with self._lock:
            if self._tokens:
                self._append([SEPARATOR])
            self._append(tokens)
            if self.max_tokens is not None and len(self._tokens) > self.max_tokens:
                latest = self._tokens[-(self.max_tokens * 3 // 4) :]
                self.clear()
                self._append(latest)

    def matches(self, context: Sequence[int], most: int, shortest: int = 1) -> list[tuple[int, int]]:
        """Positions after earlier occurrences of a text's last tokens, longest match first, latest first among equals.

        Args:
            context: the text's last tokens; at most `longest` are compared.
            most: most matches.
            shortest: fewest tokens of a match.

        Returns:
            (position of the continuation, number of matched tokens) of each.
        """
        wanted = _encoded(context[-self.longest :])
        with self._lock:
            return list(self._nearest(wanted, most, shortest))

    def last(self, count: int) -> list[int]:
        """The last `count` tokens of the last text."""
        return self._tokens[-count:].tolist()

    def continuation(self, position: int, most: int | None = None) -> list[int]:
        """The tokens from a position to the end of its text; at most `most`."""
        tokens = self._tokens[position : None if most is None else position + most].tolist()
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the texts to a safetensors file. The ids are valid only with the same tokenizer."""
        with self._lock:
            tokens = torch.tensor(self._tokens, dtype=torch.int32)
        save_file({"tokens": tokens}, file, metadata={"longest": str(self.longest), "max_tokens": str(self.max_tokens)})

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> SuffixIndex:
        """Reads a file written by `save`.

        Raises:
            OSError: the file does not exist.
            ValueError: it is of another kind, or damaged.
        """
        try:
            with safe_open(file, "pt") as stored:
                metadata, tokens = stored.metadata() or {}, stored.get_tensor("tokens").to(torch.int32)
            most = metadata["max_tokens"]
            index = cls(int(metadata["longest"]), None if most == "None" else int(most))
            index.extend(tokens.flatten().tolist())
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"{os.fspath(file)!r} was not written by SuffixIndex.save ({error}).") from error
        return index

    def _before(self, position: int) -> bytes:
        """The encoded tokens before a position, nearest first."""
        start = BYTES * (self._room + len(self._tokens) - position)
        return bytes(self._backwards[start : start + BYTES * self.longest])

    def _append(self, tokens: Sequence[int]) -> None:
        known = len(self._tokens)
        if len(tokens) > self._room:
            more = max(len(tokens), known)
            self._backwards[: BYTES * self._room] = bytes(BYTES * (self._room + more))
            self._room += more
        self._tokens.extend(tokens)
        self._backwards[BYTES * (self._room - len(tokens)) : BYTES * self._room] = _encoded(tokens)
        self._room -= len(tokens)
        new = [
            position
            for position in range(max(1, known), len(self._tokens))
            if self._tokens[position] != SEPARATOR and self._tokens[position - 1] != SEPARATOR
        ]
        if len(new) > SORT_ABOVE * len(self._positions):
            self._positions = array("i", sorted([*self._positions, *new], key=self._before))
            return
        for position in new:
            self._positions.insert(bisect_right(self._positions, self._before(position), key=self._before), position)

    def _nearest(self, wanted: bytes, most: int, shortest: int) -> Iterator[tuple[int, int]]:
        """The positions next to the insertion point of `wanted`, on both sides, by the number of shared tokens."""
        right = bisect_right(self._positions, wanted, key=self._before)
        left = right - 1
        left_length, right_length = (self._shared(each, wanted, len(wanted) // BYTES) for each in (left, right))
        for _ in range(most):
            if max(left_length, right_length) < shortest:
                return
            if left_length >= right_length:
                yield self._positions[left], left_length
                left -= 1
                left_length = self._shared(left, wanted, left_length)
            else:
                yield self._positions[right], right_length
                right += 1
                right_length = self._shared(right, wanted, right_length)

    def _shared(self, rank: int, wanted: bytes, most: int) -> int:
        """How many tokens before the position with this rank equal the wanted ones; at most `most`."""
        if not 0 <= rank < len(self._positions):
            return 0
        before = self._before(self._positions[rank])
        while before[: BYTES * most] != wanted[: BYTES * most]:
            most -= 1
        return most


def _encoded(tokens: Sequence[int]) -> bytes:
    """Token ids in reverse order, as bytes. The order of different ids is arbitrary but fixed."""
    backwards = array("i", tokens)
    backwards.reverse()
    return backwards.tobytes()
