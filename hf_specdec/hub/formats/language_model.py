"""Plain language models: whether the headers of the weights are those of the config.

transformers knows hundreds of architectures, each with names of its own, so only what nearly all of them share is
compared: the embedding, the head, the number of layers, and that every layer is there.
"""

from __future__ import annotations

import re

from hf_specdec.hub.formats.base import Config, Format, Headers, as_it_is

_TABLES = {
    "embedding": re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$"),
    "head": re.compile(r"^(lm_head|embed_out)\.weight$"),
}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_PREDICTION_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.eh_proj\.weight$")  # numbered behind the model's layers


def problems(fields: Config, stored: Headers) -> list[str]:
    """What in the weights is not what the config says; sizes that a config does not name are not compared."""
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
        found.append(f"the weights have layers {_ranges(numbers)}, but config.json says there are {layers}, from 0")
    padding = fields.get("pad_token_id")
    if type(padding) is int and type(vocab) is int and not -vocab <= padding < vocab:
        found.append(f"pad_token_id is {padding}, but config.json makes a vocabulary of {vocab}")
    return found


def _ranges(numbers: set[int]) -> str:
    """Numbers in words.

    Example:
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


LANGUAGE_MODEL = Format(
    "causal_lm",
    "causal_lm",
    as_it_is,
    problems=problems,
    refused={
        "adapter_config.json": "an adapter of PEFT, which is not loaded; merge_and_unload() makes one model of the two"
    },
)
