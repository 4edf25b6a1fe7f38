"""Causal language models as drafters: any model with the target's tokenizer, drafting chains or trees."""

from hf_specdec.drafters.causal_lm.draft_model import with_whole_vocabulary
from hf_specdec.drafters.causal_lm.drafter import CausalLMDrafter, CausalLMOptions
from hf_specdec.drafters.causal_lm.loading import load
from hf_specdec.drafters.registry import Serving, register

__all__ = ["CausalLMDrafter", "CausalLMOptions"]

register(
    "causal_lm",
    CausalLMDrafter,
    load=load,
    serving=Serving(
        "draft_model",
        "vLLM serves a plain language model without an export (method draft_model in --speculative-config)",
        needs_export=lambda drafter, config: drafter.target_ids is not None,
        whole_model=lambda drafter, vocab_size: with_whole_vocabulary(drafter.model, vocab_size),
    ),
)
