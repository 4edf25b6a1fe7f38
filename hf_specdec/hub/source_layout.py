"""The layout that a drafter was loaded from: the record that `load_drafter` makes, and the tensors to write it again.

The record has the name and dtype of each stored tensor, and its name here, so that no code depends on the format.
Tensors that were not loaded are read again from the source files. `export.py` writes the files.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_specdec.drafting.registry import method_of
from hf_specdec.hub.files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Source
from hf_specdec.hub.formats.base import Format, Headers
from hf_specdec.hub.formats.keys import OURS, TRANSFORMERS
from hf_specdec.hub.pretrained import PretrainedDrafter, SourceLayout, SourceTensor
from hf_specdec.hub.tensors import load_tensors, read_headers
from hf_specdec.unsafe_keys import listed

_WAY_OUT = "or save it in the layout of this library: drafter.save_pretrained(folder)"


def source_layout(
    format: Format,
    folder: Path,
    headers: Headers,
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    side_tensors: Mapping[str, Tensor],
    config: PreTrainedConfig,
) -> SourceLayout:
    """Makes the record of a checkpoint.

    Args:
        format: its layout.
        folder: its folder.
        headers: of its weight files.
        names: the tensors that are part of the drafter: stored name -> name in its state dict.
        tensors: content of the weight files.
        side_tensors: content of the files next to them, used instead of tensors of the same name in the weight files.
        config: the drafter's config.
    """
    used = {name: own_name for name, own_name in names.items() if own_name not in side_tensors}
    stored = [
        SourceTensor(headers[name].file.name, name, used.get(name), tuple(tensor.shape), tensor.dtype)
        for name, tensor in tensors.items()
    ]
    for file, held in format.beside.items():
        if (folder / file).is_file():
            found = {name: side_tensors[name] for name in held}
            stored += [SourceTensor(file, name, name, tuple(each.shape), each.dtype) for name, each in found.items()]
    sharded = not (folder / WEIGHTS_FILE).is_file() and (folder / INDEX_FILE).is_file()
    json_files = {file: (folder / file).read_bytes() for file in (CONFIG_FILE, *([INDEX_FILE] if sharded else ()))}
    return SourceLayout(format.name, folder.absolute(), json_files, tuple(stored), copy.deepcopy(config))


def source_tensors(drafter: PretrainedDrafter, layout: SourceLayout, name: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of each file of the source layout, by their stored names, in their stored dtypes, on the CPU.

    A tensor that was not loaded is read from its source file. So is a tensor that was loaded in a narrower dtype and
    has not changed since, because the drafter holds only its rounded values.

    Args:
        drafter: the drafter to export.
        layout: its record.
        name: the drafter's name, for messages.

    Raises:
        OSError: a source file that is needed is missing.
        ValueError: the network is not the one that was loaded, a source file has changed, or the vocabulary maps
            contradict each other.
    """
    own = drafter.state_dict()
    if changed := list(_changed(layout, own, drafter.config)):
        raise ValueError(
            f"{name!r} cannot be exported to its source layout, {layout.format}, because it has changed since it was "
            f"loaded: {listed(changed)}. The export keeps the config.json of the source, which describes the drafter "
            f"that was loaded. Undo the changes, {_WAY_OUT}."
        )
    needed = [
        tensor
        for tensor in layout.tensors
        if tensor.own_name is None
        or torch.promote_types(own[tensor.own_name].dtype, tensor.dtype) != own[tensor.own_name].dtype
    ]
    published = _read_again(layout, needed, name)
    files: dict[str, dict[str, Tensor]] = {}
    for tensor in layout.tensors:
        values = published.get(tensor)
        if tensor.own_name is not None:
            current = own[tensor.own_name].detach().cpu()
            if values is None or not torch.equal(values.to(current.dtype), current):
                values = current.to(tensor.dtype)
        assert values is not None, "a tensor that was not loaded has been read again"
        files.setdefault(tensor.file, {})[tensor.name] = values.contiguous()
    method = method_of(drafter)
    assert method is not None, "a drafter with a source layout was loaded by its family"
    format = next(each for each in method.layouts if each.name == layout.format)
    format.check({key: values for file in files.keys() - format.beside for key, values in files[file].items()}, name)
    return files


def _changed(layout: SourceLayout, own: Mapping[str, Tensor], config: PreTrainedConfig) -> Iterator[str]:
    """What in a drafter's network is not as it was loaded."""
    shapes = {tensor.own_name: tensor.shape for tensor in layout.tensors if tensor.own_name is not None}
    for key in sorted(shapes.keys() | own.keys()):
        before, now = shapes.get(key), tuple(own[key].shape) if key in own else None
        if before != now:
            yield f"weight {key} has the shape {now} and had {before}"
    loaded, current = layout.config.to_dict(), config.to_dict()
    # Both have all fields of the class. Fields of one alone are unknown keys of its file, without effect.
    for field in sorted(loaded.keys() & current.keys() - TRANSFORMERS - OURS):
        parts = [fields[field] for fields in (loaded, current)]
        keys = {key for part in parts if isinstance(part, dict) for key in part} or {field}
        for key in sorted(keys - TRANSFORMERS - OURS):
            was, is_now = (
                # A property knows what a missing key means, and where else the value may be.
                getattr(each, key) if hasattr(each, key) else part.get(key) if isinstance(part, dict) else part
                for each, part in zip((layout.config, config), parts, strict=True)
            )
            if was != is_now and not key.startswith("_"):
                yield f"config field {key} is {is_now!r} and was {was!r}"


def _read_again(layout: SourceLayout, needed: Collection[SourceTensor], name: str) -> dict[SourceTensor, Tensor]:
    """Reads tensors from the source files."""
    if not needed:
        return {}
    why = (
        f"{name!r} cannot be exported to its source layout, {layout.format}: {listed([each.name for each in needed])} "
        f"must be copied from its source in {str(layout.folder)!r}"
    )
    way_out = f"Copy the files back from where the drafter was published, {_WAY_OUT}."
    files = sorted({tensor.file for tensor in needed})
    missing = [file for file in files if not (layout.folder / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{why}, but {', '.join(missing)} no longer exists there. {way_out}")
    Source(str(layout.folder)).locate(files)  # refuses links out of the folder
    found: dict[SourceTensor, Tensor] = {}
    for file in files:
        read_headers([layout.folder / file], name)  # raises if the file is damaged
        content = load_tensors(layout.folder / file, name)
        for tensor in needed:
            if tensor.file != file:
                continue
            values = content.get(tensor.name)
            if values is None or (tuple(values.shape), values.dtype) != (tensor.shape, tensor.dtype):
                there = "has no such tensor" if values is None else f"holds {list(values.shape)} {values.dtype}"
                raise ValueError(
                    f"{why}, but {file} has changed since the drafter was loaded: for {tensor.name}, "
                    f"{list(tensor.shape)} {tensor.dtype}, it {there}. {way_out}"
                )
            found[tensor] = values
    return found
