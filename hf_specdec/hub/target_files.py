"""Reads single tensors from a target's checkpoint, without loading the target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_specdec.hub.files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Source, read_json, safetensors_headers
from hf_specdec.hub.tensors import DTYPES
from hf_specdec.unsafe_keys import listed


@dataclass(frozen=True)
class TargetFiles:
    """The config of a target, and the file of each of its tensors; `locate_target` makes it.

    Attributes:
        source: the target's folder or Hub id.
        commit: commit of the Hub repo, if known.
        config: content of its config.json.
        shards: file name of each tensor.
    """

    source: Source
    commit: str | None
    config: dict[str, Any]
    shards: dict[str, str]

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads tensors to the CPU, in their stored dtypes.

        Raises:
            ValueError: the index names a file that is not a safetensors file in its folder, or a file is damaged or
                lacks a tensor that the index names.
            OSError: a file is missing or cannot be downloaded.
        """
        wanted = sorted(names)
        shards = sorted({self.shards[name] for name in wanted})
        if any("/" in shard or "\\" in shard or not shard.endswith(".safetensors") for shard in shards):
            raise ValueError(
                f"{INDEX_FILE} of {self.source.name!r} names {shards}; shards must be safetensors files in its folder."
            )
        folder = self.source.locate(shards, revision=self.commit)
        held = safetensors_headers([folder / shard for shard in shards], self.source.name)
        if lost := [name for name in wanted if name not in held or held[name].file.name != self.shards[name]]:
            raise ValueError(
                f"{INDEX_FILE} of {self.source.name!r} says that {self.shards[lost[0]]} holds {lost[0]}, but it does "
                "not: the checkpoint is damaged. Copy or download it again."
            )
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            with safe_open(folder / shard, framework="pt") as stored:
                tensors |= {name: stored.get_tensor(name) for name in wanted if self.shards[name] == shard}
        return tensors


def locate_target(source: Source, commit: str | None = None) -> TargetFiles:
    """Finds a target's files; from the Hub downloads only the config and the index, or without an index the weights.

    Raises:
        ValueError: a file is damaged.
        OSError: a file is missing or cannot be downloaded.
    """
    source = replace(source, revision=None, subfolder="")
    config = locate_config(source, commit)
    folder = source.locate([INDEX_FILE], revision=commit)
    if (folder / INDEX_FILE).is_file():
        shards = read_json(folder / INDEX_FILE, source.name).get("weight_map") or {}
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ValueError(
                f"{INDEX_FILE} of {source.name!r} has a weight_map that does not name a file per tensor: the "
                "checkpoint is damaged. Copy or download it again."
            )
    else:
        folder = source.locate([WEIGHTS_FILE], revision=commit)
        shards = dict.fromkeys(safetensors_headers([folder / WEIGHTS_FILE], source.name), WEIGHTS_FILE)
    return TargetFiles(source, commit, config, shards)


def locate_config(source: Source, commit: str | None = None) -> dict[str, Any]:
    """The content of a target's config.json; raises the errors of `locate_target`."""
    return read_json(source.locate([CONFIG_FILE], revision=commit) / CONFIG_FILE, source.name)


SCALE = "_scale_inv"  # ending of the name of a weight's scales


def dequantised(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype, name: str
) -> dict[str, Tensor]:
    """Weights that are stored in 8 bits with a scale per block, as numbers of `dtype`; other tensors as they are.

    weight[i, j] = stored[i, j] * scale[i // rows, j // columns]. Source: DeepSeek-V3, arXiv 2412.19437, Section 3.3;
    shared facts on formats of 2026, section 7.1.

    Args:
        tensors: by name; the scales of "x.weight" [out, in] are "x.weight_scale_inv" [out blocks, in blocks].
        config: the content of the target's config.json, whose `quantization_config.weight_block_size` has the rows and
            columns of a block.
        dtype: of the result.
        name: of the target, for messages.

    Raises:
        ValueError: the sizes do not fit together, or a tensor is of another type than floating point without scales.

    Examples:
        >>> stored = {"x.weight": torch.ones(2, 3), "x.weight_scale_inv": torch.tensor([[2.0, 4.0]])}
        >>> dequantised(stored, {"quantization_config": {"weight_block_size": [2, 2]}}, torch.float32, "x")["x.weight"]
        tensor([[2., 2., 4.],
                [2., 2., 4.]])
    """
    settings = config.get("quantization_config")
    block: Any = settings.get("weight_block_size") if isinstance(settings, dict) else None
    sized = isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    whole = {key: tensor for key, tensor in tensors.items() if not key.endswith(SCALE)}
    for key, scale in ((key.removesuffix(SCALE), tensor) for key, tensor in tensors.items() if key.endswith(SCALE)):
        stored = whole.get(key)
        blocks = None
        if stored is not None and stored.dim() == 2 and sized:
            blocks = [-(-size // each) for size, each in zip(stored.shape, block, strict=True)]
        if stored is None or list(scale.shape) != blocks:
            raise ValueError(
                f"{key} of {name!r} is {'missing' if stored is None else list(stored.shape)} and its scales "
                f"{key}{SCALE} are {list(scale.shape)}, which does not fit weight_block_size={block!r} of the "
                f"quantization_config in {CONFIG_FILE}. The checkpoint is damaged: download it again."
            )
        rows, columns = stored.shape
        spread = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        whole[key] = (stored.float() * spread).to(dtype)
    unread = [f"{key} is {tensor.dtype}" for key, tensor in whole.items() if tensor.dtype not in DTYPES.values()]
    if unread:
        raise ValueError(
            f"{name!r} is quantised in a way that is not supported: {listed(unread)}. Read are floating-point types "
            f"({', '.join(DTYPES)}) and 8 bits with {SCALE} per block: use a checkpoint of the target in bfloat16."
        )
    return whole
