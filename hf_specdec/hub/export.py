"""export_drafter: a drafter in the layout that another engine serves. What each layout says is in `formats/`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors.torch import save_file
from torch import Tensor

import hf_specdec.drafters  # noqa: F401 (registers the families)
from hf_specdec.drafters.base import Drafter, check_is_drafter
from hf_specdec.drafters.card import is_hub_id
from hf_specdec.drafters.causal_lm import CausalLMDrafter
from hf_specdec.drafters.causal_lm.draft_model import with_whole_vocabulary
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.dflash2 import DFlash2Drafter
from hf_specdec.drafters.dspark import DSparkDrafter
from hf_specdec.drafters.eagle3 import Eagle3Drafter
from hf_specdec.drafters.peagle import PEagleDrafter
from hf_specdec.drafters.registry import FAMILIES, WEIGHTLESS, unknown_name
from hf_specdec.hub.files import CONFIG_FILE, WEIGHTS_FILE, Source, read_json
from hf_specdec.hub.formats.speculators import write_dflash, write_dflash2, write_dspark, write_eagle3, write_peagle
from hf_specdec.hub.target_files import locate_config, locate_target

Engine = Literal["vllm"]
_EXPORT_MARK = "hf_specdec_export"  # in the config of an exported draft model
# Why the others are not served elsewhere.
_NOT_SERVED = {
    "specblock": "no engine but the authors' own fork of SGLang knows SpecBlock",
    "medusa": "vLLM serves Medusa heads as they were published (method medusa in --speculative-config)",
    "gemma4_assistant": "vLLM serves Gemma 4 assistants as they were published (method mtp in --speculative-config)",
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

    EAGLE-3, P-EAGLE, DFlash, DFlash 2 and DSpark drafters are written in the speculators layout, which `load_drafter`
    reads too.
    One that drafts a part of the vocabulary with rows of its target's head gets these rows, from the target's files. A
    draft model that was cut to a draft vocabulary gets a row for each of the target's tokens.

    Args:
        drafter: as `load_drafter` gives it.
        folder: where to; made if needed. It may hold an earlier export, which is overwritten. Upload it with
            `hf upload`.
        to: the engine.
        target_id: the target, which the engine loads: a Hub id, or the path of a folder, which is written in full and
            must be the same where the engine runs (a warning says so). None for the one that the drafter names.
        target_architecture: class of the target, such as "LlamaForCausalLM"; engines only report it. None for what the
            config in the target's folder says, where that is here.
        num_target_layers: layers of the target; needed where the drafter reads EAGLE-3's default layers, and elsewhere
            to refuse layers that engines read differently. None for the drafter's own record or the target's folder.

    Returns:
        The folder.

    Raises:
        ValueError: the engine cannot serve such a drafter, the target has no Hub id and no path, the layout cannot say
            what the drafter does, or the folder holds another checkpoint; the message says which, and nothing is
            written.
        OSError: the target's files are needed, as for a draft vocabulary, and cannot be had.
        TypeError: `drafter` is no drafter.
    """
    check_is_drafter(drafter)
    if to not in get_args(Engine):
        raise unknown_name("engine", to, get_args(Engine))
    if num_target_layers is not None and num_target_layers < 1:
        raise ValueError(f"num_target_layers={num_target_layers} must be at least 1.")
    name = getattr(drafter, "name_or_path", "") or type(drafter).__name__
    if isinstance(drafter, CausalLMDrafter):
        return _export_draft_model(drafter, name, Path(folder), target_id)
    write: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    if isinstance(drafter, Eagle3Drafter):
        write, fields = write_eagle3, drafter.config.to_dict()
    elif isinstance(drafter, PEagleDrafter):
        write, fields = write_peagle, drafter.config.to_dict()
    elif isinstance(drafter, DSparkDrafter):
        write, fields = write_dspark, _dflash_fields(drafter)
    elif isinstance(drafter, DFlash2Drafter):
        write, fields = write_dflash2, _dflash_fields(drafter)
    elif isinstance(drafter, DFlashDrafter):
        write, fields = write_dflash, _dflash_fields(drafter)
    else:
        raise ValueError(
            f"{name!r} cannot be exported to {to}: {why_not_served(drafter)}. EAGLE-3, P-EAGLE, DFlash, DFlash 2 and "
            "DSpark drafters can, and draft models that were cut to a draft vocabulary."
        )
    place = _target_place(name, drafter.config.target_name_or_path if target_id is None else target_id, to)
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in drafter.state_dict().items()}
    if isinstance(drafter, DFlashDrafter) and drafter.config.maps_vocabulary and not drafter.config.own_head:
        # vLLM would apply the whole of the target's head and take its first rows for those of the draft vocabulary.
        tensors["lm_head.weight"] = _head_rows(place, drafter)
    fields["torch_dtype"] = str(drafter.dtype).removeprefix("torch.")
    known = _target_config(place)
    if num_target_layers is None:
        num_target_layers = getattr(drafter.config, "num_target_layers", None) or known.get("num_hidden_layers")
    target = {
        "id": place,
        "architectures": [target_architecture] if target_architecture else known.get("architectures") or [],
        "num_layers": num_target_layers,
    }
    try:
        config = write(fields, target)
    except ValueError as error:
        raise ValueError(f"{name!r} cannot be exported to {to}: {error}") from error
    folder = Path(folder)
    _check_free(folder, to)
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


