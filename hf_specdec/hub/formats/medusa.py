"""Medusa-1 heads as FasterDecoding publishes them: a bare config, and heads in a pickle or in safetensors.

Tensors are `{head}.{layer}.linear.weight` and `.bias` and then `{head}.{layers}.weight`, with or without a prefix
`medusa_head.`. Uploaded configs name fewer heads than are stored, so the tensors are counted. Source: shared facts on
formats, section 6; FasterDecoding/Medusa.
"""

from __future__ import annotations

import re

from hf_specdec.hub.formats.base import Config, Format, Headers, Reading
from hf_specdec.hub.formats.keys import decoder

_NAME = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)$")


def read(fields: Config, stored: Headers | None) -> Reading | None:
    """Our fields and tensor names for Medusa-1 heads; None before the headers of the weights are known."""
    if stored is None:
        return None  # neither width nor vocabulary nor the true number of heads is in the config
    if any(name.startswith("model.") for name in stored):
        raise ValueError(
            "It holds a whole language model beside its Medusa heads (Medusa-2), and the heads fit that model alone. "
            "Medusa-1 heads, which leave their target as it is, can be loaded."
        )
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
        raise ValueError(f"The stored heads are numbered {sorted(heads)[:8]}, with gaps: the file is not whole.")
    ours = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": layers,
        "own_head": own_head,
        "target_name_or_path": fields.get("base_model_name_or_path"),
    }
    return Reading(ours, names)


MEDUSA = Format(
    "Medusa",
    "medusa",
    read,
    # A whole model beside its heads, refused by its tensors, has a decoder's config.
    decoder("base_model_name_or_path", "medusa_num_heads", "medusa_num_layers"),
    other_weights=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
)
