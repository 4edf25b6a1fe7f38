"""What the EAGLE-3 layouts have in common: tensor names, and fields that follow from the tensors.

Source: shared facts on formats, sections 3.2, 4 and 5. The layouts are in `safeailab.py`, `specforge.py`,
`speculators.py` and `deepspec.py`.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from hf_specdec.hub.formats.base import LEFT_OUT, WINDOWS, Config, Headers, Reading, once


def eagle3_reading(fields: Config, stored: Headers | None) -> Reading:
    """Completes the fields of an `Eagle3Config` from the headers of the weights, and converts tensor names.

    Args:
        fields: the fields of an `Eagle3Config` that the config has; `draft_vocab_size` may be None.
        stored: headers of the weights, or None before the weights are downloaded.
    """
    if stored is not None and "sliding_attention" in (fields.get("layer_types") or ()):
        warnings.warn(
            f"The draft layers have a sliding window of {fields.get('sliding_window')}, but EAGLE-3 drafters have full "
            "attention here: on longer texts fewer drafts may be accepted.",
            stacklevel=2,
        )
    fields = {name: value for name, value in fields.items() if name not in WINDOWS}
    if stored is None:
        # Drafters with another hidden size than the target have their own embeddings; others may have them.
        return Reading(fields | {"own_embeddings": True}, {})
    names = {name: re.sub(r"^midlayer\.", "layers.0.", name) for name in stored if not LEFT_OUT.search(name)}
    ours = {new: stored[old] for old, new in names.items()}
    fields = fields | {
        "own_embeddings": "embed_tokens.weight" in ours,
        # Some checkpoints have the model type llama and the norms of a Qwen3 layer, or biases without a config field.
        "qk_norm": "layers.0.self_attn.q_norm.weight" in ours,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in ours,
        "norm_before_fc": fields.get("norm_before_fc", False) or "input_norm.weight" in ours,
        "fc_norm": fields.get("fc_norm", False) or "fc_norm.0.weight" in ours,
    }
    if fields.get("draft_vocab_size") is None and "lm_head.weight" in ours:
        fields["draft_vocab_size"] = ours["lm_head.weight"].shape[0]
    if fields.get("draft_vocab_size") == fields["vocab_size"]:
        names.pop("d2t", None)  # the identity map, which the constructor makes
    return Reading(fields, names)


def peagle_reading(reading: Reading, fields: Config) -> Reading:
    """Adds the fields of a P-EAGLE drafter; `PEagleConfig` checks for a missing mask token.

    Raises:
        ValueError: the mask token is in two places, with different values, or the first proposal method has no
            `speculative_tokens`.
    """
    own = {"mask_token_id": once(fields, fields.get("dflash_config") or {}, "mask_token_id")}
    methods: Any = (fields.get("speculators_config") or {}).get("proposal_methods")
    if methods:
        if not isinstance(methods, list) or not isinstance(methods[0], dict) or "speculative_tokens" not in methods[0]:
            raise ValueError(f"proposal_methods is {methods!r}; its first entry must have speculative_tokens.")
        own |= {"num_draft_tokens": methods[0]["speculative_tokens"]}
    return Reading(reading.fields | own, reading.names)
