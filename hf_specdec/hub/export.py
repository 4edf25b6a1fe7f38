"""export_drafter: writes a drafter in the layout that vLLM serves, or in the layout that it was loaded from.

The fields of vLLM's layout are in `formats/speculators.py`; `source_layout.py` has the tensors of the source layout.
"""

from __future__ import annotations

import filecmp
import json
import os
import warnings
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor
from transformers.utils import GENERATION_CONFIG_NAME

import hf_specdec.methods  # noqa: F401 (registers the families)
from hf_specdec.drafting.drafter import Drafter, check_is_drafter
from hf_specdec.drafting.registry import FAMILIES, Serving, is_hub_id, method_of, serving_of, unknown_name
from hf_specdec.hub.files import CONFIG_FILE, WEIGHTS_FILE, Source, read_json
from hf_specdec.hub.pretrained import PretrainedDrafter
from hf_specdec.hub.publishing import PublishedDrafter
from hf_specdec.hub.saving import WEIGHTS, saved_whole
from hf_specdec.hub.source_layout import source_tensors
from hf_specdec.hub.target_files import locate_config, locate_target
from hf_specdec.hub.tensors import save_tensors

ExportLayout = Literal["vllm", "source"]
_EXPORT_MARK = "hf_specdec_export"  # in the config of an exported draft model


