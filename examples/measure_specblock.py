"""The cost of a SpecBlock round by number of blocks and by depth, and the accuracy of the rank head.

    python examples/measure_specblock.py

It prints three tables: the bundled drafter with 1, 2, ... blocks per round; drafters with random weights, which reach
one depth with many small or few large blocks, and several depths with two blocks (their drafts are useless, but cost
the same time); and the rank head as a classifier, on the target's continuations of held-out prompts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bundle import TINY
from harness import DEVICE, about, load_inputs, load_target, mean_acceptance_length, table_of, wide_console, write_json

from hf_specdec import load_drafter
from hf_specdec.methods.specblock.quality import rank_head_quality
from hf_specdec.methods.specblock.training import new_drafter

BLOCKS = (1, 2, 3, 4)
TREE_BUDGET = 6
# (blocks, tokens per block): one depth with several shapes, then several depths with two blocks.
SHAPES = ((1, 8), (2, 4), (4, 2), (8, 1), (2, 2), (2, 8))


def cost(model: Any, drafter: Any, prompts: list[Any], new_tokens: int) -> dict[str, float]:
    """Median over prompts of the milliseconds of a round, and the mean acceptance length."""
    calls = []
    for inputs in [prompts[0], *prompts]:  # the first call warms up
        model.generate(**inputs, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False)
        calls.append(drafter.stats)

    def per_round(seconds: Callable[[Any], float]) -> float:
        return round(1e3 * statistics.median(seconds(stats) / stats.num_spec_steps for stats in calls[1:]), 2)

    return {
        "draft_ms": per_round(lambda stats: stats.draft_time_s),
        "round_ms": per_round(lambda stats: sum(stats.stage_time_s.values()) - stats.stage_time_s["prefill"]),
        "mean_acceptance_length": mean_acceptance_length(calls[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TINY.target)
    parser.add_argument("--drafter", default=str(TINY.folder / "specblock"))
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rank-prompts", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafter's folder and card")
    arguments = parser.parse_args()

    console = wide_console(100)
    model, tokenizer = load_target(arguments.target, torch.float32)
    prompts = load_inputs(tokenizer, TINY.prompts)
    drafter = load_drafter(arguments.drafter, model, tree_budget=TREE_BUDGET)
    options = asdict(drafter.options)

    def measure(measured: Any, blocks: int) -> dict[str, float]:
        measured.set_options(**options | {"num_blocks": blocks})
        return cost(model, measured, prompts[: arguments.num_prompts], arguments.new_tokens)

    by_blocks = {f"{blocks} blocks of {drafter.config.block_size}": measure(drafter, blocks) for blocks in BLOCKS}
    drafter.set_options(**options)
    by_shape = {}
    vocabulary = drafter.target_ids.cpu()
    for blocks, size in SHAPES:
        torch.manual_seed(0)
        other = new_drafter(model, vocabulary, block_size=size).to(DEVICE).eval()
        by_shape[f"depth {blocks * size}: {blocks} blocks of {size}"] = measure(other, blocks)
    headings = ("blocks", "drafting, ms per round", "round, ms", "mean acceptance length")
    for title, figures in (("the drafter", by_blocks), ("random weights", by_shape)):
        title += f", budget {options['tree_budget']}, at most {options['max_starts']} starts of a block"
        rows = [(name, *(f"{value:.2f}" for value in row.values())) for name, row in figures.items()]
        console.print(table_of(title, headings, rows))

    texts = []
    for inputs in prompts[: arguments.rank_prompts]:
        output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
        texts.append((output[0], inputs["input_ids"].shape[1]))
    quality = rank_head_quality(drafter, model, texts)
    console.print(str(quality))

    record = {
        "cost_of_a_round": {"this drafter": by_blocks, "random weights": by_shape} | about(),
        "rank_head": quality.record() | about(),
    }
    write_json(arguments.json, record)
    if arguments.record:
        drafter.training_record = (drafter.training_record or {}) | record
        drafter.write_records(arguments.drafter)


if __name__ == "__main__":
    main()
