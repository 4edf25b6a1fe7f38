"""Drafters without weights and for any target: they look up earlier text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.lookup.candidates import LookupGenerator
from hf_specdec.drafters.lookup.index import SuffixIndex
from hf_specdec.drafters.options import TreeOptions

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
        max_depth: most tokens of one continuation.
    """

    method = "ngram"
    longest_suffix: int = 4
    shortest_suffix: int = 1
    tree_budget: int | Literal["auto"] = 16
    max_depth: int = 10

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(longest_suffix=MAX_SUFFIX, shortest_suffix=MAX_SUFFIX, max_depth=MAX_DEPTH)
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
        max_depth: see `NGramOptions`.
    """

    method = "suffix"
    longest_suffix: int = MAX_SUFFIX
    max_depth: int = 24


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
        return LookupGenerator(
            longest_suffix=self.options.longest_suffix,
            shortest_suffix=self.options.shortest_suffix,
            tree_budget=self.options.node_limit,
            max_depth=self.options.max_depth,
            memory=self.index,
        )


class NGramDrafter(LookupDrafter):
    """Looks up what followed the last tokens earlier in the same text, and drafts a tree of those continuations.

    It gains if the output repeats the prompt or itself: editing, summaries, code, extraction. Prompt lookup in
    transformers (`prompt_lookup_num_tokens`) drafts one continuation of one match, for one row; this one drafts several
    continuations of many matches, weighted by length, and supports batches. It runs no network.

    Args:
        drafting_options: of `NGramOptions`.

    Example:
        >>> drafter = NGramDrafter(tree_budget=8)
        >>> drafter.options.tree_budget, drafter.options.max_depth
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

    Example:
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
