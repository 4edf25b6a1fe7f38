"""export_drafter: a drafter in the layout that another engine serves. What each layout says is in `formats/`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors.torch import save_file

import hf_specdec.drafters  # noqa: F401 (registers the families)
from hf_specdec.drafters.base import Drafter, check_is_drafter
from hf_specdec.drafters.card import is_hub_id
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.dspark import DSparkDrafter
from hf_specdec.drafters.eagle3 import Eagle3Drafter
from hf_specdec.drafters.peagle import PEagleDrafter
from hf_specdec.drafters.registry import FAMILIES, WEIGHTLESS, unknown_name
from hf_specdec.hub.files import CONFIG_FILE, WEIGHTS_FILE, read_json
from hf_specdec.hub.formats.speculators import write_dflash, write_dspark, write_eagle3, write_peagle

Engine = Literal["vllm"]
# Why the others are not served elsewhere.
_NOT_SERVED = {
    "specblock": "no engine but the authors' own fork of SGLang knows SpecBlock",
    "medusa": "vLLM serves Medusa heads as they were published (method medusa in --speculative-config)",
    "causal_lm": "a plain language model is served as it is (method draft_model in --speculative-config)",
    "specbound": "SpecBound changes how the target itself runs, and vLLM has no class for that",
    "specbranch": "SpecBranch drafts while the target runs, and vLLM has no class for that; its draft model is served "
    "as it is (method draft_model)",
    "MergedDrafter": "vLLM runs one drafter at a time; export the sources that it knows",
    "suffix": "vLLM has its own (method suffix in --speculative-config)",
    "ngram": "vLLM has its own (method ngram in --speculative-config)",
}


def export_drafter(
    drafter: Drafter,
    folder: str | os.PathLike[str],
    *,
    to: Engine = "vllm",
    target_id: str | None = None,
    target_architecture: str | None = None,
    num_target_layers: int | None = None,
) -> Path:
    """Writes a drafter so that another engine serves it: `vllm serve <folder or repo>` brings the target itself.

    EAGLE-3, DFlash and DSpark drafters are written in the speculators layout; `load_drafter` reads it, too.

    Args:
        drafter: as `load_drafter` gives it.
        folder: where to; made if needed. It may hold an earlier export, which is overwritten. Upload it with
            `hf upload`.
        to: the engine.
        target_id: the target, which the engine loads: a Hub id, or the path of a folder, which is written in full and
            must be the same where the engine runs (a warning says so). None for the one that the drafter names.
        target_architecture: class of the target, such as "LlamaForCausalLM"; engines only report it.
        num_target_layers: layers of the target; needed where the drafter reads EAGLE-3's default layers, and elsewhere
            to refuse layers that engines read differently.

    Returns:
        The folder.

    Raises:
        ValueError: the engine cannot serve such a drafter, the target has no Hub id and no path, the layout cannot say
            what the drafter does, or the folder holds another checkpoint; the message says which, and nothing is
            written.
        TypeError: `drafter` is no drafter.
    """
    check_is_drafter(drafter)
    if to not in get_args(Engine):
        raise unknown_name("engine", to, get_args(Engine))
    if num_target_layers is not None and num_target_layers < 1:
        raise ValueError(f"num_target_layers={num_target_layers} must be at least 1.")
    name = getattr(drafter, "name_or_path", "") or type(drafter).__name__
    write: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    if isinstance(drafter, Eagle3Drafter):
        write, fields = write_eagle3, drafter.config.to_dict()
    elif isinstance(drafter, PEagleDrafter):
        write, fields = write_peagle, drafter.config.to_dict()
    elif isinstance(drafter, DSparkDrafter):
        write, fields = write_dspark, _dflash_fields(drafter)
    elif isinstance(drafter, DFlashDrafter):
        write, fields = write_dflash, _dflash_fields(drafter)
    else:
        family = _family(drafter)
        why = _NOT_SERVED.get(family, f"vLLM has no drafters of the kind {family!r}")
        raise ValueError(
            f"{name!r} cannot be exported to {to}: {why}. EAGLE-3, P-EAGLE, DFlash and DSpark drafters can."
        )
    target_id = drafter.config.target_name_or_path if target_id is None else target_id
    place = _target_place(target_id)
    if place is None:
        raise ValueError(
            f"{name!r} names {target_id!r} as its target, but {to} loads the target by its Hub id, of the form "
            "'owner/name', or by the path of its folder, and there is no folder of that path here: name it (target_id, "
            "or --target-id of the command)."
        )
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in drafter.state_dict().items()}
    fields["torch_dtype"] = str(drafter.dtype).removeprefix("torch.")
    if num_target_layers is None:
        num_target_layers = getattr(drafter.config, "num_target_layers", None)
    target = {
        "id": place,
        "architectures": [target_architecture] if target_architecture else [],
        "num_layers": num_target_layers,
    }
    try:
        config = write(fields, target)
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be exported to {to}: {error}") from error
    folder = Path(folder)
    in_the_way = _in_the_way(folder)
    if in_the_way:
        raise ValueError(
            f"{str(folder)!r} already holds {', '.join(in_the_way)}: a drafter would be overwritten, or {to} would "
            "load more than the export. Clear it, or give another folder."
        )
    if Path(place).is_absolute():
        warnings.warn(
            f"The export names its target by the folder {place!r}: the target has to be there on the machine that "
            f"serves, or {to} does not find it. Where others are to serve the export, name the target's Hub id "
            "(target_id, or --target-id of the command).",
            stacklevel=2,
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def _target_place(target_id: str | None) -> str | None:
    """What an engine finds the target by, a Hub id or the full path of a folder; None where it is neither.

    A path in full may be one of another machine; any other is seen from here.
    """
    if target_id is None or (is_hub_id(target_id) and not target_id.startswith((".", "~"))):
        return target_id
    path = Path(target_id).expanduser()
    return str(path.resolve()) if path.is_dir() else target_id if path.is_absolute() else None


def _family(drafter: Drafter) -> str:
    """What kind of drafter it is, also where a user derived its class; the class's name where it is of no kind here."""
    kinds = {family.name: family.drafter for family in FAMILIES.values()}
    kinds |= {name: make for name, make in WEIGHTLESS.items() if isinstance(make, type)}
    return next((name for name, kind in kinds.items() if isinstance(drafter, kind)), type(drafter).__name__)


def _in_the_way(folder: Path) -> list[str]:
    """Files of a checkpoint that is no earlier export; engines load every weights file that they find in a repo."""
    earlier = False
    if (folder / CONFIG_FILE).is_file():
        earlier = "speculators_config" in read_json(folder / CONFIG_FILE, str(folder))
    ours = {CONFIG_FILE, WEIGHTS_FILE} if earlier else set()
    kinds = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json", ".py", CONFIG_FILE)
    found = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    return [name for name in found if name.endswith(kinds) and name not in ours]


def _dflash_fields(drafter: DFlashDrafter) -> dict[str, Any]:
    """The config, with what follows from several of its fields spelled out layer by layer."""
    config = drafter.config
    layers = range(config.num_hidden_layers)
    return config.to_dict() | {
        "block_size": config.block_size,
        "target_layer_ids": config.target_layer_ids,
        "windows": [config.window(layer) for layer in layers],
        "causal": [config.block_is_causal(layer) for layer in layers],
    }
