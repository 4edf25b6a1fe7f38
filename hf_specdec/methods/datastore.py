"""REST: looks up what followed the last tokens in a text of one's own, read from a file. No weights.

The datastore is a `SuffixIndex` of any text: documentation, a code base, answers of the target. Build it once with
`build_datastore`, or with an index's own `add` and `save`. Nothing of a call is added to it.

Source: REST, arXiv 2311.08252, Section 3 (retrieval of continuations by longest suffix, and a trie of them).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.registry import Serving, register
from hf_specdec.drafting.vocabulary import may_be_padding
from hf_specdec.methods.lookup import LookupDrafter, LookupGenerator, NGramOptions, SuffixIndex

__all__ = ["RestDrafter", "RestOptions", "build_datastore"]

LONGEST = 16  # tokens of a context that are compared


def build_datastore(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, file: str | os.PathLike[str]
) -> SuffixIndex:
    """Encodes texts with the target's tokenizer and writes them to a file for `load_drafter("rest", datastore=file)`.

    Args:
        texts: each is searched separately. A million tokens take 140 MB of memory once loaded.
        tokenizer: the target's.
        file: to write, in safetensors format.
    """
    index = SuffixIndex(LONGEST)
    for text in texts:
        index.add(tokenizer(text, add_special_tokens=False)["input_ids"])
    index.save(file)
    return index


@dataclass(slots=True, kw_only=True)
class RestOptions(NGramOptions):
    """Drafting options of REST.

    Attributes:
        longest_suffix: see `NGramOptions`.
        shortest_suffix: see `NGramOptions`.
        tree_budget: see `TreeOptions`.
        depth: see `NGramOptions`.
    """

    method = "rest"
    longest_suffix: int = LONGEST


class RestDrafter(LookupDrafter):
    """Drafts a tree of the continuations that the datastore has of the text's last tokens.

    Args:
        datastore: a file written by `build_datastore` or `SuffixIndex.save`, or an index.
        drafting_options: of `RestOptions`.

    Raises:
        OSError: the file does not exist.
        ValueError: there is no datastore, or the file is of another kind.

    Examples:
        >>> index = SuffixIndex()
        >>> index.add([5, 6, 7, 8])
        >>> RestDrafter(index, tree_budget=8).options.tree_budget
        8
    """

    options_class = RestOptions
    made_of = ("datastore",)
    index: SuffixIndex

    def __init__(self, datastore: SuffixIndex | str | os.PathLike[str] | None = None, **drafting_options: Any) -> None:
        super().__init__(**drafting_options)
        if datastore is None:
            raise ValueError(
                'load_drafter("rest") needs datastore=..., a file written by build_datastore(texts, tokenizer, file), '
                "or a SuffixIndex."
            )
        self.index = datastore if isinstance(datastore, SuffixIndex) else SuffixIndex.load(datastore)

    def check_target(self, model: PreTrainedModel) -> None:
        """Raises ValueError if the datastore has more ids that the target lacks than padding explains."""
        most, rows = self.index.highest(), num_tokens(model)
        if most >= rows and not may_be_padding(most + 1, rows):
            raise ValueError(
                f"The datastore has token ids up to {most}, but target {model.name_or_path!r} has {rows} embeddings: "
                "it was built with another tokenizer. Build it again with the target's."
            )

    def forget(self) -> None:
        """The datastore is not learnt from calls."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return _RestGenerator(self.index, num_tokens(target.model), replace(self.options))


class _RestGenerator(LookupGenerator):
    """Searches the datastore in place of the row's text; drafts no tokens that the target lacks."""

    def __init__(self, datastore: SuffixIndex, vocab_size: int, options: NGramOptions) -> None:
        super().__init__(options, None)
        self.datastore, self.vocab_size = datastore, vocab_size

    def draft(self, context: DraftContext) -> DraftTree:
        return super().draft(context).within_vocabulary(self.vocab_size)

    def searched(self, text: SuffixIndex) -> list[SuffixIndex]:
        return [self.datastore]


register("rest", RestDrafter, origin="name", serving=Serving(not_exported="vLLM has no look-up in a datastore"))
