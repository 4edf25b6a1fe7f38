"""The speed suite: the time of a round, compared with the time to read the target's weights once.

    python -m examples.speed --shape qwen3-8b --part rounds baselines reference --output speed.json

It runs from the root of a checkout. Parts on random weights:

- `rounds`: time per round by network, context, nodes and `compile_mode`;
- `batch`: throughput of 1 to 32 ragged rows that finish at different times;
- `length`: time per round over thousands of tokens;
- `baselines`: plain, plain compiled with a static cache, stock assisted generation, stock DFlash;
- `reference`: the DDTree loop of the paper (`reference.py`), on the same weights and trees.

Their targets are `counting_target`s, their drafts are scripted (`scripted.py`), and a network of a published shape
(`--networks`: DFlash with blocks of 16, or EAGLE-3) runs in each round, so that drafting has its real cost.
`--shape tiny`, the default, is a dry run for a CPU: its numbers say nothing about 8B shapes.

Parts on the bundled model (`bundled.py`):

- `auto`: `tree_budget="auto"` compared with fixed budgets;
- `exact`: output of every drafter compared with plain decoding (`exactness.py`);
- `host`: time of a round on a CPU outside the two forwards (`host_time.py`).

The last table compares the results with the project's criteria (`criteria.py`). `gpu.py` runs the parts that need a
GPU, each for a limited time; `paper.py` computes what a round costs without one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CompileConfig, PreTrainedModel

import hf_specdec
from hf_specdec.benchmark.floor import copy_bandwidth, weight_bytes
from hf_specdec.benchmark.run import device_name
from hf_specdec.decoding.devices import wait_for
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.drafting.options import COMPILE_MODES
from hf_specdec.hub.loading import floating_dtype, usable_device
from hf_specdec.methods.dflash.network import DFlashDrafter

from .bundled import asked_for, auto, exact, host
from .criteria import verdicts
from .reference import reference_ddtree
from .scripted import NETWORKS, ScriptedDrafter, counting_target, draft_shape, rate_for, shapes

PROGRAM = "python -m examples.speed"
DEPTH = 15  # of the scripted path
Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--part", choices=sorted(PARTS), nargs="+", default=["rounds", "baselines"], help="(default: rounds baselines)")
    add("--shape", choices=sorted(shapes()), default="tiny", help="of target and network (default: tiny)")
    add("--device", help="default: the accelerator that torch finds, else cpu")
    add("--dtype", help="default: bfloat16 on cuda, else float32")
    add("--contexts", type=int, nargs="+", default=[1024, 8192], help="tokens of the prompt (default: 1024 8192)")
    add("--nodes", type=int, nargs="+", default=[16, 64], help="drafted nodes per tree (default: 16 64)")
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="rows (default: 1 2 4 8 16 32)")
    add("--modes", choices=COMPILE_MODES, nargs="+", help="of compile_mode (default: all on cuda, else none)")
    add("--compile-backend", default="inductor", help="of torch.compile, for plain decoding (default: inductor)")
    add("--tau", type=float, default=6.5, help="scripted mean acceptance length (default: 6.5)")
    add("--new-tokens", type=int, default=256, help="per call (default: 256)")
    add("--length", type=int, default=4000, help="new tokens for the part `length` (default: 4000)")
    add("--repeats", type=int, default=3, help="of each call, after one that warms up (default: 3)")
    add("--prompts-per-group", type=int, default=2, help="for the parts on the bundled model (default: 2)")
    add("--groups", nargs="+", help="of prompts, for the parts on the bundled model (default: all)")
    add("--variants", nargs="+", help="by name, for the parts `exact` and `baselines` (default: all)")
    add(
        "--networks",
        choices=[*NETWORKS, "none"],
        nargs="+",
        default=["dflash"],
        help="that draft; none: verification alone. Parts other than `rounds` use the first (default: dflash)",
    )
    add("--output", type=Path, help="also write the results to this JSON file")
    return options


class Bench:
    """Options, target, drafter's network and measured bandwidth of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = usable_device(options.device)
        default = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.dtype = floating_dtype(options.dtype) or default
        self.modes = options.modes or (COMPILE_MODES if self.device.type == "cuda" else COMPILE_MODES[:1])

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a large copy on the device."""
        return copy_bandwidth(self.device)

    @functools.cached_property
    def target(self) -> PreTrainedModel:
        """Built on first use: the parts on the bundled model do not need it."""
        return counting_target(self.options.shape, self.device, self.dtype)

    @functools.cached_property
    def networks(self) -> dict[str, Any]:
        """The networks of `--networks`, by name; None for "none"."""
        return {name: NETWORKS[name](self.target) if name in NETWORKS else None for name in self.options.networks}

    def drafter(self, nodes: int, mode: str, network: str | None = None) -> ScriptedDrafter:
        """A scripted drafter with a tree of `nodes` drafted nodes, the network's own tree budget too."""
        own = self.networks[network or self.options.networks[0]]
        if own is not None:
            own.set_options(tree_budget=nodes, compile_mode=mode)
        rate = rate_for(min(self.options.tau, 1 + min(DEPTH, nodes)), min(DEPTH, nodes))
        return ScriptedDrafter(own, tree_budget=nodes, depth=DEPTH, rate=rate, compile_mode=mode)

    def over_floor(self, seconds: float) -> float:
        """A time divided by the floor: the time to read the target's weights once at the measured bandwidth."""
        return seconds / (weight_bytes(self.target) / self.bandwidth)

    def prompt(self, context: int, batch: int = 1) -> torch.Tensor:
        """[batch, context] int64; each row counts up from a different number."""
        starts = 7 * torch.arange(batch, device=self.device).unsqueeze(1)
        return (starts + torch.arange(context, device=self.device)) % self.target.config.vocab_size

    def ragged(self, context: int, batch: int) -> tuple[dict[str, Any], list[int]]:
        """Left-padded prompts of at most `context` tokens whose continuations end at different times.

        Returns:
            arguments for `generate`: prompts, their mask, and the token that ends each row; and the number of new
            tokens per row, from `new_tokens` / batch to `new_tokens`.
        """
        end = self.target.config.vocab_size - 1
        tokens = [max(2, self.options.new_tokens * (row + 1) // batch) for row in range(batch)]
        lengths = torch.tensor([max(1, context - context * row // (2 * batch)) for row in range(batch)])
        last = torch.tensor([[end - new] for new in tokens], device=self.device)
        prompt = (last - torch.arange(context - 1, -1, -1, device=self.device)) % self.target.config.vocab_size
        mask = torch.arange(context) >= context - lengths.unsqueeze(1)
        mask = mask.to(self.device)
        arguments = {"attention_mask": mask.long(), "eos_token_id": end, "pad_token_id": 0}
        return {"prompt": prompt * mask, **arguments}, tokens

    def generate(self, prompt: torch.Tensor, new_tokens: int, **arguments: Any) -> tuple[torch.Tensor, float]:
        """Returns the output [batch, seq] int64 and the seconds of the whole call."""
        arguments.setdefault("attention_mask", torch.ones_like(prompt))
        self.wait()
        began = time.perf_counter()
        output = self.target.generate(prompt, max_new_tokens=new_tokens, do_sample=False, **arguments)
        self.wait()
        return output, time.perf_counter() - began

    def wait(self) -> None:
        """Waits for the device."""
        wait_for(self.device)

    def check(self, output: torch.Tensor, prompt: torch.Tensor, tokens: Sequence[int] | None = None) -> None:
        """Asserts that the target counted on, which the scripted drafts rely on.

        Args:
            output: [batch, seq] int64.
            prompt: [batch, context] int64.
            tokens: new tokens per row, end of text included; None if all rows have the same number.
        """
        new = output[:, prompt.shape[1] :]
        order = torch.arange(1, new.shape[1] + 1, device=new.device)
        expected = (prompt[:, -1:] + order) % self.target.config.vocab_size
        if tokens is not None:
            expected = expected * (order <= torch.tensor(tokens, device=new.device).unsqueeze(1))  # 0 is the padding
        assert torch.equal(new, expected)

    def of_calls(self, prompt: torch.Tensor, drafter: ScriptedDrafter) -> Row:
        """Runs one warm-up call and the repeats, and returns medians per round."""
        calls: list[tuple[SpeculationStats, float, int]] = []
        for repeat in range(self.options.repeats + 1):
            output, seconds = self.generate(prompt, self.options.new_tokens, assistant_model=drafter)
            self.check(output, prompt)
            assert drafter.stats is not None
            if repeat:
                calls.append((drafter.stats, seconds, output.numel() - prompt.numel()))
        return self.figures(calls, drafter.network)

    def figures(self, calls: Sequence[tuple[SpeculationStats, float, int]], network: Any) -> Row:
        """Medians over `calls` with the same settings: (statistics, seconds, new tokens of all rows) each."""

        def median(value: Callable[[SpeculationStats, float, int], float]) -> float:
            return statistics.median(value(*call) for call in calls)

        def decode_s(stats: SpeculationStats, seconds: float) -> float:
            return seconds - stats.stage_time_s["prefill"]

        round_s = median(lambda stats, seconds, _: decode_s(stats, seconds) / stats.num_target_forwards)
        verify_s = median(lambda stats, _s, _n: stats.stage_time_s["verify"] / stats.num_target_forwards)
        row: Row = {
            "round_ms": 1000 * round_s,
            "verify_ms": 1000 * verify_s,
            "draft_ms": 1000 * median(lambda stats, _s, _n: stats.draft_time_s / stats.num_target_forwards),
            "round_to_floor": self.over_floor(round_s),
            "verify_to_floor": self.over_floor(verify_s),
            "tokens_per_s": median(lambda stats, seconds, tokens: tokens / decode_s(stats, seconds)),
            "tau": median(lambda stats, _s, _n: stats.mean_acceptance_length),
        }
        if isinstance(network, nn.Module):
            head = [self.target.get_output_embeddings()] if isinstance(network, DFlashDrafter) else []
            row["drafter_floor_ms"] = 1000 * weight_bytes(network, borrowed=head) / self.bandwidth
        return row


def rounds(bench: Bench) -> Iterator[Row]:
    """Time per round by network, context, nodes and mode, and its ratio to the time at the first context."""
    for network, mode, nodes in itertools.product(bench.options.networks, bench.modes, bench.options.nodes):
        first = None
        for context in bench.options.contexts:
            figures = bench.of_calls(bench.prompt(context), bench.drafter(nodes, mode, network))
            first = first or figures["round_ms"]
            row = {"part": "rounds", "network": network, "mode": mode, "nodes": nodes, "context": context, **figures}
            yield row | {"times_first_context": figures["round_ms"] / first}


def batch(bench: Bench) -> Iterator[Row]:
    """Throughput by number of rows, at the first context and number of nodes; rows end at different times.

    `tokens_per_s` includes the prefill, because plain decoding does not report its prefill time separately.
    """
    context, nodes = bench.options.contexts[0], bench.options.nodes[0]
    for size in bench.options.batches:
        inputs, tokens = bench.ragged(context, size)
        variants: dict[str, dict[str, Any]] = {"plain": {}}
        variants |= {mode: {"assistant_model": bench.drafter(nodes, mode)} for mode in bench.modes}
        plain_s = 0.0
        for variant, arguments in variants.items():
            if variant != "plain":
                bench.drafter(nodes, variant)  # sets the options of the network, which all modes share
            taken = []
            for repeat in range(bench.options.repeats + 1):
                output, seconds = bench.generate(new_tokens=bench.options.new_tokens, **inputs, **arguments)
                bench.check(output, inputs["prompt"], tokens)
                taken += [seconds] if repeat else []
            seconds = statistics.median(taken)
            plain_s = plain_s or seconds
            row = {"part": "batch", "batch": size, "context": context, "nodes": nodes, "way": variant}
            row |= {"tokens_per_s": sum(tokens) / seconds, "speedup": plain_s / seconds}
            if variant != "plain":
                stats = arguments["assistant_model"].stats
                row |= {"rounds": stats.num_target_forwards, "tau": stats.mean_acceptance_length}
            yield row


def length(bench: Bench) -> Iterator[Row]:
    """Milliseconds per round in each quarter of one long text."""
    prompt = bench.prompt(bench.options.contexts[0])
    for mode in bench.modes:
        drafter = bench.drafter(bench.options.nodes[-1], mode)
        moments: list[float] = []
        make = drafter.candidate_generator

        def timed_generator(target: Any, make: Any = make, moments: list[float] = moments) -> Any:
            generator = make(target)
            draft = generator.draft

            def timed_draft(context: Any) -> Any:
                moments.append(time.perf_counter())
                return draft(context)

            generator.draft = timed_draft
            return generator

        drafter.candidate_generator = timed_generator  # type: ignore[method-assign]
        for _ in range(2):
            moments.clear()
            bench.generate(prompt, bench.options.length, assistant_model=drafter)
        taken = [1000 * (later - sooner) for sooner, later in itertools.pairwise(moments)]
        quarter = max(1, len(taken) // 4)
        parts = [statistics.median(taken[start : start + quarter]) for start in range(0, 4 * quarter, quarter)]
        row: Row = {"part": "length", "mode": mode, "new_tokens": bench.options.length, "quarters_ms": parts}
        yield row | {"last_over_first": parts[-1] / parts[0]}


def stock_variants(bench: Bench) -> tuple[dict[str, Callable[[], dict[str, Any]]], str | None]:
    """Decoding that transformers offers itself: plain, compiled with a static cache, with a draft model, DFlash.

    The draft model has the shape of the family's small model, the DFlash assistant that of our network. Both have the
    error rate of the scripted drafts.

    Returns:
        by name, or by those of `--variants`, functions that make arguments of `generate`; and the reason if this
        transformers has no DFlash, else None.

    Raises:
        ValueError: a name in `--variants` is unknown.
    """
    compiled = CompileConfig(backend=bench.options.compile_backend)
    compiled._compile_all_devices = True  # by default, generate compiles on accelerators only
    rate = rate_for(min(bench.options.tau, 1 + DEPTH), DEPTH)

    def with_draft_model() -> dict[str, Any]:
        small = draft_shape(bench.options.shape)
        return {"assistant_model": counting_target(small, bench.device, bench.dtype, error_rate=1 - rate)}

    variants: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "plain compiled": lambda: {"cache_implementation": "static", "compile_config": compiled},
        "stock assisted": with_draft_model,
    }
    note = None
    try:
        from .stock_dflash import ARGUMENTS, stock_dflash
    except ImportError as error:
        note = f"transformers {transformers.__version__} has no DFlash assistant: {error}"
    else:
        variants["stock DFlash"] = lambda: {"assistant_model": stock_dflash(bench.target, rate=rate), **ARGUMENTS}
    return {name: variants[name] for name in asked_for(bench.options.variants, variants)}, note


def baselines(bench: Bench) -> Iterator[Row]:
    """Time per token of each entry of `stock_variants`."""
    variants, note = stock_variants(bench)
    if note is not None:
        yield {"part": "baselines", "way": "stock DFlash", "note": note}
    for variant, make in variants.items():
        arguments = make()
        for context in bench.options.contexts:
            prompt, seconds, prefill = bench.prompt(context), [], []
            for repeat in range(bench.options.repeats + 1):
                _, first = bench.generate(prompt, 1, **arguments)
                output, whole = bench.generate(prompt, bench.options.new_tokens, **arguments)
                bench.check(output, prompt)
                if repeat:
                    seconds.append(whole)
                    prefill.append(first)
            per_token = (statistics.median(seconds) - statistics.median(prefill)) / (bench.options.new_tokens - 1)
            row: Row = {"part": "baselines", "way": variant, "context": context, "token_ms": 1000 * per_token}
            yield row | {"token_to_floor": bench.over_floor(per_token), "tokens_per_s": 1 / per_token}


def reference(bench: Bench) -> Iterator[Row]:
    """The reference DDTree loop and ours, on the same weights and the same scripted trees."""
    network = bench.networks.get("dflash")
    if network is None:
        raise ValueError(f"The part `reference` drafts with a DFlash network: add dflash to {bench.options.networks}.")
    nodes, vocab = bench.options.nodes[-1], bench.target.config.vocab_size
    for context in bench.options.contexts:
        prompt = bench.prompt(context)
        ours = {mode: bench.of_calls(prompt, bench.drafter(nodes, mode, "dflash")) for mode in bench.modes}
        network.set_options(compile_mode="none")
        runs = []
        for repeat in range(bench.options.repeats + 1):
            scripted = bench.drafter(nodes, "none", "dflash").script(vocab)
            run = reference_ddtree(bench.target, network, prompt, bench.options.new_tokens, nodes, scripted)
            bench.check(run.token_ids, prompt)
            runs += [run] if repeat else []
        seconds = statistics.median(run.seconds for run in runs)
        own = (bench.options.new_tokens - 1) / seconds
        lengths = runs[0].acceptance_lengths
        round_s = seconds / len(lengths)
        row: Row = {"part": "reference", "context": context, "nodes": nodes, "way": "reference"}
        row |= {"round_ms": 1000 * round_s, "round_to_floor": bench.over_floor(round_s)}
        yield row | {"tokens_per_s": own, "tau": statistics.fmean(lengths), "times_reference": 1.0}
        for mode, figures in ours.items():
            row = {"part": "reference", "context": context, "nodes": nodes, "way": mode}
            row |= {name: figures[name] for name in ("round_ms", "round_to_floor", "tokens_per_s", "tau")}
            yield row | {"times_reference": figures["tokens_per_s"] / own}


PARTS: dict[str, Callable[[Bench], Iterable[Row]]] = {
    "auto": auto, "baselines": baselines, "batch": batch, "exact": exact, "host": host, "length": length,
    "reference": reference, "rounds": rounds,
}  # fmt: skip


def environment(bench: Bench, argv: Sequence[str]) -> Row:
    """Command, date, hardware, options and versions of a run."""
    on_cpu = bench.device.type == "cpu"
    return {
        "command": shlex.join([*PROGRAM.split(), *argv]),
        "date": date.today().isoformat(),
        "device": f"CPU, {torch.get_num_threads()} threads" if on_cpu else device_name(bench.device),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "shape": bench.options.shape,
        "on_gpu": bench.device.type == "cuda",
        "bandwidth_gb_per_s": bench.bandwidth / 1e9,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_specdec": hf_specdec.__version__,
        },
    }


def table(rows: Sequence[Row]) -> str:
    """Rows of one part as text, with a column per key."""

    def shown(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3g}" if value < 100 else f"{value:.0f}"
        return " ".join(map(shown, value)) if isinstance(value, list) else str(value)

    names = list(dict.fromkeys(name for row in rows for name in row if name != "part"))
    lines = [names] + [[shown(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table per part, and with `--output` writes all rows and the environment.

    Args:
        argv: arguments of the command; None for those of the process.

    Returns:
        0; or 2 for unusable arguments or models, with the reason on stderr.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(argv)
    try:
        _measure(options, argv)
    except (ValueError, OSError, ImportError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(options: argparse.Namespace, argv: Sequence[str]) -> None:
    bench = Bench(options)
    report: Row = {"environment": environment(bench, argv), "rows": []}
    print(json.dumps(report["environment"]))
    for part in bench.options.part:
        rows: list[Row] = []
        for row in PARTS[part](bench):
            rows.append(row)
            report["judged"] = verdicts(report["environment"], [*report["rows"], *rows])
            if bench.options.output is not None:  # after each row: a later one may run out of time
                whole = report | {"rows": [*report["rows"], *rows]}
                unfinished = bench.options.output.with_suffix(".unfinished")
                unfinished.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
                unfinished.replace(bench.options.output)
        report["rows"] += rows
        print(f"\n{part}\n{table(rows)}", flush=True)
    print(f"\ncriteria\n{table(report['judged'])}")


if __name__ == "__main__":
    sys.exit(main())
