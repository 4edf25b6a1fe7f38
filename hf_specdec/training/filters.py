"""Which written answers are worth training on: without loops, empty answers and near duplicates.

Text that repeats itself teaches a drafter little, and makes it look better in training than it is in decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

LOOP, MOST_REPEATS = 8, 3  # an answer loops if one sequence of 8 tokens occurs more than 3 times
SHARED = 13  # tokens; the length of sequences that rows are compared by
MOST_SHARED = 0.5  # a row is a near duplicate if more of its sequences occur in rows before it


def useful_answers(
    answers: Iterable[dict[str, Any]], held_out: Iterable[Sequence[int]] = ()
) -> tuple[list[dict[str, Any]], dict[str, int], int]:
    """The answers to train on, and how many of the others there are, by reason.

    Args:
        answers: rows of `chat.write_answers`.
        held_out: token ids of texts that training must not see; a row with 13 tokens of one in sequence is left out.

    Returns:
        the rows, in order, cut where they loop; the number of rows left out as "empty", "held_out" and
        "near_duplicate"; the number of rows that were cut.

    Examples:
        >>> rows = [{"prompt_ids": [1], "answer_ids": ids} for ids in ([5, 6, 7], [4], [2] * 40)]
        >>> kept, dropped, num_cut = useful_answers(rows)
        >>> [len(row["answer_ids"]) for row in kept], dropped, num_cut
        ([3, 10], {'empty': 1}, 1)
    """
    kept, dropped, seen, num_cut = [], Counter[str](), set[int](), 0
    forbidden = {each for ids in held_out for each in _sequences(ids, SHARED)}
    for row in answers:
        text = before_loop(row["answer_ids"])
        loops = len(text) < len(row["answer_ids"])
        if loops:
            row = row | {"answer_ids": text, "ended": False}
        own = [*_sequences([*row["prompt_ids"], *row["answer_ids"]], SHARED)]
        reason = _reason(row["answer_ids"], own, seen, forbidden)
        if reason is None:
            kept.append(row)
            num_cut += loops
            # Sequences of the prompt alone are left out: later turns and other temperatures share it.
            seen.update(_sequences(row["answer_ids"], SHARED))
        else:
            dropped[reason] += 1
    return kept, dict(dropped), num_cut


def before_loop(token_ids: Sequence[int]) -> Sequence[int]:
    """A text up to the token that completes a sequence of 8 tokens for the fourth time; all of it if there is none."""
    counts = Counter[tuple[int, ...]]()
    for end in range(LOOP, len(token_ids) + 1):
        sequence = tuple(token_ids[end - LOOP : end])
        counts[sequence] += 1
        if counts[sequence] > MOST_REPEATS:
            return token_ids[: end - 1]
    return token_ids


def _reason(answer: Sequence[int], own: Sequence[int], seen: Collection[int], forbidden: Collection[int]) -> str | None:
    if len(answer) < 2:  # nothing but the end of the text
        return "empty"
    if any(each in forbidden for each in own):
        return "held_out"
    sequences = [*_sequences(answer, SHARED)]
    if sum(each in seen for each in sequences) > MOST_SHARED * len(sequences):
        return "near_duplicate"
    return None


def _sequences(ids: Sequence[int], length: int) -> Iterator[int]:
    """Hashes of all sequences of `length` tokens: several times smaller than the sequences."""
    return (hash(tuple(ids[start : start + length])) for start in range(len(ids) - length + 1))
