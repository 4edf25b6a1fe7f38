"""NGramDrafter: the drafter that needs nothing, neither weights nor a certain target. The search: `candidates.py`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from transformers import PreTrainedModel

from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.ngram.candidates import NGramGenerator

MAX_TREE_BUDGET = 1024
MAX_SUFFIX = 32


class NGramDrafter(Drafter):
    """Looks up what followed the last tokens earlier in the same text, and drafts a tree of those continuations.

    It gains where output repeats prompt or output: editing, summaries, code, extraction. Prompt lookup in transformers
    (`prompt_lookup_num_tokens`) drafts one continuation of one match, for one row; this one drafts several of many
    matches, weighted by how long they are, and takes batches. Unlike the other drafters it runs no network.

    Drafting options, with their defaults:
        longest_suffix: most last tokens that are looked up together; long matches are found first and weigh most (4).
        shortest_suffix: fewest last tokens that count as a match (1).
        tree_budget: most drafted nodes of a tree, root not counted (16; at most 1024, or `"auto"`, which chooses among
            up to 64).
        max_depth: most tokens of one continuation (10).

    Example:
        >>> drafter = NGramDrafter(tree_budget=8)
        >>> drafter.tree_budget, drafter.max_depth
        (8, 10)
    """

    method = "ngram"
    option_names: ClassVar[tuple[str, ...]] = ("longest_suffix", "shortest_suffix", "tree_budget", "max_depth")

    def __init__(self, **drafting_options: Any) -> None:
        self.longest_suffix = 4
        self.shortest_suffix = 1
        self.tree_budget: int | Literal["auto"] = 16
        self.max_depth = 10
        self.set_options(**drafting_options)

    def check_target(self, model: PreTrainedModel) -> None:
        """Fits any target: it drafts only tokens that the text already has."""

    def check_options(self) -> None:
        for name, most in (
            ("longest_suffix", MAX_SUFFIX),
            ("shortest_suffix", MAX_SUFFIX),
            ("max_depth", MAX_TREE_BUDGET),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r} must be an integer from 1 to {most}.")
        self.check_tree_budget(MAX_TREE_BUDGET)
        if self.shortest_suffix > self.longest_suffix:
            raise ValueError(
                f"shortest_suffix={self.shortest_suffix} is larger than longest_suffix={self.longest_suffix}; set "
                "both so that the shortest is at most the longest."
            )

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return NGramGenerator(
            longest_suffix=self.longest_suffix,
            shortest_suffix=self.shortest_suffix,
            tree_budget=self.node_limit,
            max_depth=self.max_depth,
        )
