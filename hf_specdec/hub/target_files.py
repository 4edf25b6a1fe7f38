"""Tensors that lie in a target's own checkpoint, had without loading the target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from safetensors import safe_open
from torch import Tensor

from hf_specdec.hub.files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Source, read_headers, read_json


@dataclass(frozen=True)
class TargetFiles:
    """The config of a target and which file has which of its tensors; `locate_target` finds it.

    Attributes:
        source: the target's folder or Hub id.
        commit: of the Hub's repo, where one is known.
        config: content of its config.json.
        shards: file name of each tensor.
    """

    source: Source
    commit: str | None
    config: dict[str, Any]
    shards: dict[str, str]

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads tensors, on the host and in the types that they are stored in.

        Raises:
            ValueError: the index names something else than a safetensors file beside it.
            OSError: a file cannot be had.
        """
        wanted = sorted(names)
        shards = sorted({self.shards[name] for name in wanted})
        if any("/" in shard or not shard.endswith(".safetensors") for shard in shards):
            raise ValueError(
                f"{INDEX_FILE} of {self.source.name!r} names {shards}, which are no safetensors files beside it."
            )
        folder = self.source.locate(shards, revision=self.commit)
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            with safe_open(folder / shard, framework="pt") as stored:
                tensors |= {name: stored.get_tensor(name) for name in wanted if self.shards[name] == shard}
        return tensors


def locate_target(source: Source, commit: str | None = None) -> TargetFiles:
    """Finds a target's files; of the Hub only the config and the index, or a checkpoint of one file, are downloaded.

    Raises:
        ValueError: a file is damaged.
        OSError: a file is missing or cannot be had.
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
    """The content of a target's config.json; raises as `locate_target`."""
    return read_json(source.locate([CONFIG_FILE], revision=commit) / CONFIG_FILE, source.name)
