"""Plain decoding against drafters on the bundled model, greedy and at temperature 0.8: `make demo` runs this.

The same prompts go through every way of decoding in turn, so that a busy machine slows all of them alike; speedups are
taken prompt by prompt and reported as medians. `--model` and `--drafter` take any Hub ids or folders:

    python examples/quickstart.py --model Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16:tree_budget=64

`hf-specdec bench` measures more, and draws it.
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.benchmark import ways
from hf_specdec.benchmark.prompts import read_jsonl
from hf_specdec.benchmark.ways import Way
from hf_specdec.visualize import Trace, terminal_text

BUNDLED = Path(os.path.relpath(Path(__file__).parent / "tiny-code"))  # relative: the path goes into records
# A row each; trees on a CPU pay at small budgets, since every node costs.
BUNDLED_DRAFTERS = (
    "dflash:method=dflash",
    "dflash:method=ddtree,tree_budget=15",
    "specblock",
    "specbound",
    "draft-lm:method=causal_lm_chain",
    "specbranch",
)
PLAIN = "plain"
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
            "slowest_prompt": round(min(ratios), 3),
            "mean_acceptance_length": round(self.committed / self.rounds, 3) if self.rounds else None,
            "drafting_share": round(self.draft_s / sum(self.seconds), 3) if self.rounds else None,
        }


def ways_of(model: Any, drafters: list[str] | None, draft_model: str | None) -> dict[str, Way]:
    """Plain decoding, transformers' assisted generation where there is a draft model, and the drafters."""
    bundled = drafters is None
    found = [Way(PLAIN, "plain")]
    if draft_model is None and bundled and (BUNDLED / "draft-lm").is_dir():
        draft_model = str(BUNDLED / "draft-lm")
    if draft_model is not None:
        found.append(ways.stock_assisted(draft_model, model))
    # The look-up shows how much of what is said has been said before, which any drafter gains by.
    own = [str(BUNDLED / each) for each in BUNDLED_DRAFTERS if (BUNDLED / each.split(":")[0]).is_dir()]
    specs = drafters or ["ngram", *own]
    loaded = [way for spec in specs for way in ways.load(spec, model)]
    if bundled:  # one row per checkpoint: the method it leads with
        loaded = [way for spec, way in zip(specs, loaded, strict=True) if ":method=" in spec or way.leads]
    found = ways.distinct([*found, *loaded])
    methods = [way.name.split(" ")[0] if way.drafter is not None else way.name for way in found]
    # The method is name enough where no other row has it.
    return {method if methods.count(method) == 1 else way.name: way for method, way in zip(methods, found, strict=True)}


def generate(model: Any, inputs: Any, way: Way, temperature: float, new_tokens: int) -> tuple[torch.Tensor, float]:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    drafting = {}
    if way.drafter is not None:
        way.drafter.set_options(**way.settings)
        drafting = {"assistant_model": way.drafter}
    torch.manual_seed(0)
    started = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=new_tokens, **sampling, **way.arguments, **drafting)
    if output.is_cuda:
        torch.cuda.synchronize()
    return output[0, inputs["input_ids"].shape[1] :], time.perf_counter() - started


def report(console: Console, runs: dict[str, dict[float, Run]]) -> dict[float, dict[str, dict[str, Any]]]:
    """Prints a table per temperature; returns the figures by temperature and method."""
    figures: dict[float, dict[str, dict[str, Any]]] = {}
    for temperature in TEMPERATURES:
        table = Table(title="greedy" if temperature == 0 else f"temperature {temperature}")
        headings = ("method", "tokens/s", "speedup", "quartiles", "mean acceptance length", "drafting", "identical")
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "method" else "right")
        plain = runs[PLAIN][temperature]
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


