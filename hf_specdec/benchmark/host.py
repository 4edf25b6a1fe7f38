"""Host time of a round on a CPU: all that is neither the target's forward nor the drafter's.

Ours and the reference loop's (`reference.py`), on the same pair and prompts, in turn. Small tensors, look-ups and
bookkeeping: what a target of any size pays for.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.benchmark.reference import reference_ddtree
from hf_specdec.drafters.dflash import DFlashDrafter

Row = dict[str, Any]


@contextmanager
def timed_forwards(*models: PreTrainedModel) -> Iterator[list[float]]:
    """Seconds of each forward of these models, in order, as long as the context is open. On a CPU."""
    seconds: list[float] = []

    def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*arguments: Any, **settings: Any) -> Any:
            began = time.perf_counter()
            output = forward(*arguments, **settings)
            seconds.append(time.perf_counter() - began)
            return output

        return run

    for model in models:
        model.forward = timed(model.forward)
    try:
        yield seconds
    finally:
        for model in models:
            del model.forward  # the class's own shows again


def host_time(
    target: PreTrainedModel, drafter: DFlashDrafter, prompts: Sequence[Tensor], new_tokens: int, repeats: int
) -> list[Row]:
    """A row for ours and one for the reference loop: medians over `repeats` passes over the prompts, prefills left out.

    Args:
        target: on a CPU.
        drafter: of `target`; its `tree_budget` is that of both.
        prompts: [1, seq] int64 each.
        new_tokens: of each prompt.
        repeats: passes that count; one more warms up.

    Raises:
        ValueError: `target` is not on a CPU, where a forward has ended when it returns.
    """
    if target.device.type != "cpu":
        raise ValueError(f"Host time is measured on a CPU, but the target is on {target.device}: use --device cpu.")

    def ours(prompt: Tensor) -> tuple[float, int]:
        target.generate(
            prompt, attention_mask=prompt.new_ones(prompt.shape), max_new_tokens=new_tokens, do_sample=False,
            assistant_model=drafter,
        )  # fmt: skip
        stats = drafter.stats
        assert stats is not None
        stages = stats.stage_time_s
        return sum(stages.values()) - stages["prefill"], stats.num_spec_steps

    def reference(prompt: Tensor) -> tuple[float, int]:
        run = reference_ddtree(target, drafter, prompt, new_tokens, drafter.tree_budget)
        return run.seconds, len(run.acceptance_lengths)

    passes: dict[str, list[tuple[float, float]]] = {"ours": [], "reference": []}
    with timed_forwards(target, drafter) as forwards:
        for repeat in range(repeats + 1):
            for way, run in (("ours", ours), ("reference", reference)):
                total, inside, rounds = 0.0, 0.0, 0
                for prompt in prompts:
                    forwards.clear()
                    seconds, count = run(prompt)
                    total, inside, rounds = total + seconds, inside + sum(forwards[1:]), rounds + count
                if repeat:
                    passes[way].append((total / rounds, (total - inside) / rounds))
    rows = []
    for way, found in passes.items():
        row: Row = {"part": "host", "way": way, "nodes": drafter.tree_budget, "prompts": len(prompts)}
        row["round_ms"] = 1000 * statistics.median(round_s for round_s, _ in found)
        row["host_ms"] = 1000 * statistics.median(host_s for _, host_s in found)
        row["host_share"] = statistics.median(host_s / round_s for round_s, host_s in found)
        rows.append(row)
    return rows
