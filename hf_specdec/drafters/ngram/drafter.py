"""NGramDrafter: the drafter that needs nothing, neither weights nor a certain target. The search: `candidates.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.ngram.candidates import NGramGenerator
from hf_specdec.drafters.options import TreeOptions

MAX_SUFFIX = 32
MAX_DEPTH = 1024


@dataclass(slots=True, kw_only=True)
class NGramOptions(TreeOptions):
    """How n-grams are looked up.

    Attributes:
        longest_suffix: most last tokens that are looked up together; long matches are found first and weigh most.
        shortest_suffix: fewest last tokens that count as a match.
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


class NGramDrafter(Drafter):
    """Looks up what followed the last tokens earlier in the same text, and drafts a tree of those continuations.

    It gains where output repeats prompt or output: editing, summaries, code, extraction. Prompt lookup in transformers
    (`prompt_lookup_num_tokens`) drafts one continuation of one match, for one row; this one drafts several of many
    matches, weighted by how long they are, and takes batches. Unlike the other drafters it runs no network.

    Args:
        drafting_options: of `NGramOptions`.

    Example:
        >>> drafter = NGramDrafter(tree_budget=8)
        >>> drafter.options.tree_budget, drafter.options.max_depth
        (8, 10)
    """

    options_class = NGramOptions
    options: NGramOptions

    def __init__(self, **drafting_options: Any) -> None:
        self.options = NGramOptions()
        self.set_options(**drafting_options)

    def check_target(self, model: PreTrainedModel) -> None:
        """Fits any target: it drafts only tokens that the text already has."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return NGramGenerator(
            longest_suffix=self.options.longest_suffix,
            shortest_suffix=self.options.shortest_suffix,
            tree_budget=self.options.node_limit,
            max_depth=self.options.max_depth,
        )
