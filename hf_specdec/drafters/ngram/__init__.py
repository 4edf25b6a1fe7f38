"""N-gram lookup: drafts what followed the last tokens earlier in the prompt and the output. Needs no weights."""

from hf_specdec.drafters.ngram.drafter import NGramDrafter

__all__ = ["NGramDrafter"]
