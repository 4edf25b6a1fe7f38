"""The floor of a round: the time to read the target's weights once, from measured bandwidth and counted bytes.

A forward reads its weights from memory at least once, so their bytes divided by the bandwidth of the device are a lower
bound for the time of a round. The bandwidth is that of a copy, measured in the same run, not taken from data sheets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from hf_specdec.decoding.devices import wait_for

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}  # several times the caches of the device
REPEATS = 10


def copy_bandwidth(
    device: torch.device | str,
    *,
    num_bytes: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes per second that a large copy on `device` moves: bytes read plus bytes written over the best time.

    Args:
        device: where to measure; on a CPU with as many threads as torch uses now.
        num_bytes: size of the copied tensor; None for several times the caches of the device.
        clock: returns the time in seconds.
    """
    device = torch.device(device)
    size = num_bytes or COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS + 1):  # the first one warms up
        wait_for(device)
        began = clock()
        goal.copy_(source)
        wait_for(device)
        seconds.append(clock() - began)
    return 2 * size / min(seconds[1:])


def weight_bytes(model: nn.Module, *, borrowed: Iterable[nn.Module] = ()) -> int:
    """Bytes of weights that one forward of `model` over a single token reads.

    Shared tensors count once. Embedding tables are only looked up, so they count only if a head shares them.
    For a mixture of experts only the experts of one token count, `num_experts_per_tok` of all. A round over several
    tokens uses more experts, so its time is longer than the floor.

    Args:
        model: a target or a drafter.
        borrowed: modules of another model that the forward also reads, such as the target's head in a drafter.

    Raises:
        ValueError: the model has experts, and its config does not give the number that a token uses.
    """
    counted: set[nn.Parameter] = set()
    total = 0.0
    for root in (model, *borrowed):
        for prefix, module in root.named_modules():
            if isinstance(module, nn.Embedding):
                continue
            own = set(module.parameters(recurse=False)) - counted
            share = _active_share(root) if own and "experts" in prefix.split(".") else 1.0
            total += share * sum(parameter.nbytes for parameter in own)
            counted |= own
    return round(total)


def _active_share(model: nn.Module) -> float:
    """Share of the experts that one token uses."""
    config = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if config is not None else None
    counts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    known = [count for count in counts if count]
    active = getattr(config, "num_experts_per_tok", None)
    if not known or not active:
        raise ValueError(
            f"{type(model).__name__} has experts, but its config gives num_experts_per_tok={active} of {known}; set "
            "both num_experts and num_experts_per_tok, so that the weights a token reads can be counted."
        )
    return float(active) / float(known[0])
