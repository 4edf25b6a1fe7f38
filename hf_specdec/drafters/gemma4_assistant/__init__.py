"""Gemma 4 assistants: a small stack of queries that attends to the target's own keys and values."""

from hf_specdec.drafters.gemma4_assistant.candidates import Gemma4AssistantGenerator
from hf_specdec.drafters.gemma4_assistant.configuration import Gemma4AssistantConfig, Gemma4AssistantOptions
from hf_specdec.drafters.gemma4_assistant.modeling import Gemma4AssistantDrafter
from hf_specdec.drafters.registry import register_family

__all__ = ["Gemma4AssistantConfig", "Gemma4AssistantDrafter", "Gemma4AssistantGenerator", "Gemma4AssistantOptions"]

register_family("gemma4_assistant", drafter=Gemma4AssistantDrafter)
