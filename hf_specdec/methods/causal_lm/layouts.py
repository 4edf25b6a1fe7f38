"""Plain language models: compares the headers of the weights with the config.

transformers has hundreds of architectures with different tensor names, so only what nearly all of them have is
compared: the embedding, the head, and the numbers of the layers.
"""

from __future__ import annotations

import re

from hf_specdec.hub.formats.base import PLAIN, Config, Format, Headers, as_it_is

_TABLES = {
    "embedding": re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$"),
    "head": re.compile(r"^(lm_head|embed_out)\.weight$"),
}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_PREDICTION_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.eh_proj\.weight$")  # numbered behind the model's layers


def problems(fields: Config, stored: Headers) -> list[str]:
    """Differences between the weights and the config; sizes that the config does not have are not compared."""
    vocab = fields.get("vocab_size")
    hidden = fields.get("hidden_size", fields.get("n_embd"))
    layers = fields.get("num_hidden_layers", fields.get("n_layer"))
    found = []
    for what, pattern in _TABLES.items():
        for name in filter(pattern.search, stored):
            shape = stored[name].shape
            if type(vocab) is int and type(hidden) is int and shape != (vocab, hidden):
                found.append(f"{name}, the {what}, is {list(shape)}, but config.json makes it {[vocab, hidden]}")
    if not any(map(_TABLES["embedding"].search, stored)):
        found.append("missing weight: no token embedding among them")
    numbers = {int(match[1]) for match in map(_LAYER.search, stored) if match}
    if type(layers) is int:
        further = {int(match[1]) for match in map(_PREDICTION_LAYER.search, stored) if match}
        numbers -= {number for number in further if number >= layers}
    if type(layers) is int and numbers and numbers != set(range(layers)):
        found.append(f"the weights have layers {_ranges(numbers)}, but config.json has {layers} layers, from 0")
    padding = fields.get("pad_token_id")
    if type(padding) is int and type(vocab) is int and not -vocab <= padding < vocab:
        found.append(f"pad_token_id is {padding}, but config.json makes a vocabulary of {vocab}")
    return found


def _ranges(numbers: set[int]) -> str:
    """Numbers as ranges.

    Examples:
        >>> _ranges({0, 1, 2, 4})
        '0 to 2, 4'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join(" to ".join(map(str, part)) for part in parts)


def is_language_model(config: Config) -> bool:
    """Whether the class in a `config.json` has the name of a language model of transformers, or contains one."""
    names = config.get("architectures") or ()
    named = any(re.search(r"(ForCausalLM|LMHeadModel)$", name) for name in names)
    contains = "text_config" in config and any(name.endswith("ForConditionalGeneration") for name in names)
    return (named or contains) and "model_type" in config


LANGUAGE_MODEL = Format(
    "causal_lm",
    "causal_lm",
    as_it_is,
    problems=problems,
    recognises=is_language_model,
    rank=PLAIN,
    refused={
        "adapter_config.json": "a PEFT adapter, which is not loaded; merge it into its model with merge_and_unload()"
    },
)
