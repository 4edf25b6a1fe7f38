"""Tiles: how much of an attention one program of `attention_kernel.py` holds at a time, by what its GPU has room for.

No Triton here, so that the choice is tested where there is none.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

ASSUMED_BYTES = 64 * 1024  # of shared memory, where the device does not say; all GPUs that Triton knows have as much


class Tile(NamedTuple):
    """What one program holds.

    Attributes:
        queries: heads of a group and nodes, counted through.
        keys: entries that are looked at in one step.
        stages: steps whose keys and values are held at once, so that some are on their way meanwhile.
    """

    queries: int
    keys: int
    stages: int


def power_of_2(least: int) -> int:
    """The smallest power of two that is not below `least`, nor below the 16 that Triton multiplies at least.

    Example:
        >>> power_of_2(3), power_of_2(80), power_of_2(128)
        (16, 128, 128)
    """
    return max(16, 1 << (least - 1).bit_length())


def tile_bytes(tile: Tile, head_dim: int, itemsize: int) -> int:
    """Shared memory that a program takes at most: queries, the keys and values of all stages, float32 scores.

    Just what Triton 3.5 to 3.9 take for bfloat16 in two or three stages on compute capability 9.0, heads of 128 and up;
    less elsewhere.
    """
    dim = power_of_2(head_dim)
    return itemsize * (tile.queries + 2 * tile.stages * tile.keys) * dim + 4 * tile.queries * tile.keys


@functools.cache
def fitting_tile(queries: int, head_dim: int, itemsize: int, available: int) -> Tile | None:
    """The largest tile that fits, None where none does.

    Stages go first, then keys, queries last: each block of them reads all keys and values anew. Tiles of float32 are
    small: without tensor cores Triton writes out every product, and compiles 64 queries and keys of 256 for minutes.

    Args:
        queries: heads of a group times nodes.
        head_dim: of keys and values.
        itemsize: bytes of a number.
        available: bytes of shared memory, see `shared_bytes`.

    Example:
        >>> fitting_tile(124, 128, 2, available=232448), fitting_tile(124, 256, 2, available=232448)
        (Tile(queries=64, keys=64, stages=3), Tile(queries=64, keys=64, stages=2))
    """
    sizes = (64, 32, 16)
    most_queries, most_keys = (64, 64) if itemsize < 4 else (16, 32)
    blocks = [size for size in sizes if size <= min(most_queries, power_of_2(queries))]
    steps = [size for size in sizes if size <= most_keys]
    for tile in itertools.starmap(Tile, itertools.product(blocks, steps, (3, 2, 1))):
        if tile_bytes(tile, head_dim, itemsize) <= available:
            return tile
    return None


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take on a device; on a CPU, as in Triton's interpreter, what is assumed."""
    if device.type != "cuda":
        return ASSUMED_BYTES
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:  # which Triton no longer serves: without tensor cores it takes more than is counted here
        return 0
    return getattr(properties, "shared_memory_per_block_optin", ASSUMED_BYTES)


def tile_of(query: Tensor, key: Tensor) -> Tile | None:
    """The tile for these heads on their device, None where none fits.

    Args:
        query: [batch, heads, nodes, head_dim].
        key: [batch, kv_heads, entries, head_dim].
    """
    groups = query.shape[1] // key.shape[1]
    return fitting_tile(groups * query.shape[2], query.shape[3], query.element_size(), shared_bytes(query.device))
