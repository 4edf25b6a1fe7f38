"""SuffixIndex: texts, and every place in them in the order of what stands before it.

Places with the same tokens before them lie side by side in that order, those with the longest common context nearest
to each other. So one binary search finds where a text's last tokens stood before, and its neighbours are the matches,
longest first. A token takes 12 bytes, and a new one is put into its place by moving part of an array.

Relatives: suffix arrays of reversed text; the counted suffix trees of SuffixDecoding (arXiv 2411.04975, Section 3).
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
SEPARATOR = -1  # between texts: no token
SORT_ABOVE = 0.1  # a larger share of new places is sorted in with all others at once


class SuffixIndex:
    """Texts of token ids, and where their continuations are. Several threads may use one.

    Args:
        longest: most tokens before a place that are compared.
        max_tokens: when more are held, the oldest are forgotten; a quarter of them at a time. None: never.

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
        """Forgets all texts."""
        with self._lock:
            self._tokens = array("i")
            self._places = array("i")  # of continuations, ordered by `_before`
            self._backwards = bytearray()  # the tokens from the last to the first, behind unused room
            self._room = 0  # tokens that fit in front

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end of the last text."""
        with self._lock:
            self._append(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds a text of its own."""
        with self._lock:
            if self._tokens:
                self._append([SEPARATOR])
            self._append(tokens)
            if self.max_tokens is not None and len(self._tokens) > self.max_tokens:
                kept = self._tokens[-(self.max_tokens * 3 // 4) :]
                self.clear()
                self._append(kept)

    def matches(self, context: Sequence[int], most: int, shortest: int = 1) -> list[tuple[int, int]]:
        """Places where the last tokens of a text stood before, longest match first, latest of equal ones first.

        Args:
            context: the text's last tokens; no more than `longest` are compared.
            most: matches.
            shortest: fewest tokens of a match.

        Returns:
            (place of the continuation, matched tokens) of each.
        """
        wanted = _encoded(context[-self.longest :])
        with self._lock:
            return list(self._walk(wanted, most, shortest))

    def last(self, count: int) -> list[int]:
        """The last tokens of all."""
        return self._tokens[-count:].tolist()

    def continuation(self, place: int, most: int | None = None) -> list[int]:
        """The tokens from a place on, of the same text; `most` at most."""
        tokens = self._tokens[place : None if most is None else place + most].tolist()
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the texts to a safetensors file. Ids mean nothing without their tokenizer: keep both together."""
        with self._lock:
            tokens = torch.tensor(self._tokens, dtype=torch.int32)
        save_file({"tokens": tokens}, file, metadata={"longest": str(self.longest), "max_tokens": str(self.max_tokens)})

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> SuffixIndex:
        """Reads what `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is of another kind, or damaged.
        """
        try:
            with safe_open(file, "pt") as stored:
                told, tokens = stored.metadata() or {}, stored.get_tensor("tokens").to(torch.int32)
            most = told["max_tokens"]
            index = cls(int(told["longest"]), None if most == "None" else int(most))
            index.extend(tokens.flatten().tolist())
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"{os.fspath(file)!r} is no file that SuffixIndex.save wrote ({error}).") from error
        return index

    def _before(self, place: int) -> bytes:
        """The tokens before a place, from the nearest on."""
        start = BYTES * (self._room + len(self._tokens) - place)
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
            place
            for place in range(max(1, known), len(self._tokens))
            if self._tokens[place] != SEPARATOR and self._tokens[place - 1] != SEPARATOR
        ]
        if len(new) > SORT_ABOVE * len(self._places):
            self._places = array("i", sorted([*self._places, *new], key=self._before))
            return
        for place in new:
            self._places.insert(bisect_right(self._places, self._before(place), key=self._before), place)

    def _walk(self, wanted: bytes, most: int, shortest: int) -> Iterator[tuple[int, int]]:
        """The nearest places on both sides of where `wanted` belongs, in turn of how much they share with it."""
        right = bisect_right(self._places, wanted, key=self._before)
        left = right - 1
        left_length, right_length = (self._shared(each, wanted, len(wanted) // BYTES) for each in (left, right))
        for _ in range(most):
            if max(left_length, right_length) < shortest:
                return
            if left_length >= right_length:
                yield self._places[left], left_length
                left -= 1
                left_length = self._shared(left, wanted, left_length)
            else:
                yield self._places[right], right_length
                right += 1
                right_length = self._shared(right, wanted, right_length)

    def _shared(self, rank: int, wanted: bytes, most: int) -> int:
        """How many tokens before the place of that rank are those wanted; `most` at most."""
        if not 0 <= rank < len(self._places):
            return 0
        before = self._before(self._places[rank])
        while before[: BYTES * most] != wanted[: BYTES * most]:
            most -= 1
        return most


def _encoded(tokens: Sequence[int]) -> bytes:
    """From the last to the first. In what order two tokens are does not matter, if it is always the same."""
    backwards = array("i", tokens)
    backwards.reverse()
    return backwards.tobytes()
