"""`hf-specdec bench --suite speed`: what a round costs beside reading the target's weights once.

    hf-specdec bench --suite speed --shape qwen3-8b --part rounds baselines reference --output speed.json

Parts: `rounds` (time per round by context, nodes and mode), `batch` (1 to 32 ragged rows
that finish at different times), `length` (does a round grow dearer over thousands of tokens), `baselines` (plain, plain
compiled with a static cache, stock assisted generation, stock DFlash), `reference` (the DDTree loop as its authors
describe it, on the same weights and trees), and on the bundled model `auto` (`tree_budget="auto"` against fixed
budgets), `exact` (output of every drafter against plain decoding's, with the target's top-2 gap at every first
difference, and a defined bound for what rounding explains: `exactness.py`) and `host` (what a round takes on a CPU
besides the two forwards, `host.py`). Targets of the others are `counting_target`s, drafts are scripted (`scripted.py`),
and a DFlash network of the same shape runs in each round for what it costs. `--shape tiny`, the default, is a dry run
for a CPU: its numbers say nothing about 8B shapes. What the speed of a round is judged by stands at the end, "not
measured" where this run has not measured it (`judged.py`).
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
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CompileConfig, PreTrainedModel

import hf_specdec
from hf_specdec.benchmark.floor import copy_bandwidth, round_to_floor, weight_bytes
from hf_specdec.benchmark.judged import judged
from hf_specdec.benchmark.reference import reference_ddtree
from hf_specdec.benchmark.run import device_name
from hf_specdec.benchmark.scripted import (
    ScriptedDrafter,
    counting_target,
    draft_shape,
    drafter_network,
    rate_for,
    shapes,
)
from hf_specdec.benchmark.speed_bundled import auto, exact, host
from hf_specdec.decoding.devices import wait_for
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.options import COMPILE_MODES
from hf_specdec.hub.loading import floating_dtype, usable_device

DEPTH = 15
Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="hf-specdec bench --suite speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--part",
        choices=sorted(PARTS),
        nargs="+",
        default=["rounds", "baselines"],
        help="what is measured, see above (default: rounds baselines)",
    )
    options.add_argument(
        "--shape", choices=sorted(shapes()), default="tiny", help="of target and network (default: tiny)"
    )
    options.add_argument("--device", help="default: the accelerator that torch finds, else cpu")
    options.add_argument("--dtype", help="default: bfloat16 on cuda, else float32")
    options.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 8192], help="tokens of the prompt (default: 1024 8192)"
    )
    options.add_argument(
        "--nodes", type=int, nargs="+", default=[16, 64], help="drafted nodes per tree (default: 16 64)"
    )
    options.add_argument(
        "--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="rows (default: 1 2 4 8 16 32)"
    )
    options.add_argument(
        "--modes", choices=COMPILE_MODES, nargs="+", default=None, help="default: both on cuda, else none"
    )
    options.add_argument(
        "--compile-backend", default="inductor", help="of torch.compile, for plain decoding (default: inductor)"
    )
    options.add_argument("--tau", type=float, default=6.5, help="scripted mean acceptance length (default: 6.5)")
    options.add_argument("--new-tokens", type=int, default=256, help="of each call (default: 256)")
    options.add_argument("--length", type=int, default=4000, help="new tokens of the part `length` (default: 4000)")
    options.add_argument("--repeats", type=int, default=3, help="of each call (default: 3)")
    options.add_argument(
        "--prompts-per-group", type=int, default=2, help="of the parts on the bundled model (default: 2)"
    )
    options.add_argument("--groups", nargs="+", default=None, help="of prompts, for the same parts; default: all")
    options.add_argument("--ways", nargs="+", default=None, help="of drafting, for the part `exact`; default: all")
    options.add_argument("--no-network", action="store_true", help="drafts cost nothing: verify alone")
    options.add_argument("--output", type=Path, default=None, help="JSON file to write as well; default: none")
    return options


class Bench:
    """Target, drafter and measured bandwidth of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = usable_device(options.device)
        default = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.dtype = floating_dtype(options.dtype) or default
        self.modes = options.modes or (COMPILE_MODES if self.device.type == "cuda" else COMPILE_MODES[:1])
        self._target: PreTrainedModel | None = None
        self._network: DFlashDrafter | None = None

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy, measured when it is first asked for."""
        return copy_bandwidth(self.device)

    @property
    def target(self) -> PreTrainedModel:
        """Made when it is first asked for: not every part needs it."""
        if self._target is None:
            self._target = counting_target(self.options.shape, self.device, self.dtype)
            self._network = None if self.options.no_network else drafter_network(self._target)
        return self._target

    @property
    def network(self) -> DFlashDrafter:
        """What drafting costs.

        Raises:
            ValueError: this run does without.
        """
        _ = self.target
        if self._network is None:
            raise ValueError("The part `reference` runs the drafter's network in each round: leave out --no-network.")
        return self._network

    def drafter(self, nodes: int, mode: str) -> ScriptedDrafter:
        """A scripted drafter of this many nodes; the network beside it drafts as many."""
        _ = self.target
        if self._network is not None:
            self._network.set_options(tree_budget=nodes, compile_mode=mode)
        rate = rate_for(min(self.options.tau, 1 + min(DEPTH, nodes)), min(DEPTH, nodes))
        return ScriptedDrafter(self._network, tree_budget=nodes, depth=DEPTH, rate=rate, compile_mode=mode)

    def prompt(self, context: int, batch: int = 1) -> torch.Tensor:
        """[batch, context] int64, counting up from another number in each row."""
        starts = 7 * torch.arange(batch, device=self.device).unsqueeze(1)
        return (starts + torch.arange(context, device=self.device)) % self.target.config.vocab_size

    def ragged(self, context: int, batch: int) -> tuple[dict[str, Any], list[int]]:
        """Rows of `context` tokens and less that end at different times.

        Returns:
            arguments for `generate`: left-padded prompts, their mask, and the token that ends each row; and how many
            tokens each row gets: from `new_tokens` / batch up to `new_tokens`.
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
        """The output, and the seconds of the whole call."""
        arguments.setdefault("attention_mask", torch.ones_like(prompt))
        self.wait()
        began = time.perf_counter()
        output = self.target.generate(prompt, max_new_tokens=new_tokens, do_sample=False, **arguments)
        self.wait()
        return output, time.perf_counter() - began

    def wait(self) -> None:
        """For the device."""
        wait_for(self.device)

    def check(self, output: torch.Tensor, prompt: torch.Tensor, tokens: Sequence[int] | None = None) -> None:
        """Raises AssertionError unless the target counted on: with any other text the drafts would not be scripted.

        Args:
            output: [batch, seq] int64.
            prompt: [batch, context] int64.
            tokens: how many each row gets, where they are not as many as there is room for.
        """
        new = output[:, prompt.shape[1] :]
        order = torch.arange(1, new.shape[1] + 1, device=new.device)
        expected = (prompt[:, -1:] + order) % self.target.config.vocab_size
        if tokens is not None:
            expected = expected * (order <= torch.tensor(tokens, device=new.device).unsqueeze(1))  # 0 is the padding
        assert torch.equal(new, expected)

    def of_calls(self, prompt: torch.Tensor, drafter: ScriptedDrafter) -> Row:
        """Figures of rounds: medians over the repeats, after a call that warms up."""
        calls: list[tuple[SpeculationStats, float, int]] = []
        for repeat in range(self.options.repeats + 1):
            output, seconds = self.generate(prompt, self.options.new_tokens, assistant_model=drafter)
            self.check(output, prompt)
            assert drafter.stats is not None
            if repeat:
                calls.append((drafter.stats, seconds, output.numel() - prompt.numel()))
        return self.figures(calls)

    def figures(self, calls: Sequence[tuple[SpeculationStats, float, int]]) -> Row:
        """Of calls with the same settings: statistics, seconds, new tokens of all rows."""

        def median(value: Callable[[SpeculationStats, float, int], float]) -> float:
            return statistics.median(value(*call) for call in calls)

        def decode_s(stats: SpeculationStats, seconds: float) -> float:
            return seconds - stats.stage_time_s["prefill"]

        round_s = median(lambda stats, seconds, _: decode_s(stats, seconds) / stats.num_target_forwards)
        verify_s = median(lambda stats, _s, _n: stats.verify_time_s / stats.num_target_forwards)
        row: Row = {
            "round_ms": 1000 * round_s,
            "verify_ms": 1000 * verify_s,
            "draft_ms": 1000 * median(lambda stats, _s, _n: stats.draft_time_s / stats.num_target_forwards),
            "round_to_floor": round_to_floor(round_s, self.target, self.bandwidth),
            "verify_to_floor": round_to_floor(verify_s, self.target, self.bandwidth),
            "tokens_per_s": median(lambda stats, seconds, tokens: tokens / decode_s(stats, seconds)),
            "tau": median(lambda stats, _s, _n: stats.mean_acceptance_length),
        }
        if self._network is not None:
            head = [self.target.get_output_embeddings()]
            row["drafter_floor_ms"] = 1000 * weight_bytes(self._network, borrowed=head) / self.bandwidth
        return row


