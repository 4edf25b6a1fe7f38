"""The speculators layout of vllm-project: an envelope around a nested layer config, here for EAGLE-3 and DFlash.

Its layer ids are indices of `output_hidden_states`, one more than ours. The nested config leaves out what is at the
defaults of the class it names. Source: shared facts on formats, sections 3.1, 3.2 and 3.4; vllm-project/speculators.
"""

from __future__ import annotations

from typing import Any

from hf_specdec.hub.formats.base import Config, Format, Headers, Reading, decoder_shape, layer_list
from hf_specdec.hub.formats.dflash import dflash_reading, dflash_shapes
from hf_specdec.hub.formats.eagle3 import check_vocabulary_maps, eagle3_reading, eagle3_shapes


def speculators_type(fields: Config) -> str | None:
    """Which kind of drafter is in the envelope; None where there is no envelope."""
    if "speculators_model_type" not in fields and "speculators_config" not in fields:
        return None
    return (
        fields.get("speculators_model_type") or (fields.get("speculators_config") or {}).get("algorithm") or "unknown"
    )


def _common(fields: Config) -> Config:
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"transformer_layer_config is {layer!r}; it must be the config of the draft layers.")
    verifier: Any = (fields.get("speculators_config") or {}).get("verifier") or {}
    return decoder_shape(layer) | {
        "draft_vocab_size": fields.get("draft_vocab_size", 32000),
        "target_name_or_path": verifier.get("name_or_path"),
    }


def _taps(fields: Config, key: str) -> list[int] | None:
    """The target layers whose outputs are read: what enters layer L is what leaves layer L - 1."""
    states = layer_list(fields, key)
    return None if states is None else [index - 1 for index in states]


def read_eagle3(fields: Config, stored: Headers | None) -> Reading:
    """Our fields and tensor names for an EAGLE-3 drafter in the speculators layout."""
    # Every default here is the training class's; vLLM takes a missing norm_before_residual for true.
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    ours = _common(fields) | {flag: bool(fields.get(flag, False)) for flag in flags}
    ours |= {
        "target_layer_ids": _taps(fields, "eagle_aux_hidden_state_layer_ids"),
        "target_hidden_size": fields.get("target_hidden_size"),
    }
    return eagle3_reading(ours, stored)


def read_dflash(fields: Config, stored: Headers | None) -> Reading:
    """Our fields and tensor names for a DFlash drafter in the speculators layout."""
    ours = _common(fields)
    taps = _taps(fields, "aux_hidden_state_layer_ids")
    if taps is None:
        raise ValueError(
            "aux_hidden_state_layer_ids is missing, so the target layers that the drafter reads are unknown; add them "
            "(indices of output_hidden_states) to its config.json."
        )
    if fields.get("target_hidden_size") not in (None, ours["hidden_size"]):
        raise ValueError(
            f"target_hidden_size is {fields['target_hidden_size']!r} and hidden_size {ours['hidden_size']!r}: DFlash "
            "drafters of another width than their target are not supported."
        )
    if fields.get("sliding_window_non_causal"):
        ours["is_causal"] = False  # otherwise sliding layers are causal inside the block, and full layers are not
    block = {
        "block_size": fields.get("block_size", 8),
        "mask_token_id": fields.get("mask_token_id"),
        "target_layer_ids": taps,
        "sample_from_anchor": bool(fields.get("sample_from_anchor", False)),
    }
    return dflash_reading(ours, block, stored)


SPECULATORS = {
    "eagle3": Format("EAGLE-3 (speculators)", "eagle3", read_eagle3, check=check_vocabulary_maps, shapes=eagle3_shapes),
    "dflash": Format("DFlash (speculators)", "dflash", read_dflash, check=check_vocabulary_maps, shapes=dflash_shapes),
}
