"""Measure `generate_many`: tokens per second of many prompts, by the number of rows at once.

    python examples/measure_many.py --target T --prompts P.jsonl --drafter examples/smollm2-135m/dflash --rows 1 4 16

Prompts get different numbers of new tokens, without an end of text, so that all ways write the same number. The ways
run in turn, in one process: calls of plain `generate` one by one, fixed batches of it, and `generate_many` without and
with each drafter. A short run of each comes first, as warm-up.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import load_inputs, load_target, table_of, wide_console

from hf_specdec import generate_many, load_drafter

Prompts = list[tuple[list[int], int]]


def one_by_one(model: Any, prompts: Prompts, rows: int) -> None:
    """A call for each prompt."""
    for ids, new in prompts:
        given = torch.tensor([ids])
        model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new)


def fixed_batches(model: Any, prompts: Prompts, rows: int) -> None:
    """Batches in order, each to the end of its longest row."""
    for first in range(0, len(prompts), rows):
        some = prompts[first : first + rows]
        width = max(len(ids) for ids, _ in some)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in some])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in some])
        model.generate(ids, attention_mask=mask, max_new_tokens=max(new for _, new in some))


def many(drafter: Any) -> Callable[[Any, Prompts, int], None]:
    """`generate_many` with this drafter, or with none."""

    def run(model: Any, prompts: Prompts, rows: int) -> None:
        asked = [{"input_ids": ids, "max_new_tokens": new} for ids, new in prompts]
        for index, output in generate_many(model, asked, assistant_model=drafter, batch_size=rows):
            assert not isinstance(output, Exception), (index, output)

    return run


def main() -> None:
    """Runs all ways and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--drafter", nargs="+", default=["ngram"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--least", type=int, default=16, help="fewest new tokens")
    parser.add_argument("--most", type=int, default=96, help="most new tokens")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    model, tokenizer = load_target(options.target, options.dtype)
    model.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0, temperature=None, top_p=None)
    chosen = random.Random(0)
    prompts = [
        (inputs["input_ids"][0].tolist(), chosen.randint(options.least, options.most))
        for inputs in load_inputs(tokenizer, Path(options.prompts), options.num_prompts)
    ]
    ways: dict[str, Callable[[Any, Prompts, int], None]] = {
        "one by one": one_by_one,
        "fixed batches": fixed_batches,
        "generate_many": many(None),
        **{f"generate_many, {name}": many(load_drafter(name, model)) for name in options.drafter},
    }
    tokens, rates = sum(new for _, new in prompts), []
    for rows in options.rows:
        found = [str(rows)]
        for name, way in ways.items():
            if name == "one by one" and rows != options.rows[0]:
                found.append("")
                continue
            way(model, [(ids, 8) for ids, _ in prompts[: 2 * rows]], rows)
            began = time.perf_counter()
            way(model, prompts, rows)
            found.append(f"{tokens / (time.perf_counter() - began):.1f}")
            print(rows, name, found[-1], flush=True)
        rates.append(found)
    wide_console().print(table_of("tokens/s by rows", ["rows", *ways], rates))


if __name__ == "__main__":
    main()
