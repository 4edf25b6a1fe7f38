"""What early exit gains on the bundled target: speedup per prompt, ablations, layer work and time to first token.

    python examples/measure_specbound.py --record

The same prompts go through every variant in turn, so that a busy machine slows all of them alike; speedups are taken
prompt by prompt. With `--repeats` the quickest of several calls counts, for either side, so that what the machine did
meanwhile is not taken for the method. Variants: the drafter as saved, and without its annealing, its depth bound or its
width bound, as in SpecBound's Figure 4, or without learning from refused drafts. `--record` writes the figures into the
drafter's folder and card.
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
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from hf_specdec import load_drafter
from hf_specdec.benchmark.prompts import read_jsonl

BUNDLED = Path(os.path.relpath(Path(__file__).parent / "tiny-code"))  # relative: the path goes into records
UNBOUNDED_WIDTH = 64


class FirstToken(BaseStreamer):
    """Notes when the first new token arrives; the prompt comes before it."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Nothing to do."""


@dataclass
class Run:
    """What one variant did over all prompts."""

    seconds: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    identical: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    taus: list[tuple[int, int]] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)

    def ratios(self, plain: Run) -> list[float]:
        """Tokens per second over plain decoding's, by prompt; an ablation has had the first prompts only."""
        rates = ([t / s for t, s in zip(run.tokens, run.seconds, strict=True)] for run in (self, plain))
        return [own / base for own, base in zip(*rates, strict=False)]

    def summary(self, plain: Run) -> dict[str, Any]:
        ratios = self.ratios(plain)
        committed, rounds = (sum(column) for column in zip(*self.taus, strict=True))
        return {
            "mean_acceptance_length": round(committed / rounds, 3),
            "speedup": round(statistics.median(ratios), 3),
            "slowest_prompt": round(min(ratios), 3),
            "fastest_prompt": round(max(ratios), 3),
            "layers_per_token": round(statistics.mean(self.layers), 2),
            "identical": all(self.identical),
        }


def generate(model: Any, inputs: Any, sampling: dict[str, Any], arguments: Any, **extra: Any) -> tuple[Any, ...]:
    """New token ids, and the least seconds of all and of the first token over the repeats, which give equal tokens."""
    seconds, first_s = [], []
    for _ in range(arguments.repeats):
        streamer = FirstToken()
        torch.manual_seed(0)
        started = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=arguments.new_tokens, streamer=streamer, **sampling, **extra)
        seconds.append(time.perf_counter() - started)
        first_s.append(streamer.at - started)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), min(seconds), min(first_s)


