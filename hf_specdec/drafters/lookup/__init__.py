"""Look-up drafters: they draft what followed the last tokens earlier, in the same or in earlier texts. No weights."""

from hf_specdec.drafters.lookup.drafter import NGramDrafter, NGramOptions, SuffixDrafter, SuffixOptions
from hf_specdec.drafters.lookup.index import SuffixIndex
from hf_specdec.drafters.registry import Serving, register

__all__ = ["NGramDrafter", "NGramOptions", "SuffixDrafter", "SuffixIndex", "SuffixOptions"]

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