def rounds(bench: Bench) -> list[Row]:
    """Time per round by context, nodes and mode, and how much longer it takes than at the first context."""
    rows = []
    for mode, nodes in itertools.product(bench.modes, bench.options.nodes):
        first = None
        for context in bench.options.contexts:
            figures = bench.of_calls(bench.prompt(context), bench.drafter(nodes, mode))
            first = first or figures["round_ms"]
            row = {"part": "rounds", "mode": mode, "nodes": nodes, "context": context, **figures}
            rows.append(row | {"times_first_context": figures["round_ms"] / first})
    return rows


def batch(bench: Bench) -> list[Row]:
    """Throughput by rows, at the first context and number of nodes; rows end one after the other.

    A way's `tokens_per_s` are those of its whole calls, prefill included: that of plain decoding cannot be told apart.
    """
    context, nodes = bench.options.contexts[0], bench.options.nodes[0]
    rows = []
    for size in bench.options.batches:
        inputs, tokens = bench.ragged(context, size)
        ways: dict[str, dict[str, Any]] = {"plain": {}}
        ways |= {mode: {"assistant_model": bench.drafter(nodes, mode)} for mode in bench.modes}
        plain_s = 0.0
        for way, arguments in ways.items():
            if way != "plain":
                bench.drafter(nodes, way)  # sets up the network that both modes share
            taken = []
            for repeat in range(bench.options.repeats + 1):
                output, seconds = bench.generate(new_tokens=bench.options.new_tokens, **inputs, **arguments)
                bench.check(output, inputs["prompt"], tokens)
                taken += [seconds] if repeat else []
            seconds = statistics.median(taken)
            plain_s = plain_s or seconds
            row = {"part": "batch", "batch": size, "context": context, "nodes": nodes, "way": way}
            row |= {"tokens_per_s": sum(tokens) / seconds, "speedup": plain_s / seconds}
            if way != "plain":
                stats = arguments["assistant_model"].stats
                row |= {"rounds": stats.num_target_forwards, "tau": stats.mean_acceptance_length}
            rows.append(row)
    return rows


