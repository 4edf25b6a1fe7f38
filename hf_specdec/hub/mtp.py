"""The multi-token-prediction layer of a target, from the target's own files: transformers leaves its tensors out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.hub.files import Source
from hf_specdec.hub.target_files import dequantised, locate_target
from hf_specdec.methods.mtp import LOOKED_FOR, MTPDrafter, check_supported, find_layout
from hf_specdec.unsafe_keys import listed

MTP = "mtp"
# Keys of a target's config that count its layers for this.
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")


def load_mtp(target: PreTrainedModel | None, source: Source, **drafting_options: Any) -> MTPDrafter | None:
    """Makes the drafter that lies in the target's checkpoint, where "mtp", or the target's own name, asks for it.

    Args:
        target: the loaded target.
        source: what was asked for, with the settings of downloads.
        drafting_options: of `MTPOptions`.

    Returns:
        None where something else is meant: another name, or a target as its own draft model, without such a layer.

    Raises:
        ValueError: there is no target; its checkpoint has no such layer, or one that is damaged or not supported.
        OSError: its files cannot be read or downloaded.
    """
    asked = source.name == MTP and not Path(MTP).is_dir()
    if not asked and (target is None or not source.name or source.name != target.name_or_path):
        return None
    if target is None:
        raise ValueError(
            "The drafter 'mtp' is the multi-token-prediction layer in a target's own checkpoint: pass the loaded "
            "model, load_drafter('mtp', target)."
        )
    if not target.name_or_path:
        raise ValueError(
            "The target has no name_or_path, so the checkpoint with its multi-token-prediction layer is unknown: load "
            "it with from_pretrained."
        )
    files = locate_target(replace(source, name=target.name_or_path), getattr(target.config, "_commit_hash", None))
    config = target.config.get_text_config(decoder=True)
    layout = find_layout(files.shards, config.num_hidden_layers, config.model_type)
    if layout is None:
        if not asked:
            return None
        raise ValueError(_nothing_found(target, files.shards))
    check_supported(target, layout)
    wanted = [name for name in files.shards if layout.part_of(name) is not None]
    tensors = dequantised(files.load(wanted), files.config, target.dtype, target.name_or_path)
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(
            f"The multi-token-prediction layer of {target.name_or_path!r} has NaN or infinite numbers in "
            f"{listed(broken)}: the checkpoint is damaged. Download it again, or use another drafter."
        )
    return MTPDrafter(target, layout, tensors, **drafting_options)


def layer_note(names: Collection[str], fields: dict[str, Any]) -> str | None:
    """What `inspect_drafter` says about the layer in a checkpoint with these tensors and this config; None if none."""
    how = f"load_drafter({MTP!r}, target)"
    nested = fields.get("text_config")
    text = fields | (nested if isinstance(nested, dict) else {})
    layout = find_layout(names, text.get("num_hidden_layers", 0), str(text.get("model_type")))
    if layout is None:
        return None
    place = f"It holds a multi-token-prediction layer at {layout.projection}"
    if layout.needs is not None:
        return f"{place}, which {how} does not support: the layer needs {layout.needs}."
    return f"{place}: as a target it drafts for itself, with {how}."


def _nothing_found(target: PreTrainedModel, names: Any) -> str:
    config = target.config.get_text_config(decoder=True)
    said = {key: getattr(config, key) for key in COUNTS if getattr(config, key, None)}
    near = [name for name in names if "mtp" in name]
    hint = f" Its config says {said}." if said else ""
    if near:
        hint += f" {near[0]} and {len(near) - 1} more are of a layout that is not supported."
    return (
        f"The checkpoint of target {target.name_or_path!r} has no multi-token-prediction layer that is known here: "
        f"looked for {', '.join(LOOKED_FOR)} among its {len(names)} tensors.{hint} Use another drafter for it."
    )
