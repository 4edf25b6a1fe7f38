"""N-gram lookup: drafts what followed the last tokens earlier in the prompt and the output. Needs no weights."""

from hf_specdec.drafters.ngram.drafter import NGramDrafter, NGramOptions
from hf_specdec.drafters.registry import register_weightless

__all__ = ["NGramDrafter", "NGramOptions"]

register_weightless("ngram", NGramDrafter)