def length(bench: Bench) -> list[Row]:
    """Seconds per round over one long text, quarter by quarter."""
    prompt, rows = bench.prompt(bench.options.contexts[0]), []
    for mode in bench.modes:
        drafter = bench.drafter(bench.options.nodes[-1], mode)
        moments: list[float] = []
        make = drafter.candidate_generator

        def noting(target: Any, make: Any = make, moments: list[float] = moments) -> Any:
            generator = make(target)
            draft = generator.draft

            def drafted(context: Any) -> Any:
                moments.append(time.perf_counter())
                return draft(context)

            generator.draft = drafted
            return generator

        drafter.candidate_generator = noting  # type: ignore[method-assign]
        for _ in range(2):
            moments.clear()
            bench.generate(prompt, bench.options.length, assistant_model=drafter)
        taken = [1000 * (later - sooner) for sooner, later in itertools.pairwise(moments)]
        quarter = max(1, len(taken) // 4)
        parts = [statistics.median(taken[start : start + quarter]) for start in range(0, 4 * quarter, quarter)]
        rows.append(
            {"part": "length", "mode": mode, "new_tokens": bench.options.length, "quarters_ms": parts}
            | {"last_over_first": parts[-1] / parts[0]}
        )
    return rows


def stock_ways(bench: Bench) -> tuple[dict[str, dict[str, Any]], str | None]:
    """What stock transformers offers: plain decoding, the same compiled with a static cache, a draft model, DFlash.

    The draft model has the shape of the family's small one, the DFlash assistant that of our network, and both err as
    often as the scripted drafts do.

    Returns:
        arguments of `generate` by name; and None, or why there is no DFlash.
    """
    compiled = CompileConfig(backend=bench.options.compile_backend)
    compiled._compile_all_devices = True  # left alone, generate compiles on accelerators only
    rate = rate_for(min(bench.options.tau, 1 + DEPTH), DEPTH)
    small = draft_shape(bench.options.shape)
    assistant = counting_target(small, bench.device, bench.dtype, error_rate=1 - rate)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "plain compiled": {"cache_implementation": "static", "compile_config": compiled},
        "stock assisted": {"assistant_model": assistant},
    }
    try:
        from hf_specdec.benchmark.stock_dflash import ARGUMENTS, stock_dflash
    except ImportError as error:
        return ways, f"transformers {transformers.__version__} has no DFlash assistant: {error}"
    return ways | {"stock DFlash": {"assistant_model": stock_dflash(bench.target, rate=rate), **ARGUMENTS}}, None