def export_drafter(
    drafter: Drafter,
    folder: str | os.PathLike[str],
    *,
    to: ExportLayout = "vllm",
    target_id: str | None = None,
    target_architecture: str | None = None,
    num_target_layers: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a drafter in a layout that other software reads.

    Drafting options are not part of such layouts: options that were set since the drafter was loaded are not written.

    With `to="vllm"`, EAGLE-3, P-EAGLE, DFlash, DFlash 2 and DSpark drafters are written in the speculators layout,
    which `load_drafter` reads too; `vllm serve <folder or repo>` loads the target itself. A drafter with a draft
    vocabulary that uses rows of its target's head gets these rows from the target's files. A draft model with a draft
    vocabulary gets a row for each of the target's tokens.

    With `to="source"`, a drafter that `load_drafter` read from a published layout is written in that layout, for
    example after its adaptation or further training. config.json is that of the source, byte for byte, also if another
    target was named since. Weights have the names, dtypes and files of the source. Tensors that are not loaded, such as
    `t2d`, are copied from the source files, which must still exist. A pickle such as `medusa_lm_head.pt` is written by
    `torch.save` as a dict of tensors, under the same name, since some readers look for that name; it loads with
    `weights_only=True`. Model cards, tokenizers, records and Python code of the source are not copied.

    Args:
        drafter: a drafter from `load_drafter`.
        folder: the folder to write; created if needed. It must hold no checkpoint, except with `to="vllm"` the same
            export. Upload it with `hf upload`.
        to: the layout.
        target_id: the target, which vLLM loads: a Hub id, or the path of a folder, which is written as an absolute path
            and must be the same on the machine that runs vLLM (a warning says so). None for the target that the
            drafter names. For `to="vllm"` only, as the next two.
        target_architecture: class of the target, such as "LlamaForCausalLM", which vLLM only reports. None for the
            class in the config of the target's folder, if there is one.
        num_target_layers: number of layers of the target; required if the drafter reads EAGLE-3's default layers, and
            otherwise used to refuse layers that engines interpret differently. None for the number in the drafter's
            config or in the target's folder.
        overwrite: whether a checkpoint in the folder may be overwritten.

    Returns:
        The folder.

    Raises:
        ValueError: vLLM cannot serve such a drafter, the target has no Hub id and no path, the layout has no field for
            a property of the drafter, or the folder holds another checkpoint. With `to="source"`: the drafter was not
            loaded from a published layout, its network has changed since, or a source file has. Nothing is written.
        OSError: the target's files or the source files are needed and cannot be read.
        TypeError: `drafter` is not a drafter.
    """
    check_is_drafter(drafter)
    if isinstance(drafter, PublishedDrafter):
        drafter = drafter.without_adapters()
    if to not in get_args(ExportLayout):
        raise unknown_name("layout", to, get_args(ExportLayout))
    if num_target_layers is not None and num_target_layers < 1:
        raise ValueError(f"num_target_layers={num_target_layers} must be at least 1.")
    name = getattr(drafter, "name_or_path", "") or type(drafter).__name__
    if to == "source":
        given = {
            "target_id": target_id,
            "target_architecture": target_architecture,
            "num_target_layers": num_target_layers,
        }
        if unused := [f"{option}={value!r}" for option, value in given.items() if value is not None]:
            raise ValueError(
                f"{', '.join(unused)} cannot be combined with to='source', which keeps the config.json of the source: "
                "leave it out."
            )
        return _export_source(drafter, name, Path(folder), overwrite)
    serving = serving_of(drafter)
    if serving.whole_model is not None:
        return _export_whole_model(drafter, serving, name, Path(folder), target_id, overwrite)
    method = method_of(drafter)
    write = next((layout.write for layout in (method.layouts if method else ()) if layout.write is not None), None)
    if write is None or not isinstance(drafter, PretrainedDrafter):
        raise ValueError(
            f"{name!r} cannot be exported to {to}: {serving.not_exported}. {_exported_kinds()} drafters can be "
            "exported, and draft models with a draft vocabulary."
        )
    fields = serving.fields(drafter)
    place = _target_place(name, drafter.config.target_name_or_path if target_id is None else target_id, to)
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in drafter.state_dict().items()}
    if (head_ids := serving.head_ids(drafter)) is not None:
        tensors["lm_head.weight"] = _head_rows(place, drafter, head_ids)
    fields["torch_dtype"] = str(drafter.dtype).removeprefix("torch.")
    file = Path(place) / CONFIG_FILE
    known = _language_model(read_json(file, place)) if file.is_file() else {}
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
    _check_free(folder, {CONFIG_FILE, WEIGHTS_FILE}, overwrite=overwrite)
    if Path(place).is_absolute():
        warnings.warn(
            f"The export names its target by the folder {place!r}: the target has to be there on the machine that "
            f"serves, or {to} does not find it. To serve the export on other machines, name the target's Hub id "
            "(target_id, or --target-id of the command).",
            stacklevel=2,
        )
    with saved_whole(folder) as unfinished:
        (unfinished / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_tensors(tensors, unfinished / WEIGHTS_FILE)
        _check_same(unfinished, folder, overwrite)
    return folder


def _export_source(drafter: Drafter, name: str, folder: Path, overwrite: bool) -> Path:
    """Writes a drafter in the layout that it was loaded from."""
    if not isinstance(drafter, PretrainedDrafter) or (layout := drafter.source_layout) is None:
        raise ValueError(
            f"{name!r} ({type(drafter).__name__}) was not loaded from a published layout, so it has no source layout: "
            "save it in the layout of this library, drafter.save_pretrained(folder). Of a drafter that wraps another "
            "one, such as an AdaptiveDrafter, export the wrapped one: export_drafter(adaptive.drafter, ...)."
        )
    files = source_tensors(drafter, layout, name)
    _check_free(folder, {*layout.json_files, *files}, overwrite=overwrite, exported=False)
    with saved_whole(folder) as unfinished:
        for file, content in layout.json_files.items():
            (unfinished / file).write_bytes(content)
        for file, tensors in files.items():
            save_tensors(tensors, unfinished / file)
    return folder


def _exported_kinds() -> str:
    """The kinds of drafters that have a layout for vLLM, in words."""
    names = [layout.name for method in FAMILIES.values() for layout in method.layouts if layout.write is not None]
    *first, last = (name.partition(" (")[0] for name in names)
    return f"{', '.join(first)} and {last}"


def _export_whole_model(
    drafter: Any, serving: Serving, name: str, folder: Path, target_id: str | None, overwrite: bool
) -> Path:
    """Writes a draft model with a draft vocabulary, with a row for each of the target's tokens."""
    assert serving.whole_model is not None
    if drafter.target_ids is None:
        raise ValueError(f"{name!r} needs no export: {serving.not_exported}.")
    place = _target_place(name, drafter.target_name_or_path if target_id is None else target_id, "vllm")
    try:
        config = locate_config(Source(place))
    except (OSError, ValueError) as error:
        raise type(error)(
            f"{name!r} drafts {len(drafter.target_ids)} of its target's tokens, and the export needs a row for each of "
            f"them; their number is in the config of its target {place!r}, which cannot be read: {error}"
        ) from error
    vocab_size = _language_model(config).get("vocab_size", 0)
    if vocab_size <= int(drafter.target_ids[-1]):
        raise ValueError(
            f"{name!r} drafts the token {int(drafter.target_ids[-1])}, but its target {place!r} has {vocab_size} "
            "tokens: name the target that it was trained for (target_id, or --target-id of the command)."
        )
    _check_free(folder, {CONFIG_FILE, WEIGHTS_FILE, GENERATION_CONFIG_NAME}, overwrite=overwrite)
    model = serving.whole_model(drafter, vocab_size)
    setattr(model.config, _EXPORT_MARK, "vllm")
    with saved_whole(folder) as unfinished:
        model.save_pretrained(unfinished, max_shard_size="1TB")
        _check_same(unfinished, folder, overwrite)
    return folder


def _target_place(name: str, target_id: str | None, to: str) -> str:
    """The name by which an engine loads the target: a Hub id or the absolute path of a folder.

    An absolute path may be that of another machine; a relative path is resolved.

    Raises:
        ValueError: the name is neither a Hub id nor a path.
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


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the language model in a target's config."""
    return dict(config.get("text_config") or {}) | config


def _check_free(folder: Path, written: set[str], *, overwrite: bool, exported: bool = True) -> None:
    """Raises ValueError if the folder holds files of a checkpoint: engines load every weight file that they find.

    Args:
        folder: of the export.
        written: names of the files that the export writes.
        overwrite: whether these may be there.
        exported: whether they may be there as those of an earlier export for vLLM, see `_check_same`.
    """
    if not overwrite and exported and (folder / CONFIG_FILE).is_file():
        fields = read_json(folder / CONFIG_FILE, str(folder))
        overwrite = "speculators_config" in fields or _EXPORT_MARK in fields
    kinds = (*WEIGHTS, ".py", CONFIG_FILE)
    found = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    if in_the_way := [name for name in found if name.endswith(kinds) and not (overwrite and name in written)]:
        raise ValueError(
            f"{str(folder)!r} already holds {', '.join(in_the_way)}: a drafter would be overwritten, or readers would "
            "load more than the export. Clear it, or give another folder."
        )


def _check_same(unfinished: Path, folder: Path, overwrite: bool) -> None:
    """Raises ValueError if the folder holds an export with other files than those in `unfinished`."""
    differ = [
        file.name
        for file in sorted(unfinished.iterdir())
        if (folder / file.name).is_file() and not filecmp.cmp(file, folder / file.name, shallow=False)
    ]
    if differ and not overwrite:
        raise ValueError(
            f"{str(folder)!r} already holds the export of another drafter, or of other weights ({', '.join(differ)} "
            "differ): give another folder, or overwrite=True (`hf-specdec export --overwrite`)."
        )


def _head_rows(target: str, drafter: PretrainedDrafter, ids: Tensor) -> Tensor:
    """[draft_vocab, hidden]: the rows of the target's head that the drafter uses, from the target's files."""
    name = drafter.config.name_or_path or type(drafter).__name__
    why = (
        f"{name!r} drafts {drafter.config.draft_vocab_size} of {drafter.config.vocab_size} tokens with rows of the "
        f"head of its target {target!r}, which the export must contain"
    )
    try:
        files = locate_target(Source(target))
    except (OSError, ValueError) as error:
        raise type(error)(f"{why}, and the target's files cannot be read: {error}") from error
    # With tied embeddings, a checkpoint has no tensor with the head's name.
    found = [
        [key for key in files.shards if key == table or key.endswith(f".{table}")]
        for table in ("lm_head.weight", "embed_tokens.weight")
    ]
    heads = found[0] or found[1]
    if len(heads) != 1:
        raise ValueError(f"{why}, and the {len(files.shards)} tensors of the target do not have one head: {heads}.")
    head = files.load(heads)[heads[0]]
    shape = (drafter.config.vocab_size or 0, drafter.config.hidden_size)
    if not head.is_floating_point() or head.shape[1:] != shape[1:] or head.shape[0] < shape[0]:
        raise ValueError(
            f"{why}, and {heads[0]} is {list(head.shape)} {head.dtype}, not {list(shape)}: it is another target."
        )
    return head[ids.cpu()].contiguous()
