"""What the EAGLE-3 layouts have in common: tensor names, and what only the tensors tell.

Source: shared facts on formats, sections 3.2, 4 and 5. The layouts themselves are in `safeailab.py`, `specforge.py`,
`speculators.py` and `deepspec.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_specdec.hub.formats.base import (
    Config,
    Headers,
    Reading,
)
from hf_specdec.hub.formats.dflash import once

if TYPE_CHECKING:
    from torch import Tensor

# Rotary tables follow from the config; the verifier's own weights linger in some speculators files.
_LEFT_OUT = re.compile(r"rotary_emb\.inv_freq$|^verifier_lm_head\.weight$|^verifier_norm\.weight$|^t2d$")

# Of Qwen3 configs: EAGLE-3 layers look back without a limit.
_NOT_OURS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


def eagle3_reading(fields: Config, stored: Headers | None) -> Reading:
    """Completes the fields of an `Eagle3Config` by what the tensors tell, and names the tensors.

    Args:
        fields: of an `Eagle3Config`, as far as a config told; `draft_vocab_size` may be None.
        stored: headers of the weights, or None before they are there.
    """
    if stored is not None and "sliding_attention" in (fields.get("layer_types") or ()):
        warnings.warn(
            f"The draft layers have a sliding window of {fields.get('sliding_window')}, but EAGLE-3 drafters look back "
            "without a limit here: on longer texts fewer drafts may be accepted.",
            stacklevel=2,
        )
    fields = {name: value for name, value in fields.items() if name not in _NOT_OURS}
    if stored is None:
        # Drafters whose width is not the target's have embeddings of their own, others may.
        return Reading(fields | {"own_embeddings": True}, {})
    names = {}
    for name in stored:
        if not _LEFT_OUT.search(name):
            names[name] = re.sub(r"^midlayer\.", "layers.0.", name)
    ours = {new: stored[old] for old, new in names.items()}
    fields = fields | {
        "own_embeddings": "embed_tokens.weight" in ours,
        # Some configs say llama and have the norms of a qwen3 layer, or biases that no config names.
        "qk_norm": "layers.0.self_attn.q_norm.weight" in ours,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in ours,
        "norm_before_fc": fields.get("norm_before_fc", False) or "input_norm.weight" in ours,
        "fc_norm": fields.get("fc_norm", False) or "fc_norm.0.weight" in ours,
    }
    if fields.get("draft_vocab_size") is None and "lm_head.weight" in ours:
        fields["draft_vocab_size"] = ours["lm_head.weight"].shape[0]
    if fields.get("draft_vocab_size") == fields["vocab_size"]:
        names.pop("d2t", None)  # the constructor's default: an identity map
    return Reading(fields, names)


def peagle_reading(reading: Reading, fields: Config) -> Reading:
    """The same reading as that of a P-EAGLE drafter; a mask token that its config does not name is asked for later.

    Raises:
        ValueError: the mask token is said twice, with two values, or the proposal methods say no number of tokens.
    """
    own = {"mask_token_id": once(fields, fields.get("dflash_config") or {}, "mask_token_id")}
    methods: Any = (fields.get("speculators_config") or {}).get("proposal_methods")
    if methods:
        if not isinstance(methods, list) or not isinstance(methods[0], dict) or "speculative_tokens" not in methods[0]:
            raise ValueError(f"proposal_methods is {methods!r}; its first entry must say speculative_tokens.")
        own |= {"num_draft_tokens": methods[0]["speculative_tokens"]}
    return Reading(reading.fields | own, reading.names)


def check_vocabulary_maps(tensors: Mapping[str, Tensor], name: str) -> None:
    """Looks at the two vocabulary maps of a checkpoint.

    `d2t` holds offsets: target id = draft id + d2t[draft id]. `t2d` is True at the target ids so reached, in ascending
    order.

    Args:
        tensors: of the files, under their published names.
        name: what the user asked for.

    Raises:
        ValueError: the two maps contradict each other.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or (t2d is not None and t2d.numel() == d2t.numel()):
        return
    if not d2t.any():
        warnings.warn(
            f"The vocabulary map d2t of {name!r} is all zeros, so its {d2t.numel()} draft ids are read as the target's "
            "first ids. That is normally a map that was lost when the drafter was saved: expect few accepted drafts.",
            stacklevel=2,
        )
        return
    if t2d is None:
        return
    offsets, marked = d2t.tolist(), t2d.nonzero().flatten().tolist()
    if [index + offset for index, offset in enumerate(offsets)] != marked:
        absolute = offsets == marked
        why = "d2t holds target ids, where offsets (target id minus draft id) belong" if absolute else "they disagree"
        raise ValueError(
            f"The vocabulary maps d2t and t2d of {name!r} do not name the same target ids: {why}. Save the drafter "
            "again with the maps it was trained with."
        )
