"""Look-up drafters: they draft what followed the last tokens earlier, in the same or in earlier texts. No weights.

All in host memory: per round a binary search in each index and a few matches. Only new tokens are copied from the
device, once per round. Related: suffix arrays of reversed text; the counted suffix trees of SuffixDecoding (arXiv
2411.04975, Section 3).
"""

from __future__ import annotations

import math
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.state import with_rows
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.registry import Serving, register

__all__ = ["NGramDrafter", "NGramOptions", "SuffixDrafter", "SuffixIndex", "SuffixOptions"]

BYTES = 4  # of a token
SEPARATOR = -1  # between texts; not a token id
SORT_ABOVE = 0.1  # if the share of new positions is larger, all are sorted again


class SuffixIndex:
    """Texts of token ids, searchable for continuations. Safe to use from several threads.

    Args:
        longest: most tokens before a position that are compared.
        max_tokens: above this size the oldest quarter of the tokens is dropped; None for no limit.

    Examples:
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

    def highest(self) -> int:
        """The highest token id; -1 without tokens."""
        return max(self._tokens, default=-1)

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

    def truncate(self, length: int) -> None:
        """Removes all tokens from a position on; for the last few of a text that has not been separated."""
        with self._lock:
            for position in range(max(1, length), len(self._tokens)):
                rank = bisect_left(self._positions, self._before(position), key=self._before)
                while self._positions[rank] != position:  # equal ones are in no order
                    rank += 1
                del self._positions[rank]
            self._room += max(0, len(self._tokens) - length)
            del self._tokens[length:]

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
            tokens = torch.tensor(self._tokens, dtype=torch.int32, device="cpu")
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


MAX_MATCHES = 32  # per index; limits the cost of a round for texts that repeat one token
# A match that is longer by one token weighs more than three shorter ones.
WEIGHT_PER_TOKEN = 4.0
# The weight falls with the distance from the match; so every node is also lighter than its parent.
WEIGHT_PER_DEPTH = 0.8
LEAST_SHARE = 1e-3  # matches with a smaller share of the total weight are ignored

Match = tuple[SuffixIndex, int, int]  # index, position of the continuation, matched tokens


def find(indices: Iterable[SuffixIndex], context: Sequence[int], shortest: int) -> list[Match]:
    """Matches of a text's last tokens in several indices, longest first."""
    found = [(each, *match) for each in indices for match in each.matches(context, MAX_MATCHES, shortest)]
    found.sort(key=lambda match: -match[2])
    return found