def why_not_served(drafter: Drafter) -> str:
    """Why vLLM does not run a drafter of this kind from an export; a part of a sentence."""
    family = _family(drafter)
    return _NOT_SERVED.get(family, f"vLLM has no drafters of the kind {family!r}")


def _export_draft_model(drafter: CausalLMDrafter, name: str, folder: Path, target_id: str | None) -> Path:
    """Writes a draft model that was cut to a draft vocabulary with a row for each of the target's tokens."""
    if drafter.target_ids is None:
        raise ValueError(f"{name!r} needs no export: {why_not_served(drafter)}.")
    place = _target_place(name, drafter.target_name_or_path if target_id is None else target_id, "vllm")
    try:
        config = locate_config(Source(place))
    except (OSError, ValueError) as error:
        raise type(error)(
            f"{name!r} drafts {len(drafter.target_ids)} of its target's tokens, and gets a row for each other one; how "
            f"many there are is in the config of its target {place!r}, which cannot be read: {error}"
        ) from error
    vocab_size = _language_model(config).get("vocab_size", 0)
    if vocab_size <= int(drafter.target_ids[-1]):
        raise ValueError(
            f"{name!r} drafts the token {int(drafter.target_ids[-1])}, and its target {place!r} has {vocab_size}: name "
            "the target that it was made for (target_id, or --target-id of the command)."
        )
    _check_free(folder, "vllm")
    model = with_whole_vocabulary(drafter.model, vocab_size)
    setattr(model.config, _EXPORT_MARK, "vllm")
    model.save_pretrained(folder, max_shard_size="1TB")
    return folder


def _target_place(name: str, target_id: str | None, to: str) -> str:
    """What an engine finds the target by, a Hub id or the full path of a folder.

    A path in full may be one of another machine; any other is seen from here.

    Raises:
        ValueError: it is neither.
    """
    if target_id is not None:
        if is_hub_id(target_id) and not target_id.startswith((".", "~")):
            return target_id
        path = Path(target_id).expanduser()
        if path.is_dir():
            return str(path.resolve())
        if path.is_absolute():
            return target_id
    raise ValueError(
        f"{name!r} names {target_id!r} as its target, but {to} loads the target by its Hub id, of the form "
        "'owner/name', or by the path of its folder, and there is no folder of that path here: name it (target_id, "
        "or --target-id of the command)."
    )


def _target_config(target: str) -> dict[str, Any]:
    """What the config in a target's folder says of the language model; empty where there is no folder."""
    file = Path(target) / CONFIG_FILE
    return _language_model(read_json(file, target)) if file.is_file() else {}


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config.get("text_config") or {}) | config


def _check_free(folder: Path, to: str) -> None:
    """Raises ValueError if files of another checkpoint are in the way."""
    if in_the_way := _in_the_way(folder):
        raise ValueError(
            f"{str(folder)!r} already holds {', '.join(in_the_way)}: a drafter would be overwritten, or {to} would "
            "load more than the export. Clear it, or give another folder."
        )


def _head_rows(target: str, drafter: DFlashDrafter) -> Tensor:
    """[draft_vocab, hidden]: the rows of the target's head that the drafter reads, from the target's own files."""
    name = drafter.config.name_or_path or type(drafter).__name__
    why = (
        f"{name!r} drafts {drafter.config.draft_vocab_size} of {drafter.config.vocab_size} tokens with rows of the "
        f"head of its target {target!r}, which engines want beside it"
    )
    try:
        files = locate_target(Source(target))
    except (OSError, ValueError) as error:
        raise type(error)(f"{why}, and the target's files cannot be read: {error}") from error
    # A checkpoint whose head is its embeddings has no tensor of the head's name.
    found = [
        [key for key in files.shards if key == table or key.endswith(f".{table}")]
        for table in ("lm_head.weight", "embed_tokens.weight")
    ]
    heads = found[0] or found[1]
    if len(heads) != 1:
        raise ValueError(f"{why}, and among the {len(files.shards)} tensors of the target there is no head: {heads}.")
    head = files.load(heads)[heads[0]]
    shape = (drafter.config.vocab_size or 0, drafter.config.hidden_size)
    if not head.is_floating_point() or head.shape[1:] != shape[1:] or head.shape[0] < shape[0]:
        raise ValueError(
            f"{why}, and {heads[0]} is {list(head.shape)} {head.dtype}, not {list(shape)}: another target?"
        )
    return head[drafter.target_ids.cpu()].contiguous()


def _family(drafter: Drafter) -> str:
    """What kind of drafter it is, also where a user derived its class; the class's name where it is of no kind here."""
    kinds = {family.name: family.drafter for family in FAMILIES.values()}
    kinds |= {name: make for name, make in WEIGHTLESS.items() if isinstance(make, type)}
    return next((name for name, kind in kinds.items() if isinstance(drafter, kind)), type(drafter).__name__)


def _in_the_way(folder: Path) -> list[str]:
    """Files of a checkpoint that is no earlier export; engines load every weights file that they find in a repo."""
    earlier = False
    if (folder / CONFIG_FILE).is_file():
        fields = read_json(folder / CONFIG_FILE, str(folder))
        earlier = "speculators_config" in fields or _EXPORT_MARK in fields
    ours = {CONFIG_FILE, WEIGHTS_FILE, "generation_config.json"} if earlier else set()
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
