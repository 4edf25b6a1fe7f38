"""Look-up drafters: they draft what followed the last tokens earlier, in the same or in earlier texts. No weights."""

from hf_specdec.drafters.lookup.drafter import NGramDrafter, NGramOptions, SuffixDrafter, SuffixOptions
from hf_specdec.drafters.lookup.index import SuffixIndex
from hf_specdec.drafters.registry import register_weightless

__all__ = ["NGramDrafter", "NGramOptions", "SuffixDrafter", "SuffixIndex", "SuffixOptions"]

register_weightless("ngram", NGramDrafter)
register_weightless("suffix", SuffixDrafter)