def continuation_tree(
    root: int, matches: Iterable[Match], tree_budget: int, depth: int
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and path log-probabilities of the heaviest continuations after a text's last token.

    A node's weight is the sum over all matches whose continuation contains it; for matches of equal length this is the
    frequency. So every node is lighter than its parent, and the heaviest `tree_budget` nodes, heaviest first, form a
    tree. A path's probability is its share of the total weight, to which one match of one token is added for unseen
    continuations.

    Examples:
        >>> index = SuffixIndex()
        >>> index.extend([5, 6, 7, 8, 3, 6, 9, 5, 6])
        >>> matches = find([index], [5, 6], shortest=1)
        >>> tokens, parents, logprobs = continuation_tree(6, matches, tree_budget=3, depth=2)
        >>> tokens, parents, [round(math.exp(logprob), 2) for logprob in logprobs]
        ([6, 7, 8, 9], [-1, 0, 1, 0], [1.0, 0.53, 0.43, 0.13])
    """
    tokens, parents, weights = [root], [-1], [0.0]
    children: dict[tuple[int, int], int] = {}
    total = WEIGHT_PER_TOKEN
    for index, position, length in matches:
        node, weight = 0, WEIGHT_PER_TOKEN**length
        if weight < LEAST_SHARE * total:
            break
        total += weight
        for token in index.continuation(position, min(depth, tree_budget)):
            child = children.setdefault((node, token), len(tokens))
            if child == len(tokens):
                tokens.append(token)
                parents.append(node)
                weights.append(0.0)
            weight *= WEIGHT_PER_DEPTH
            weights[child] += weight
            node = child
    weights[0] = total
    selected = [0, *sorted(range(1, len(tokens)), key=weights.__getitem__, reverse=True)[:tree_budget]]
    rank = {node: index for index, node in enumerate(selected)}
    return (
        [tokens[node] for node in selected],
        [rank.get(parents[node], -1) for node in selected],
        [math.log(weights[node] / total) for node in selected],
    )


@dataclass
class RowText:
    """The text of one row.

    Attributes:
        padding: columns before it.
        text: its tokens up to the latest draft.
        latest: tokens since then.
        prompt: how many of `text` are the prompt; None before the first draft.
    """

    padding: int
    text: SuffixIndex
    latest: list[int] = field(default_factory=list)
    prompt: int | None = None


class LookupGenerator(TreeCandidateGenerator):
    """Drafts from the text of each row, and from the outputs in `memory` if there is one, which it adds to."""

    rewinds = True

    def __init__(self, options: NGramOptions, memory: SuffixIndex | None) -> None:
        self.options, self.memory = options, memory
        self.rows: list[RowText] = []

    def observe(self, committed: Committed) -> None:
        if committed.tree is None:
            steps, longest = committed.token_ids.shape[1], self.options.longest_suffix
            self.rows = [RowText(max(0, steps - count), SuffixIndex(longest)) for count in committed.num_committed]
            return
        for row, tokens in zip(self.rows, committed.tokens, strict=True):
            row.latest += tokens

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._remember(row for number, row in enumerate(self.rows) if number not in rows)
        self.rows = [self.rows[number] for number in rows]

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        self._remember(row for number, row in enumerate(self.rows) if number in places)
        both = [*self.rows, *(row for other in others for row in other.rows)]
        self.rows = [both[row] for row in with_rows(len(self.rows), places)]

    def close(self) -> None:
        self._remember(self.rows)
        self.rows = []

    def _remember(self, rows: Iterable[RowText]) -> None:
        """Adds the outputs of these rows to the memory, possibly with a token after the end."""
        for row in rows:
            if self.memory is not None and row.prompt is not None:
                self.memory.add(row.text.continuation(row.prompt) + row.latest)

    def searched(self, text: SuffixIndex) -> list[SuffixIndex]:
        """The indices in which matches of a row's last tokens are searched; `text` is the row's own."""
        return [text] if self.memory is None else [text, self.memory]

    def draft(self, context: DraftContext) -> DraftTree:
        options, limit = self.options, context.node_limit
        budget = options.node_limit if limit is None else min(options.node_limit, limit)
        trees = []
        for row, tokens, active in zip(self.rows, context.texts, context.active, strict=True):
            if row.prompt is None:  # all tokens except the first root
                # A prompt that was passed as embeddings has no columns here, and no padding.
                row.padding = min(row.padding, len(tokens) - 1)
                row.prompt = len(tokens) - 1 - row.padding
            row.latest = []
            row.text.extend(tokens[row.padding + len(row.text) :])
            end = row.text.last(options.longest_suffix)
            matches = find(self.searched(row.text), end, options.shortest_suffix) if active and budget else []
            trees.append(continuation_tree(end[-1], matches, budget, options.depth))
        token_ids, parents, path_logprobs = map(list, zip(*trees, strict=True))
        return DraftTree.from_lists(token_ids, parents, path_logprobs=path_logprobs)

    def draft_text(self, context: DraftContext, certain: Sequence[int]) -> DraftTree:
        """The tree for a text of which only the first tokens are committed, `certain` of each row; it is not kept."""
        tree = self.draft(context)
        for row, known in zip(self.rows, certain, strict=True):
            row.text.truncate(known - row.padding)
        return tree


MAX_SUFFIX = 32
MAX_DEPTH = 1024
MEMORY_TOKENS = 100_000


@dataclass(slots=True, kw_only=True)
class NGramOptions(TreeOptions):
    """Drafting options of n-gram look-up.

    Attributes:
        longest_suffix: most last tokens that are compared; longer matches come first and weigh most.
        shortest_suffix: fewest tokens of a match.
        tree_budget: see `TreeOptions`.
        depth: most tokens of one continuation.
    """

    method = "ngram"
    longest_suffix: int = 4
    shortest_suffix: int = 1
    depth: int = 10

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(longest_suffix=MAX_SUFFIX, shortest_suffix=MAX_SUFFIX, depth=MAX_DEPTH)
        if self.shortest_suffix > self.longest_suffix:
            raise ValueError(
                f"shortest_suffix={self.shortest_suffix} is larger than longest_suffix={self.longest_suffix}; set "
                "both so that the shortest is at most the longest."
            )


@dataclass(slots=True, kw_only=True)
class SuffixOptions(NGramOptions):
    """Drafting options of suffix look-up.

    Attributes:
        longest_suffix: see `NGramOptions`.
        shortest_suffix: see `NGramOptions`.
        tree_budget: see `TreeOptions`.
        depth: see `NGramOptions`.
    """

    method = "suffix"
    longest_suffix: int = MAX_SUFFIX
    depth: int = 24


class LookupDrafter(Drafter):
    """Base of look-up drafters.

    Attributes:
        index: of outputs of earlier calls; None if only the text itself is used.
    """

    options_class = NGramOptions
    options: NGramOptions
    index: SuffixIndex | None = None

    def __init__(self, **drafting_options: Any) -> None:
        self.options = self.options_class()
        self.set_options(**drafting_options)

    def check_target(self, model: PreTrainedModel) -> None:
        """Any target fits: only tokens that occur in the texts are drafted."""

    def forget(self) -> None:
        if self.index is not None:
            self.index.clear()

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return LookupGenerator(replace(self.options), self.index)


class NGramDrafter(LookupDrafter):
    """Looks up what followed the last tokens earlier in the same text, and drafts a tree of those continuations.

    It gains if the output repeats the prompt or itself: editing, summaries, code, extraction. Prompt lookup in
    transformers (`prompt_lookup_num_tokens`) drafts one continuation of one match, for one row; this one drafts several
    continuations of many matches, weighted by length, and supports batches. It runs no network.

    Args:
        drafting_options: of `NGramOptions`.

    Examples:
        >>> drafter = NGramDrafter(tree_budget=8)
        >>> drafter.options.tree_budget, drafter.options.depth
        (8, 10)
    """


class SuffixDrafter(LookupDrafter):
    """Looks up suffixes of any length in the same text and in outputs of earlier calls, and drafts a tree.

    It gains if calls resemble each other: repeated tool calls, edits of one file, answers with a fixed pattern. Its
    trees are ranked by match length and by frequency (SuffixDecoding, arXiv 2411.04975, which drafts chains).

    Args:
        index: of outputs; None makes one for `MEMORY_TOKENS` tokens (12 bytes each). Several drafters may share one;
            `SuffixIndex.save` and `load` store it.
        drafting_options: of `SuffixOptions`.

    Examples:
        >>> one = SuffixDrafter(tree_budget=8)
        >>> other = SuffixDrafter(one.index)
        >>> other.index is one.index, one.index.max_tokens
        (True, 100000)
    """

    options_class = SuffixOptions
    index: SuffixIndex

    def __init__(self, index: SuffixIndex | None = None, **drafting_options: Any) -> None:
        super().__init__(**drafting_options)
        self.index = SuffixIndex(MAX_SUFFIX, MEMORY_TOKENS) if index is None else index


register(
    "ngram",
    NGramDrafter,
    origin="name",
    serving=Serving(
        "ngram",
        "vLLM has this method itself (method ngram in --speculative-config)",
        settings=lambda drafter: {
            "prompt_lookup_max": drafter.options.longest_suffix,
            "prompt_lookup_min": drafter.options.shortest_suffix,
        },
        note="This is vLLM's own look-up: one continuation from the request's text, no trees.",
    ),
)
register(
    "suffix",
    SuffixDrafter,
    origin="name",
    serving=Serving(
        "suffix",
        "vLLM has this method itself (method suffix in --speculative-config)",
        note="This is vLLM's own suffix decoding; it needs the package arctic-inference.",
    ),
)