def baselines(bench: Bench) -> list[Row]:
    """What `stock_ways` take per token."""
    ways, note = stock_ways(bench)
    rows: list[Row] = []
    if note is not None:
        rows += [{"part": "baselines", "way": "stock DFlash", "context": each, "note": note} for each in
                 bench.options.contexts]  # fmt: skip
    for context in bench.options.contexts:
        for way, arguments in ways.items():
            prompt, seconds, prefill = bench.prompt(context), [], []
            for repeat in range(bench.options.repeats + 1):
                _, first = bench.generate(prompt, 1, **arguments)
                output, whole = bench.generate(prompt, bench.options.new_tokens, **arguments)
                bench.check(output, prompt)
                if repeat:
                    seconds.append(whole)
                    prefill.append(first)
            per_token = (statistics.median(seconds) - statistics.median(prefill)) / (bench.options.new_tokens - 1)
            rows.append(
                {"part": "baselines", "way": way, "context": context, "token_ms": 1000 * per_token}
                | {"token_to_floor": round_to_floor(per_token, bench.target, bench.bandwidth)}
                | {"tokens_per_s": 1 / per_token}
            )
    return rows


def reference(bench: Bench) -> list[Row]:
    """The reference DDTree loop beside ours: the same weights, the same scripted trees."""
    nodes, vocab = bench.options.nodes[-1], bench.target.config.vocab_size
    rows = []
    for context in bench.options.contexts:
        prompt = bench.prompt(context)
        ours = {mode: bench.of_calls(prompt, bench.drafter(nodes, mode)) for mode in bench.modes}
        network = bench.network
        network.set_options(compile_mode="none")
        runs = []
        for repeat in range(bench.options.repeats + 1):
            scripted = bench.drafter(nodes, "none").script(vocab)
            run = reference_ddtree(bench.target, network, prompt, bench.options.new_tokens, nodes, scripted)
            bench.check(run.token_ids, prompt)
            runs += [run] if repeat else []
        seconds = statistics.median(run.seconds for run in runs)
        own = (bench.options.new_tokens - 1) / seconds
        lengths = runs[0].acceptance_lengths
        round_s = seconds / len(lengths)
        row: Row = {"part": "reference", "context": context, "nodes": nodes, "way": "reference"}
        row |= {"round_ms": 1000 * round_s, "round_to_floor": round_to_floor(round_s, bench.target, bench.bandwidth)}
        rows.append(row | {"tokens_per_s": own, "tau": statistics.fmean(lengths), "times_reference": 1.0})
        for mode, figures in ours.items():
            row = {"part": "reference", "context": context, "nodes": nodes, "way": mode}
            row |= {name: figures[name] for name in ("round_ms", "round_to_floor", "tokens_per_s", "tau")}
            rows.append(row | {"times_reference": figures["tokens_per_s"] / own})
    return rows


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "auto": auto, "baselines": baselines, "batch": batch, "exact": exact, "host": host, "length": length,
    "reference": reference, "rounds": rounds,
}  # fmt: skip


def environment(bench: Bench, argv: Sequence[str]) -> Row:
    """Where, with what, and how it was measured."""
    on_cpu = bench.device.type == "cpu"
    return {
        "command": shlex.join(["python", "-m", "hf_specdec.benchmark.speed", *argv]),
        "date": date.today().isoformat(),
        "device": f"CPU, {torch.get_num_threads()} threads" if on_cpu else device_name(bench.device),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "shape": bench.options.shape,
        "on_gpu": bench.device.type == "cuda",
        "drafter_network": not bench.options.no_network,
        "bandwidth_gb_per_s": bench.bandwidth / 1e9,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_specdec": hf_specdec.__version__,
        },
    }


def table(rows: Sequence[Row]) -> str:
    """Rows of one part as text, a column per figure."""

    def shown(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3g}" if value < 100 else f"{value:.0f}"
        return " ".join(map(shown, value)) if isinstance(value, list) else str(value)

    names = list(dict.fromkeys(name for row in rows for name in row if name != "part"))
    lines = [names] + [[shown(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command: prints a table per part, and writes them with the environment where `--output` says.

    Args:
        argv: its arguments; those of the process where None.

    Returns:
        0; 2 where arguments or models do not fit, with the reason on stderr.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(argv)
    try:
        _measure(options, argv)
    except (ValueError, OSError, ImportError) as error:
        print(f"hf-specdec bench --suite speed: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(options: argparse.Namespace, argv: Sequence[str]) -> None:
    bench = Bench(options)
    report: Row = {"environment": environment(bench, argv), "rows": []}
    print(json.dumps(report["environment"]))
    for part in bench.options.part:
        rows = PARTS[part](bench)
        print(f"\n{part}\n{table(rows)}", flush=True)
        report["rows"] += rows
        report["judged"] = judged(report["environment"], report["rows"])
        if bench.options.output is not None:  # after each part: a later one may run out of time
            bench.options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\njudged\n{table(report['judged'])}")


if __name__ == "__main__":
    sys.exit(main())
