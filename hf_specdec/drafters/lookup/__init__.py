"""Look-ups: draft what followed the last tokens before, in the same text or in earlier ones. They need no weights."""

from hf_specdec.drafters.lookup.drafter import NGramDrafter, NGramOptions, SuffixDrafter, SuffixOptions
from hf_specdec.drafters.lookup.index import SuffixIndex
from hf_specdec.drafters.registry import register_weightless

__all__ = ["NGramDrafter", "NGramOptions", "SuffixDrafter", "SuffixIndex", "SuffixOptions"]

register_weightless("ngram", NGramDrafter)
register_weightless("suffix", SuffixDrafter)
