"""Plain decoding against draft trees on the bundled model, greedy and at temperature 0.8: `make demo` runs this.

The same prompts go through every way of decoding in turn, so that a busy machine slows all of them alike; speedups are
taken prompt by prompt and reported as medians. `--model` and `--drafter` take any Hub ids or folders.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import load_drafter

BUNDLED = Path(os.path.relpath(Path(__file__).parent / "tiny-code"))  # relative: the path goes into records
SAMPLED = 0.8
TEMPERATURES = (0.0, SAMPLED)


@dataclass
class Run:
    """What one way of decoding did over all prompts at one temperature."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    identical: list[bool] = field(default_factory=list)
    committed: int = 0
    rounds: int = 0
    draft_s: float = 0.0
    per_round: list[list[int]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def summary(self, plain: Run) -> dict[str, Any]:
        ratios = [own / base for own, base in zip(self.rates, plain.rates, strict=True)]
        return {
            "tokens_per_s": round(sum(self.tokens) / sum(self.seconds), 1),
            "speedup": round(statistics.median(ratios), 3),
            "speedup_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]]
            if len(ratios) > 1
            else [],
            "mean_acceptance_length": round(self.committed / self.rounds, 3) if self.rounds else None,
            "drafting_share": round(self.draft_s / sum(self.seconds), 3) if self.rounds else None,
        }


def generate(model: Any, inputs: Any, temperature: float, new_tokens: int, **extra: Any) -> tuple[torch.Tensor, float]:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    torch.manual_seed(0)
    started = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=new_tokens, **sampling, **extra)
    if output.is_cuda:
        torch.cuda.synchronize()
    return output[0, inputs["input_ids"].shape[1] :], time.perf_counter() - started


def shade(tokenizer: Any, tokens: list[int], per_round: list[int]) -> Text:
    """The continuation with accepted draft tokens in colour; the rest are the target's own (bonus) tokens."""
    accepted = [False]  # the first token comes from the prefill
    for kept in per_round:
        accepted += [True] * kept + [False]
    text = Text()
    for token, was_drafted in zip(tokens, accepted, strict=False):
        text.append(tokenizer.decode([token]), style="black on green" if was_drafted else "bold")
    return text


def report(console: Console, runs: dict[str, dict[float, Run]]) -> dict[float, dict[str, dict[str, Any]]]:
    """Prints a table per temperature; returns the figures by temperature and method."""
    figures: dict[float, dict[str, dict[str, Any]]] = {}
    for temperature in TEMPERATURES:
        table = Table(title="greedy" if temperature == 0 else f"temperature {temperature}")
        for heading in (
            "method",
            "tokens/s",
            "speedup",
            "quartiles",
            "mean acceptance length",
            "drafting",
            "identical",
        ):
            table.add_column(heading, justify="left" if heading == "method" else "right")
        plain = runs["plain"][temperature]
        figures[temperature] = {
            name: by_temperature[temperature].summary(plain) for name, by_temperature in runs.items()
        }
        for name, row in figures[temperature].items():
            if temperature == 0:
                row["identical"] = all(runs[name][temperature].identical)
            tau, share = row["mean_acceptance_length"], row["drafting_share"]
            table.add_row(
                name,
                f"{row['tokens_per_s']:.0f}",
                f"{row['speedup']:.2f}x",
                "-".join(f"{quartile:.2f}" for quartile in row["speedup_quartiles"]),
                "-" if tau is None else f"{tau:.2f}",
                "-" if share is None else f"{share:.0%}",
                ("yes" if row["identical"] else "NO") if temperature == 0 else "",
            )
        console.print(table)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(BUNDLED / "target"), help="target: Hub id or folder")
    parser.add_argument("--drafter", default=str(BUNDLED / "dflash"), help="drafter: Hub id or folder")
    parser.add_argument("--draft-model", help="a small causal LM for transformers' own assisted generation")
    parser.add_argument("--prompts", type=Path, default=BUNDLED / "prompts.jsonl", help='lines of {"prompt": ...}')
    parser.add_argument("--num-prompts", type=int, default=32, help="0 for all")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--tree-budget", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafter's folder and card")
    arguments = parser.parse_args()

    console = Console()
    console.width = max(console.width, 100)  # the tables stay legible in logs
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(device).eval()
    chain = load_drafter(arguments.drafter, target=model, method="dflash")
    tree = load_drafter(arguments.drafter, target=model, method="ddtree", tree_budget=arguments.tree_budget)
    ways: dict[str, dict[str, Any]] = {"plain": {}}
    draft_model = arguments.draft_model
    if draft_model is None and arguments.model == str(BUNDLED / "target"):
        draft_model = str(BUNDLED / "draft-lm")
    if draft_model is not None:
        assistant = AutoModelForCausalLM.from_pretrained(draft_model, dtype=dtype).to(device).eval()
        ways["stock assisted"] = {"assistant_model": assistant}
    ways |= {"dflash": {"assistant_model": chain}, "ddtree": {"assistant_model": tree}}

    prompts = [json.loads(line)["prompt"] for line in arguments.prompts.read_text().splitlines()]
    prompts = prompts[: arguments.num_prompts or None]
    console.print(
        f"target {arguments.model}, {len(prompts)} held-out prompts, {arguments.new_tokens} new tokens, {device}"
    )
    runs = {name: {temperature: Run() for temperature in TEMPERATURES} for name in ways}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=len(prompts) * len(TEMPERATURES) * len(ways))
        for position, prompt in enumerate([prompts[0], *prompts]):  # the first pass over the first prompt warms up
            inputs = tokenizer(prompt, return_tensors="pt").to(device)
            for temperature in TEMPERATURES:
                plain_ids = None
                for name, extra in ways.items():
                    new_ids, seconds = generate(model, inputs, temperature, arguments.new_tokens, **extra)
                    plain_ids = new_ids if plain_ids is None else plain_ids
                    if position == 0:
                        continue
                    run = runs[name][temperature]
                    run.seconds.append(seconds)
                    run.tokens.append(len(new_ids))
                    run.identical.append(torch.equal(new_ids, plain_ids))
                    drafter = extra.get("assistant_model")
                    if drafter in (chain, tree):
                        run.committed += drafter.stats.num_accepted_draft_tokens + drafter.stats.num_spec_steps
                        run.rounds += drafter.stats.num_spec_steps
                        run.draft_s += drafter.stats.draft_time_s
                        run.per_round.append(drafter.stats.per_step_accepted[0])
                    progress.advance(task)

    figures = report(console, runs)
    inputs = tokenizer(prompts[0], return_tensors="pt").to(device)
    new_ids, _ = generate(model, inputs, 0.0, arguments.new_tokens, assistant_model=tree)
    console.print("\nOne continuation; tokens on green were drafted and accepted, the others are the target's own:")
    console.print(Text(prompts[0]), shade(tokenizer, new_ids.tolist(), tree.stats.per_step_accepted[0]), sep="")

    record = {
        "target": arguments.model,
        "drafter": arguments.drafter,
        "methods": figures[0.0],
        "sampled": {"temperature": SAMPLED, "methods": figures[SAMPLED]},
        "prompts": f"{len(prompts)} held-out prompts, {arguments.new_tokens} new tokens",
        "tree_budget": arguments.tree_budget,
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{device}, {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.record:
        own = {"dflash", "ddtree"}
        tree.measurements = record | {
            "methods": {name: row for name, row in figures[0.0].items() if name in own},
            "sampled": {
                "temperature": SAMPLED,
                "methods": {name: row for name, row in figures[SAMPLED].items() if name in own},
            },
        }
        tree.write_records(arguments.drafter)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nStopped; nothing was written.")
