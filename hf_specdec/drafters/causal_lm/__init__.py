"""Causal language models as drafters: any model with the target's tokenizer, drafting chains or trees."""

from hf_specdec.drafters.causal_lm.drafter import CausalLMDrafter, CausalLMOptions
from hf_specdec.drafters.causal_lm.loading import load
from hf_specdec.drafters.registry import register_family

__all__ = ["CausalLMDrafter", "CausalLMOptions"]

register_family("causal_lm", drafter=CausalLMDrafter, load=load)