def distribution(ratios: list[float], bins: int = 5) -> str:
    """Prompts per range of speedup, as in the paper's Table 5."""
    low, high = min(ratios), max(ratios)
    step = (high - low) / bins or 1.0
    counts = [0] * bins
    for ratio in ratios:
        counts[min(bins - 1, int((ratio - low) / step))] += 1
    ranges = [
        f"{low + index * step:.2f}-{low + (index + 1) * step:.2f}x: {count} ({count / len(ratios):.0%})"
        for index, count in enumerate(counts)
    ]
    return "; ".join(reversed(ranges))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(BUNDLED / "target"), help="target: Hub id or folder")
    parser.add_argument("--drafter", default=str(BUNDLED / "specbound"), help="drafter: Hub id or folder")
    parser.add_argument("--prompts", type=Path, default=BUNDLED / "prompts.jsonl", help='lines of {"prompt": ...}')
    parser.add_argument("--num-prompts", type=int, default=0, help="0 for all")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1, help="calls per prompt and variant; the quickest counts")
    parser.add_argument("--ablations", type=int, default=24, help="prompts for ablations and sampling; 0 for none")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafter's folder and card")
    arguments = parser.parse_args()

    console = Console()
    console.width = max(console.width, 120)  # the table stays legible in logs
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(device).eval()
    drafter: Any = load_drafter(arguments.drafter, target=model)
    saved = drafter.options
    unbounded_depth = {"d_max": drafter.config.num_target_layers}
    greedy: dict[str, Any] = {"do_sample": False}
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"specbound": ({}, greedy)}
    if arguments.ablations:
        variants |= {
            "specbound, no annealing": ({"alpha": 0.0}, greedy),
            "specbound, no depth bound": (unbounded_depth, greedy),
            "specbound, no width bound": ({"w_max": UNBOUNDED_WIDTH}, greedy),
            "specbound, refusals not learned": ({"learn_refusals": False}, greedy),
        }
        for temperature in (0.3, 1.0):
            sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.9, "top_k": 0}
            variants[f"specbound at temperature {temperature}"] = ({}, sampling)

    prompts = [prompt.text for prompt in read_jsonl(arguments.prompts)]
    prompts = prompts[: arguments.num_prompts or None]
    runs = {name: Run() for name in variants}
    plain: dict[str, Run] = {}
    for position, prompt in enumerate(track([prompts[0], *prompts], console=console, transient=True)):
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
        alone: dict[str, list[int]] = {}
        for name, (options, sampling) in variants.items():
            if name != "specbound" and position > arguments.ablations:
                continue
            kind = json.dumps(sampling)
            if kind not in alone:  # plain decoding once per way of choosing
                alone[kind], seconds, first = generate(model, inputs, sampling, arguments)
                if position:  # the first pass over the first prompt warms up
                    base = plain.setdefault(kind, Run())
                    base.seconds.append(seconds)
                    base.first_token_s.append(first)
                    base.tokens.append(len(alone[kind]))
            drafter.options = saved
            drafter.set_options(**options)
            new_ids, seconds, first = generate(model, inputs, sampling, arguments, assistant_model=drafter)
            if not position:
                continue
            run, stats = runs[name], drafter.stats
            run.seconds.append(seconds)
            run.first_token_s.append(first)
            run.tokens.append(len(new_ids))
            run.identical.append(new_ids == alone[kind])
            run.taus.append((stats.num_accepted_draft_tokens + stats.num_spec_steps, stats.num_spec_steps))
            run.layers.append(stats.layers_per_token)
    drafter.options = saved

    figures = {name: run.summary(plain[json.dumps(variants[name][1])]) for name, run in runs.items()}
    table = Table(title=f"{len(prompts)} held-out prompts, {arguments.new_tokens} new tokens, {device}")
    for heading in ("variant", "speedup", "slowest", "fastest", "mean acceptance length", "layers per token", "same"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, row in figures.items():
        drawn = variants[name][1]["do_sample"]
        if drawn:
            del row["identical"]  # other draws, the same law
        table.add_row(
            name,
            *(f"{row[key]:.2f}x" for key in ("speedup", "slowest_prompt", "fastest_prompt")),
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['layers_per_token']:.1f}",
            "" if drawn else "yes" if row["identical"] else "NO",
        )
    console.print(table)
    own, base = runs["specbound"], plain[json.dumps(greedy)]
    spread = distribution(own.ratios(base))
    firsts = [statistics.median(run.first_token_s) * 1e3 for run in (own, base)]
    later = statistics.median(a / b for a, b in zip(own.first_token_s, base.first_token_s, strict=True)) - 1
    first_token = f"{firsts[0]:.1f} ms, plain {firsts[1]:.1f} ms; {later:+.1%} in the median prompt"
    console.print(f"speedup by prompts: {spread}\ntime to first token: {first_token}")
    if not arguments.record:
        return
    sampled = {name: row for name, row in figures.items() if variants[name][1]["do_sample"]}
    drafter.measurements = {
        "target": arguments.model,
        "methods": {name: row for name, row in figures.items() if name not in sampled},
        **({"sampled": {"temperature": "as named, top-p 0.9", "methods": sampled}} if sampled else {}),
        "prompts": f"{len(prompts)} held-out prompts ({min(len(prompts), arguments.ablations)} for the variants), "
        f"{arguments.new_tokens} new tokens, best of {arguments.repeats}",
        "slowest_prompt": f"{figures['specbound']['slowest_prompt']:.2f}x",
        "speedup_by_prompts": spread,
        "time_to_first_token": first_token,
        "layers_of_the_target_per_token": "; ".join(
            f"{row['layers_per_token']:.1f} ({n})" for n, row in figures.items()
        ),
        "options": ", ".join(f"{name} {value}" for name, value in asdict(saved).items()),
        "command": shlex.join(["python", *sys.argv]),
        "hardware": f"{device}, {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": date.today().isoformat(),
    }
    drafter.write_records(arguments.drafter)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nStopped; nothing was written.")
