"""Reads single tensors from a target's checkpoint, without loading the target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from safetensors import safe_open
from torch import Tensor

from hf_specdec.hub.files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Source, read_headers, read_json


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
            ValueError: the index names a file that is not a safetensors file in its folder.
            OSError: a file is missing or cannot be downloaded.
        """
        wanted = sorted(names)
        shards = sorted({self.shards[name] for name in wanted})
        if any("/" in shard or not shard.endswith(".safetensors") for shard in shards):
            raise ValueError(
                f"{INDEX_FILE} of {self.source.name!r} names {shards}; shards must be safetensors files in its folder."
            )
        folder = self.source.locate(shards, revision=self.commit)
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
    source = replace(source, revision=None)
    config = locate_config(source, commit)
    folder = source.locate([INDEX_FILE], revision=commit)
    if (folder / INDEX_FILE).is_file():
        shards: dict[str, str] = read_json(folder / INDEX_FILE, source.name).get("weight_map") or {}
    else:
        folder = source.locate([WEIGHTS_FILE], revision=commit)
        shards = dict.fromkeys(read_headers([folder / WEIGHTS_FILE], source.name), WEIGHTS_FILE)
    return TargetFiles(source, commit, config, shards)


def locate_config(source: Source, commit: str | None = None) -> dict[str, Any]:
    """The content of a target's config.json; raises the errors of `locate_target`."""
    return read_json(source.locate([CONFIG_FILE], revision=commit) / CONFIG_FILE, source.name)
