"""What a round of SpecBlock costs by blocks and by depth, and how often its rank head is right.

    python examples/measure_specblock.py

Three tables. The bundled drafter with 1, 2, ... blocks per round. Drafters with random weights and the same shape that
reach one depth by many small blocks or by a few large ones, and several depths by two blocks: their drafts are no good,
but cost what good ones cost. And the rank head as a classifier, over what the target writes after held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import load_drafter
from hf_specdec.benchmark.prompts import read_jsonl
from hf_specdec.drafters.specblock.quality import rank_head_quality
from hf_specdec.training.specblock import new_drafter

BUNDLED = Path(os.path.relpath(Path(__file__).parent / "tiny-code"))
BLOCKS = (1, 2, 3, 4)
# Blocks and tokens per block: one depth in several ways, then several depths with two blocks.
SHAPES = ((1, 8), (2, 4), (4, 2), (8, 1), (2, 2), (2, 8))


def cost(model: Any, drafter: Any, prompts: list[torch.Tensor], new_tokens: int) -> dict[str, float]:
    """Median over prompts of the milliseconds of a round, and the mean acceptance length."""
    draft, whole, accepted, rounds = [], [], 0, 0
    for prompt in [prompts[0], *prompts]:  # the first pass over the first prompt warms up
        model.generate(prompt, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False)
        stats = drafter.stats
        draft.append(1e3 * stats.draft_time_s / stats.num_spec_steps)
        stages = stats.stage_time_s
        whole.append(1e3 * (sum(stages.values()) - stages["prefill"]) / stats.num_spec_steps)
        accepted += stats.num_accepted_draft_tokens
        rounds += stats.num_spec_steps
    return {
        "draft_ms": round(statistics.median(draft[1:]), 2),
        "round_ms": round(statistics.median(whole[1:]), 2),
        "mean_acceptance_length": round(1 + accepted / rounds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(BUNDLED / "target"))
    parser.add_argument("--drafter", default=str(BUNDLED / "specblock"))
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rank-prompts", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafter's folder and card")
    arguments = parser.parse_args()

    console = Console()
    console.width = max(console.width, 100)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    texts = [prompt.text for prompt in read_jsonl(BUNDLED / "prompts.jsonl")]
    prompts = [tokenizer(text, return_tensors="pt").input_ids.to(device) for text in texts]
    drafter = load_drafter(arguments.drafter, model)
    options = asdict(drafter.options)

    by_blocks = {}
    for blocks in BLOCKS:
        drafter.set_options(**options | {"num_blocks": blocks})
        by_blocks[f"{blocks} blocks of {drafter.config.block_size}"] = cost(
            model, drafter, prompts[: arguments.num_prompts], arguments.new_tokens
        )
    drafter.set_options(**options)
    by_shape = {}
    vocabulary = drafter.target_ids(torch.arange(drafter.config.draft_vocab_size, device=device)).cpu()
    for blocks, size in SHAPES:
        torch.manual_seed(0)
        other = new_drafter(model, vocabulary, block_size=size).to(device).eval()
        other.set_options(**options | {"num_blocks": blocks})
        by_shape[f"depth {blocks * size}: {blocks} blocks of {size}"] = cost(
            model, other, prompts[: arguments.num_prompts], arguments.new_tokens
        )
    for title, figures in (("the drafter", by_blocks), ("random weights", by_shape)):
        table = Table(
            title=f"{title}, budget {options['tree_budget']}, at most {options['max_starts']} starts of a block"
        )
        table.add_column("blocks")
        for heading in ("drafting, ms per round", "round, ms", "mean acceptance length"):
            table.add_column(heading, justify="right")
        for name, row in figures.items():
            table.add_row(name, *(f"{row[key]:.2f}" for key in ("draft_ms", "round_ms", "mean_acceptance_length")))
        console.print(table)

    texts = []
    for prompt in prompts[: arguments.rank_prompts]:
        written = model.generate(prompt, max_new_tokens=128, do_sample=False)
        texts.append((written[0], prompt.shape[1]))
    quality = rank_head_quality(drafter, model, texts)
    console.print(str(quality))

    about = {
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{device}, {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }
    record = {
        "cost_of_a_round": {"this drafter": by_blocks, "random weights": by_shape} | about,
        "rank_head": quality.record() | about,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.record:
        drafter.training_record = (drafter.training_record or {}) | record
        drafter.write_records(arguments.drafter)


if __name__ == "__main__":
    main()
