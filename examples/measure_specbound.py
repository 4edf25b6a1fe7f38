"""Early exit on the bundled target: speedup per prompt, ablations, layers per token and time to first token.

    python examples/measure_specbound.py --record

For each prompt all variants run in turn, so that other load on the machine slows all of them alike; speedups are
computed per prompt. With `--repeats` the fastest of several calls counts, for plain decoding too. Variants: the drafter
as saved, and without annealing, depth bound or width bound (Figure 4 of SpecBound), or without learning from rejected
drafts. `--record` writes the figures into the drafter's folder and card.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from bundle import TINY
from harness import DEVICE, about, acceptance_for, load_inputs, load_target, table_of, wide_console
from rich.progress import track

from hf_specdec import load_drafter
from hf_specdec.benchmark.calls import Clock

UNBOUNDED_WIDTH = 64


@dataclass
class Run:
    """Measurements of one variant, one per prompt."""

    seconds: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    identical: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    taus: list[tuple[int, int]] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)

    def ratios(self, plain: Run) -> list[float]:
        """Speedup over plain decoding per prompt; ablations run on the first prompts only."""
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
    """New token ids, and the smallest time of the call and of its first token over the repeats, in seconds."""
    seconds, first_s = [], []
    for _ in range(arguments.repeats):
        torch.manual_seed(0)
        clock = Clock(batch=1)
        output = model.generate(**inputs, max_new_tokens=arguments.new_tokens, streamer=clock, **sampling, **extra)
        seconds.append(time.perf_counter() - clock.started)
        first_s.append(clock.times[0] - clock.started)
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


def exits_of(drafter: Any) -> dict[str, dict[str, str]]:
    """How often each head is right, from the training record, and how often it would have to be for a speedup of 1.

    Eq. 5 with d_max at the exit: as many accepted tokens as a round takes forwards, 1 + (w - 1) d / L.
    """
    losses = (drafter.training_record or {}).get("losses", {})
    width, layers = drafter.options.w_max, drafter.config.num_target_layers
    return {
        f"layer {exit_layer}": {
            "right": f"{losses[f'accuracy_layer_{exit_layer}']:.1%}",
            f"needed at width {width}": f"{acceptance_for(1 + (width - 1) * exit_layer / layers, width):.1%}",
        }
        for exit_layer in drafter.config.exit_layers
        if f"accuracy_layer_{exit_layer}" in losses
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY.target, help="target: Hub id or folder")
    parser.add_argument("--drafter", default=str(TINY.folder / "specbound"), help="drafter: Hub id or folder")
    parser.add_argument("--prompts", type=Path, default=TINY.prompts, help='lines of {"prompt": ...}')
    parser.add_argument("--num-prompts", type=int, default=0, help="0 for all")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1, help="calls per prompt and variant; the fastest counts")
    parser.add_argument("--ablations", type=int, default=24, help="prompts for ablations and sampling; 0 for none")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafter's folder and card")
    arguments = parser.parse_args()

    console = wide_console()
    model, tokenizer = load_target(arguments.model)
    drafter: Any = load_drafter(arguments.drafter, target=model, pauses=False)
    saved = drafter.options
    unbounded_depth = {"d_max": drafter.config.num_target_layers}
    greedy: dict[str, Any] = {"do_sample": False}
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"specbound": ({}, greedy)}
    if arguments.ablations:
        variants |= {
            "specbound, no annealing": ({"alpha": 0.0}, greedy),
            "specbound, no depth bound": (unbounded_depth, greedy),
            "specbound, no width bound": ({"w_max": UNBOUNDED_WIDTH}, greedy),
            "specbound, rejections not learned": ({"learn_refusals": False}, greedy),
        }
        for temperature in (0.3, 1.0):
            sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.9, "top_k": 0}
            variants[f"specbound at temperature {temperature}"] = ({}, sampling)

    prompts = load_inputs(tokenizer, arguments.prompts, arguments.num_prompts)
    runs = {name: Run() for name in variants}
    plain: dict[str, Run] = {}
    for position, inputs in enumerate(track([prompts[0], *prompts], console=console, transient=True)):
        alone: dict[str, list[int]] = {}
        for name, (options, sampling) in variants.items():
            if name != "specbound" and position > arguments.ablations:
                continue
            kind = json.dumps(sampling)
            if kind not in alone:  # plain decoding once for each kind of sampling
                alone[kind], seconds, first = generate(model, inputs, sampling, arguments)
                if position:  # the first call warms up
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
    rows = []
    for name, row in figures.items():
        sampled = variants[name][1]["do_sample"]
        same = "" if sampled else "yes" if row["identical"] else "NO"
        if sampled:
            del row["identical"]  # other random draws from the same distribution
        speedups = (f"{row[key]:.2f}x" for key in ("speedup", "slowest_prompt", "fastest_prompt"))
        lengths = (f"{row['mean_acceptance_length']:.2f}", f"{row['layers_per_token']:.1f}")
        rows.append([name, *speedups, *lengths, same])
    headings = ("variant", "speedup", "slowest", "fastest", "mean acceptance length", "layers per token", "same")
    title = f"{len(prompts)} held-out prompts, {arguments.new_tokens} new tokens, {DEVICE}"
    console.print(table_of(title, headings, rows))
    own, base = runs["specbound"], plain[json.dumps(greedy)]
    spread = distribution(own.ratios(base))
    firsts = [statistics.median(run.first_token_s) * 1e3 for run in (own, base)]
    later = statistics.median(a / b for a, b in zip(own.first_token_s, base.first_token_s, strict=True)) - 1
    first_token = f"{firsts[0]:.1f} ms, plain {firsts[1]:.1f} ms; {later:+.1%} in the median prompt"
    console.print(f"speedup by prompts: {spread}\ntime to first token: {first_token}")
    exits = exits_of(drafter)
    if exits:
        console.print(
            table_of("exits", ("exit", *next(iter(exits.values()))), [[n, *row.values()] for n, row in exits.items()])
        )
    if not arguments.record:
        return
    by_sampling = {name: row for name, row in figures.items() if variants[name][1]["do_sample"]}
    drafter.measurements = {
        "target": arguments.model,
        "methods": {name: row for name, row in figures.items() if name not in by_sampling},
        **({"sampled": {"temperature": "as named, top-p 0.9", "methods": by_sampling}} if by_sampling else {}),
        "prompts": f"{len(prompts)} held-out prompts ({min(len(prompts), arguments.ablations)} for the variants), "
        f"{arguments.new_tokens} new tokens, best of {arguments.repeats}",
        "slowest_prompt": f"{figures['specbound']['slowest_prompt']:.2f}x",
        "speedup_by_prompts": spread,
        "time_to_first_token": first_token,
        "layers_of_the_target_per_token": "; ".join(
            f"{row['layers_per_token']:.1f} ({n})" for n, row in figures.items()
        ),
        "options": ", ".join(f"{name} {value}" for name, value in asdict(saved).items()),
        **about(),
    }
    if exits:
        drafter.training_record["exits"] = {"by_exit": exits, "command": drafter.measurements["command"]}
    drafter.write_records(arguments.drafter)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nStopped; nothing was written.")
