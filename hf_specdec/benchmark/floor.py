"""Round-to-floor: what a round takes, over what reading the target's weights once would take.

The weights of a forward must pass through the memory bus at least once, so bytes of weights over the bandwidth of the
device are a floor for a round of any size that is worth verifying. Both are measured here: the bandwidth as a copy
gives it in the same run, the bytes as the forward reads them. Nothing is estimated from data sheets.
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
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Bytes per second that a large copy on `device` moves: bytes read plus bytes written over the best time.

    Args:
        device: where to measure; on a CPU with as many threads as torch uses now.
        num_bytes: size of the copied tensor; several times the caches of the device where omitted.
        repeats: copies timed one by one, after one that is not; the quickest counts.
        clock: gives the time in seconds.
    """
    device = torch.device(device)
    size = num_bytes or COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):
        wait_for(device)
        began = clock()
        goal.copy_(source)
        wait_for(device)
        seconds.append(clock() - began)
    return 2 * size / min(seconds[1:])


def weight_bytes(model: nn.Module, *, borrowed: Iterable[nn.Module] = ()) -> int:
    """Bytes of weights that one forward of `model` over a single token reads.

    Shared tensors count once. Embedding tables are only looked up, so they count only where a head shares them. Of a
    mixture of experts only those of one token count: `num_experts_per_tok` of all, so that a round over many tokens,
    which meets more of them, lies above its floor.

    Args:
        model: a target, or a drafter.
        borrowed: modules of another model that the forward reads too, as a drafter does with the target's head.

    Raises:
        ValueError: the model has experts, and its config does not say how many a token meets.
    """
    modules = [model, *borrowed]
    counted: set[int] = set()
    total = 0.0
    for root in modules:
        share: float | None = None
        for prefix, module in root.named_modules():
            if isinstance(module, nn.Embedding):
                continue
            for parameter in module.parameters(recurse=False):
                if id(parameter) in counted:
                    continue
                counted.add(id(parameter))
                size = parameter.numel() * parameter.element_size()
                if "experts" in prefix.split("."):
                    share = _active_share(root) if share is None else share
                    total += size * share
                else:
                    total += size
    return round(total)


def round_to_floor(round_s: float, model: nn.Module, bandwidth: float, *, borrowed: Iterable[nn.Module] = ()) -> float:
    """Wall time of a round over the time that reading the weights of `model` once takes.

    Args:
        round_s: seconds of one round, drafting included.
        model: the target; a drafter, for the drafter's own floor.
        bandwidth: bytes per second, from `copy_bandwidth` on the same device in the same run.
        borrowed: see `weight_bytes`.

    Example:
        >>> model = nn.Linear(1000, 1000, bias=False)  # 4 MB
        >>> round_to_floor(0.003, model, bandwidth=2e9)
        1.5
    """
    return round_s / (weight_bytes(model, borrowed=borrowed) / bandwidth)


def _active_share(model: nn.Module) -> float:
    """Experts that a token meets over all there are."""
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
