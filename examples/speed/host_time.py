"""Host time of a round on a CPU: the time outside the forwards of target and drafter.

Ours and that of the reference loop (`reference.py`), measured in turn on the same pair and prompts. The size of the
target does not change it much. It is measured in two ways: without the bare `forward` of either model, from token ids
to logits; and without the target's `forward` and all of drafting up to the marginals, with positions and the drafter's
cache, as the timers of the published loop divide a round.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.methods.dflash.drafting import DFlashMarginals
from hf_specdec.methods.dflash.network import DFlashDrafter

from .reference import reference_ddtree

Row = dict[str, Any]


@contextmanager
def timed(owner: object, name: str) -> Iterator[list[float]]:
    """Collects the seconds of each call of a method in a list, while the context is open. For a CPU.

    Args:
        owner: an object, or a class for all of its objects.
        name: of the method.
    """
    seconds: list[float] = []
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def run(*arguments: Any, **settings: Any) -> Any:
        began = time.perf_counter()
        output = method(*arguments, **settings)
        seconds.append(time.perf_counter() - began)
        return output

    with patch.object(owner, name, run):
        yield seconds


def host_time(
    target: PreTrainedModel, drafter: DFlashDrafter, prompts: Sequence[Tensor], new_tokens: int, repeats: int
) -> list[Row]:
    """A row for our loop and one for the reference loop: medians over `repeats` passes, without prefills.

    `host_ms` and `host_share` exclude the bare forwards, `host_share_of_stages` excludes the stages of the published
    loop.

    Args:
        target: on a CPU.
        drafter: for `target`; both loops use its `tree_budget`.
        prompts: [1, seq] int64 each.
        new_tokens: per prompt.
        repeats: measured passes over the prompts, after one that warms up.

    Raises:
        ValueError: `target` is not on a CPU; on other devices a forward may return before it has ended.
    """
    if target.device.type != "cpu":
        raise ValueError(f"Host time is measured on a CPU, but the target is on {target.device}: use --device cpu.")

    def ours(prompt: Tensor) -> tuple[float, float, int]:
        target.generate(
            prompt, attention_mask=prompt.new_ones(prompt.shape), max_new_tokens=new_tokens, do_sample=False,
            assistant_model=drafter,
        )  # fmt: skip
        stats = drafter.stats
        assert stats is not None
        stages = stats.stage_time_s
        return sum(stages.values()) - stages["prefill"], sum(drafting), stats.num_spec_steps

    def reference(prompt: Tensor) -> tuple[float, float, int]:
        run = reference_ddtree(target, drafter, prompt, new_tokens, drafter.options.node_limit)
        return run.seconds, run.marginals_seconds, len(run.acceptance_lengths)

    passes: dict[str, list[list[float]]] = {"ours": [], "reference": []}
    with (
        timed(target, "forward") as verified,
        timed(drafter, "forward") as drafted,
        timed(DFlashMarginals, "marginals") as drafting,
    ):
        for repeat in range(repeats + 1):
            for way, run in (("ours", ours), ("reference", reference)):
                figures = []  # per prompt: seconds in total, of the bare forwards, of the stages; number of rounds
                for prompt in prompts:
                    for seconds in (verified, drafted, drafting):
                        seconds.clear()
                    total, marginals, rounds = run(prompt)
                    verifying = sum(verified[-rounds:])  # before them, the prefill and a trial of the timed forward
                    figures.append((total, verifying + sum(drafted), verifying + marginals, rounds))
                if repeat:
                    passes[way].append([sum(column) for column in zip(*figures, strict=True)])
    rows = []
    for way, found in passes.items():
        row: Row = {"part": "host", "way": way, "nodes": drafter.options.tree_budget, "prompts": len(prompts)}
        row["round_ms"] = 1000 * statistics.median(total / rounds for total, _, _, rounds in found)
        row["host_ms"] = 1000 * statistics.median((total - bare) / rounds for total, bare, _, rounds in found)
        row["host_share"] = statistics.median(1 - bare / total for total, bare, _, _ in found)
        row["host_share_of_stages"] = statistics.median(1 - stages / total for total, _, stages, _ in found)
        rows.append(row)
    return rows
