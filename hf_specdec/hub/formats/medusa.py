"""Medusa heads as FasterDecoding publishes them: a minimal config, and heads in a pickle or in safetensors.

Tensors are `{head}.{layer}.linear.weight` and `.bias`, and `{head}.{layers}.weight`, with or without the prefix
`medusa_head.`. Published configs give fewer heads than are stored, so the number of heads is that of the tensors.
Source: shared facts on formats, section 6; FasterDecoding/Medusa.
"""

from __future__ import annotations

import re
import warnings

from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, Unsupported
from hf_specdec.hub.formats.keys import decoder

_NAME = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)$")


def read(fields: Config, stored: Headers | None) -> Reading | None:
    """Converts fields and tensor names of Medusa-1 heads; None before the headers of the weights are known."""
    if stored is None:
        return None  # the config has neither the hidden size nor the vocabulary size, and a wrong number of heads
    own_model = any(name.startswith("model.") for name in stored)
    if own_model:
        warnings.warn(
            "The weights hold a whole language model and Medusa heads that were trained with it (Medusa-2). The heads "
            "are loaded; they fit only that model, so load the target from the same checkpoint: "
            "AutoModelForCausalLM.from_pretrained(...), which leaves the heads out.",
            stacklevel=2,
        )
        stored = {name: tensor for name, tensor in stored.items() if name.startswith("medusa_head.")}
    names: dict[str, str] = {}
    heads: set[int] = set()
    layers = 0
    hidden_size, vocab_size = fields.get("hidden_size"), fields.get("vocab_size")
    own_head = False
    for name, tensor in stored.items():
        match = _NAME.match(name)
        if match is None:
            names[name] = name
            continue
        head, layer, kind = int(match[1]), int(match[2]), match[3]
        heads.add(head)
        if kind == "weight":
            own_head, (vocab_size, hidden_size) = True, tensor.shape
            names[name] = f"heads.{head}.lm_head.weight"
        else:
            layers = max(layers, layer + 1)
            hidden_size = tensor.shape[0]
            names[name] = f"heads.{head}.blocks.{layer}.{kind}"
    if heads != set(range(len(heads))) or layers > len(stored):
        raise ValueError(f"The stored heads have the numbers {sorted(heads)[:8]}, with gaps: the file is incomplete.")
    ours = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": layers,
        "own_head": own_head,
        # The base of Medusa-2 is the model that was trained further, not the target.
        "target_name_or_path": None if own_model else fields.get("base_model_name_or_path"),
    }
    return Reading(ours, names)


MEDUSA = Format(
    "Medusa",
    "medusa",
    read,
    # Medusa-2 has the config of a decoder.
    decoder("base_model_name_or_path", "medusa_num_heads", "medusa_num_layers"),
    other_weights=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    recognises=lambda config: "medusa_num_heads" in config,
    recognises_names=lambda names: any(re.match(r"medusa_head\.|\d+\.0\.linear\.weight$", name) for name in names),
)
OF_VLLM = Unsupported(
    "Medusa (vLLM)",
    "a reader for vLLM's names of Medusa heads",
    lambda config: str(config.get("model_type")).endswith("medusa"),
)
