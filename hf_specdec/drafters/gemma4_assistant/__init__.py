"""Gemma 4 assistants: a small stack of queries that attends to the target's own keys and values."""

from hf_specdec.drafters.gemma4_assistant.candidates import Gemma4AssistantGenerator
from hf_specdec.drafters.gemma4_assistant.configuration import Gemma4AssistantConfig, Gemma4AssistantOptions
from hf_specdec.drafters.gemma4_assistant.modeling import Gemma4AssistantDrafter
from hf_specdec.drafters.registry import Serving, register
from hf_specdec.hub.formats.gemma4_assistant import GEMMA4_ASSISTANT, OWN_KEYS

__all__ = ["Gemma4AssistantConfig", "Gemma4AssistantDrafter", "Gemma4AssistantGenerator", "Gemma4AssistantOptions"]

register(
    "gemma4_assistant",
    Gemma4AssistantDrafter,
    layouts=(GEMMA4_ASSISTANT,),
    own_keys=OWN_KEYS,
    serving=Serving(
        "mtp",
        "vLLM serves Gemma 4 assistants in their published layout (method mtp in --speculative-config)",
        # What this library saves is not served, and not exported either.
        needs_export=lambda drafter, config: config["model_type"] == drafter.config.model_type,
    ),
)
