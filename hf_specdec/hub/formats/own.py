"""Layouts of this library, for families whose published layouts do not have a field for everything.

Such a config has the `model_type` "hf_specdec_" and the family's name.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from hf_specdec.hub.files import CONFIG_FILE
from hf_specdec.hub.formats.base import Config, Format, Shapes, as_it_is
from hf_specdec.hub.formats.gemma4_assistant import GEMMA4_ROPES
from hf_specdec.hub.formats.keys import HOST, OURS, Section, decoder

PREFIX = "hf_specdec_"
_DRAFTERS = Path(__file__).parents[2] / "drafters"  # a file or folder for each family


def specbound_files(fields: Config) -> dict[str, Shapes]:
    """SpecBound's further files: a LoRA adapter of the target's head for each exit layer."""
    if fields.get("head", "lora") != "lora":
        return {}
    rank = fields.get("lora_rank", 64)
    parts: Shapes = {
        ".lora_A.weight": (rank, fields["hidden_size"]),
        ".lora_B.weight": (fields["vocab_size"], rank),
    }
    return {f"exit-layer-{layer:02d}/adapter_model.safetensors": parts for layer in fields["exit_layers"]}


def missing_draft_model(fields: Config, folder: Path | None) -> list[str]:
    """Problems with the draft model that a SpecBranch config names; a Hub id is not requested."""
    place = fields.get("draft_model")
    if not isinstance(place, str):
        return [f"{CONFIG_FILE} names no draft model: draft_model is {place!r}"]
    relative, absolute = place.startswith("."), Path(place).is_absolute()
    if folder is None:
        found = not relative and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place) is not None
    else:
        elsewhere = not relative and not absolute and place != "draft_model"
        found = elsewhere or (folder / place).resolve().is_dir()
    return [] if found else [f"the draft model {place!r}, relative to the checkpoint, does not exist"]


# For each family, the fields that its config class adds to those of transformers.
_EAGLE3 = (
    "draft_vocab_size", "fc_norm", "norm_before_fc", "norm_before_head", "norm_before_residual", "norm_output",
    "own_embeddings", "qk_norm", "target_hidden_size", "target_layer_ids", *OURS,
)  # fmt: skip
_KEYS = {
    "eagle3": decoder(*_EAGLE3),
    "peagle": decoder("mask_token_id", "num_draft_tokens", *_EAGLE3),
    "gemma4_assistant": Section(
        OURS.union((
            "attention_bias", "backbone_hidden_size", "centroid_intermediate_top_k", "final_logit_softcapping",
            "global_head_dim", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
            "num_attention_heads", "num_centroids", "num_global_key_value_heads", "num_hidden_layers",
            "num_key_value_heads", "rms_norm_eps", "sliding_window", "target_model_type", "vocab_size",
        )),
        HOST,
        nested={"rope_parameters": GEMMA4_ROPES},
    ),
    "medusa": Section(
        OURS.union(("hidden_size", "medusa_num_heads", "medusa_num_layers", "own_head", "vocab_size")), HOST
    ),
    "specbound": Section(
        OURS.union((
            "alpha", "calibration", "d_max", "draft_vocab_size", "exit_layers", "head", "head_module", "hidden_size",
            "learn_refusals", "lora_rank", "num_target_layers", "target_head_sample", "threshold", "use_exit_layers",
            "vocab_size", "w_max",
        )),
        HOST,
    ),
    "specbranch": Section(
        OURS.union((
            "draft_hidden_size", "draft_model", "draft_num_layers", "dropout", "h_rad", "h_rad_sizes",
            "min_confidence", "num_feature_layers", "num_target_layers", "target_hidden_size",
        )),
        HOST,
    ),
}  # fmt: skip


def own_format(config: Config, name: str) -> Format | None:
    """The layout of this library that a `config.json` has; None for any other layout.

    Args:
        config: the `config.json`.
        name: the name of the drafter, for messages.

    Raises:
        ValueError: its family is unknown.
    """
    model_type = str(config.get("model_type"))
    if not model_type.startswith(PREFIX):
        return None
    family = model_type.removeprefix(PREFIX)
    sources = (file.read_text(encoding="utf-8") for file in _DRAFTERS.rglob("*.py"))  # the registry would need torch
    known = sorted(name for text in sources for name in re.findall(r'^register_family\("(\w+)"', text, re.MULTILINE))
    if family not in known:
        nearest = difflib.get_close_matches(family, known, n=1)
        raise ValueError(
            f"{name!r} has model_type {model_type!r}, but there is no family {family!r}."
            f"{f' Did you mean {nearest[0]!r}?' if nearest else ''} Known: {', '.join(known)}. If it was saved by "
            "another version of hf_specdec, update hf_specdec."
        )
    files = specbound_files if family == "specbound" else lambda fields: {}
    missing = missing_draft_model if family == "specbranch" else lambda fields, folder: []
    return Format(family, family, as_it_is, _KEYS.get(family), own_files=files, missing=missing)