def record_beside_weights(found: dict[str, Way], record: dict[str, Any]) -> None:
    """Writes into the folder of each drafter what was measured of it, and brings its card up to date.

    Tables that a method's own script has written (`measure_*.py`) say more, and are left alone.
    """
    by_folder: dict[str, list[str]] = {}
    for name, way in found.items():
        if way.drafter is not None and hasattr(way.drafter, "write_records"):
            by_folder.setdefault(way.drafter.name_or_path, []).append(name)
    for folder, names in by_folder.items():
        drafter = found[names[0]].drafter
        if "measure_" in (drafter.measurements or {}).get("command", ""):
            continue
        own = {name: row for name, row in record["methods"].items() if name in names}
        sampled = {name: row for name, row in record["sampled"]["methods"].items() if name in names}
        drafter.measurements = record | {
            "drafter": folder,
            "methods": own,
            "sampled": {"temperature": SAMPLED, "methods": sampled},
        }
        drafter.write_records(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(BUNDLED / "target"), help="target: Hub id or folder")
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="PATH[:OPTION=VALUE,...]",
        help="Hub id or folder, with drafting options; may be repeated. The bundled ones where omitted",
    )
    parser.add_argument("--draft-model", help="a small causal LM for transformers' own assisted generation")
    parser.add_argument("--prompts", type=Path, default=BUNDLED / "prompts.jsonl", help='lines of {"prompt": ...}')
    parser.add_argument("--num-prompts", type=int, default=24, help="0 for all")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafters' folders and cards")
    arguments = parser.parse_args()
    if arguments.drafter is None and arguments.model != str(BUNDLED / "target"):
        parser.error(f"--model {arguments.model} needs a drafter that was made for it: name one with --drafter.")

    console = Console()
    console.width = max(console.width, 100)  # the tables stay legible in logs
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        prompts = [prompt.text for prompt in read_jsonl(arguments.prompts)][: arguments.num_prompts or None]
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(device).eval()
        found = ways_of(model, arguments.drafter, arguments.draft_model)
    except (OSError, ValueError) as error:  # what was asked for is not there, or does not fit together
        parser.error(str(error))
    console.print(
        f"target {arguments.model}, {len(prompts)} held-out prompts, {arguments.new_tokens} new tokens, {device}"
    )
    runs = {name: {temperature: Run() for temperature in TEMPERATURES} for name in found}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=(1 + len(prompts)) * len(TEMPERATURES) * len(found))
        for position, prompt in enumerate([prompts[0], *prompts]):  # the first pass over the first prompt warms up
            inputs = tokenizer(prompt, return_tensors="pt").to(device)
            for temperature in TEMPERATURES:
                plain_ids = None
                for name, way in found.items():
                    new_ids, seconds = generate(model, inputs, way, temperature, arguments.new_tokens)
                    progress.advance(task)
                    plain_ids = new_ids if plain_ids is None else plain_ids
                    if position == 0:
                        continue
                    run = runs[name][temperature]
                    run.seconds.append(seconds)
                    run.tokens.append(len(new_ids))
                    run.identical.append(torch.equal(new_ids, plain_ids))
                    if way.drafter is not None:
                        run.committed += way.drafter.stats.num_accepted_draft_tokens + way.drafter.stats.num_spec_steps
                        run.rounds += way.drafter.stats.num_spec_steps
                        run.draft_s += way.drafter.stats.draft_time_s

    figures = report(console, runs)
    drafting = {name: row for name, row in figures[0.0].items() if found[name].drafter is not None}
    quickest = max(drafting, key=lambda name: drafting[name]["speedup"])
    best = found[quickest]
    best.drafter.trace = trace = Trace()
    generate(model, tokenizer(prompts[0], return_tensors="pt").to(device), best, 0.0, arguments.new_tokens)
    colour = sys.stdout.isatty()
    drafted, own = ("on green", "the underlined") if colour else ("in brackets", "the others")
    print(f"\nOne continuation by {quickest}; tokens {drafted} were drafted, {own} are the target's own:")
    print(terminal_text(trace, tokenizer, colour=colour))

    record = {
        "target": arguments.model,
        "methods": figures[0.0],
        "sampled": {"temperature": SAMPLED, "methods": figures[SAMPLED]},
        "prompts": f"{len(prompts)} held-out prompts, {arguments.new_tokens} new tokens",
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{device}, {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.record:
        record_beside_weights(found, record)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nStopped; nothing was written.")
