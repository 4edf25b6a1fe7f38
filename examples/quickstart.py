"""Drafters compared with plain decoding on a small assistant, greedy and at temperature 0.7. `make demo` runs this.

The assistant is SmolLM2-135M-Instruct, or the small bundled model if it cannot be downloaded (`bundle.py`). Prompts are
of all groups in turn. For each prompt all variants run in turn, so that other load on the machine slows all of them
alike; speedups are computed per prompt and reported as medians. The number of prompts is what fits into `--minutes`, or
`--num-prompts`; Ctrl-C stops, and reports the prompts so far. `--model` and `--drafter` take any Hub ids or folders,
`--prompts` a file or the name of a set:

    python examples/quickstart.py --model Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16 --prompts gsm8k

`hf-specdec bench` measures more, and makes charts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()  # the imports below take seconds, which count too

import torch
import transformers
from bundle import ASSISTANT, TINY, bundle_of, inputs_of
from harness import DEVICE, about, load_target, wide_console, write_json
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_specdec.benchmark import variants
from hf_specdec.benchmark.calls import keep_faster_number_type
from hf_specdec.benchmark.prompts import load_prompts
from hf_specdec.benchmark.variants import Variant
from hf_specdec.decoding.speed.packed import can_pack
from hf_specdec.visualize import Trace, terminal_text

# A row each; with --all the others, too.
DRAFTERS = ("dflash:method=ddtree", "specblock", "eagle3", "draft-lm:method=causal_lm_chain")
OTHERS = ("dflash:method=dflash", "dspark:method=dspark", "specbound", "specbranch")
MERGED = "dflash"  # with the look-up, into one tree
PLAIN = "plain"
PACKED = variants.PACKED
SAMPLED = 0.7
TEMPERATURES = (0.0, SAMPLED)
WARM_UP_TOKENS = 8
# Of what is shown: at 0 a small model repeats itself, at 1 it errs.
SHOWN_TEMPERATURE, SHOWN_SAMPLES, SHOWN_NGRAM = 0.5, 8, 4
ANSWER_TOKENS = 160  # most of the answer that is shown


@dataclass(frozen=True)
class Call:
    """The call of one variant on one prompt."""

    seconds: float
    tokens: int
    identical: bool
    committed: int = 0
    rounds: int = 0
    draft_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


Prompt = dict[tuple[str, float], Call]  # the calls of one prompt, by variant and temperature
Figures = dict[float, dict[str, dict[str, Any]]]  # by temperature and variant


def variants_of(
    model: Any, drafters: list[str] | None, draft_model: str | None, folder: Path | None, everything: bool = False
) -> dict[str, Variant]:
    """Plain decoding, transformers' assisted generation where there is a draft model, and the drafters.

    Args:
        model: the target.
        drafters: that were asked for; None for those in `folder`.
        draft_model: for assisted generation; None for the one in `folder`, if any, with `everything`.
        folder: of bundled drafters.
        everything: all bundled drafters, all look-ups and assisted generation, not only the first ones.
    """
    bundled = drafters is None and folder is not None
    found = [Variant(PLAIN, "plain"), *([Variant(PACKED, "packed")] if can_pack(model) else [])]
    if draft_model is None and bundled and everything and (folder / "draft-lm").is_dir():
        draft_model = str(folder / "draft-lm")
    if draft_model is not None:
        found.append(variants.stock_assisted(draft_model, model))
    # The look-up shows how much of what is said has been said before, which any drafter gains by.
    specs = drafters or ["ngram", *(["suffix"] if everything else [])]
    if bundled:
        named = [*DRAFTERS, *(OTHERS if everything else ())]
        specs += [str(folder / each) for each in named if (folder / each.split(":")[0]).is_dir()]
        specs += [f"{folder / MERGED}+suffix"] if (folder / MERGED).is_dir() else []
    loaded = [variant for spec in specs for variant in variants.load(spec, model)]
    if bundled:  # one row per checkpoint: the method it leads with
        loaded = [variant for spec, variant in zip(specs, loaded, strict=True) if ":method=" in spec or variant.leads]
    found = variants.distinct([*found, *loaded])
    methods = [variant.name.split(" ")[0] if variant.drafter is not None else variant.name for variant in found]
    # The method is the name if no other row has it.
    names = [method if methods.count(method) == 1 else own.name for method, own in zip(methods, found, strict=True)]
    return dict(zip(names, found, strict=True))


def generate(
    model: Any, inputs: Any, variant: Variant, temperature: float, new_tokens: int
) -> tuple[torch.Tensor, float]:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    variant.begin()
    drafting = {} if variant.drafter is None else {"assistant_model": variant.drafter}
    torch.manual_seed(0)
    with variant.products(model):
        started = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=new_tokens, **sampling, **variant.arguments, **drafting)
    if output.is_cuda:
        torch.cuda.synchronize()
    return output[0, inputs["input_ids"].shape[1] :], time.perf_counter() - started


def choose_threads(seconds_of: Callable[[], float]) -> int:
    """Has torch use all its threads or one, by what plain decoding is quicker with; returns how many.

    Of a small model every operation is short. Where the cores are shared, threads then wait for each other most of the
    time.

    Args:
        seconds_of: decodes plainly and returns how long it took.
    """
    seconds = {}
    for threads in (torch.get_num_threads(), 1):
        torch.set_num_threads(threads)
        seconds[threads] = min(seconds_of() for _ in range(2))
    threads = min(seconds, key=seconds.__getitem__)
    torch.set_num_threads(threads)
    return threads


def measure(
    model: Any,
    inputs: Mapping[str, torch.Tensor],
    found: Mapping[str, Variant],
    new_tokens: int,
    tell: Callable[[str], None],
) -> Prompt:
    """Runs every variant on one prompt, at each temperature."""
    calls: Prompt = {}
    for temperature in TEMPERATURES:
        plain_ids = None
        for name, variant in found.items():
            tell(name)
            new_ids, seconds = generate(model, inputs, variant, temperature, new_tokens)
            plain_ids = new_ids if plain_ids is None else plain_ids
            call = Call(seconds, len(new_ids), torch.equal(new_ids, plain_ids))
            if variant.drafter is not None:
                stats = variant.drafter.stats
                committed = stats.num_accepted_draft_tokens + stats.num_spec_steps
                call = replace(call, committed=committed, rounds=stats.num_spec_steps, draft_s=stats.draft_time_s)
            calls[name, temperature] = call
    return calls


def elapsed() -> float:
    """Seconds since the program started."""
    return time.perf_counter() - STARTED


def measure_while_it_fits(
    measure_next: Iterator[Prompt],
    until_s: float,
    line: Callable[[str], None],
    elapsed: Callable[[], float] = elapsed,
) -> tuple[list[Prompt], bool]:
    """Measures prompts until they are used up, the next one would end after `until_s`, or Ctrl-C.

    Args:
        measure_next: measures a prompt whenever it is asked for one.
        until_s: seconds since the start of the program. One prompt is measured in any case.
        line: prints a line of progress.
        elapsed: seconds since the start of the program.

    Returns:
        The prompts that were measured as a whole, and whether Ctrl-C ended it.
    """
    measured: list[Prompt] = []
    longest = 0.0
    try:
        while not measured or elapsed() + longest <= until_s:
            began = elapsed()
            calls = next(measure_next, None)
            if calls is None:
                break
            measured.append(calls)
            longest = max(longest, elapsed() - began)
            greedy = {name: call.rate for (name, temperature), call in calls.items() if temperature == 0}
            best = max(greedy, key=greedy.__getitem__)
            line(
                f"prompt {len(measured)}: plain {greedy[PLAIN]:.0f} tokens/s; quickest {best}, "
                f"{greedy[best] / greedy[PLAIN]:.2f}x"
            )
    except KeyboardInterrupt:
        return measured, True
    return measured, False


def summary(
    calls: Sequence[Call], plain: Sequence[Call], packed: Sequence[Call] | None, groups: Sequence[str]
) -> dict[str, Any]:
    """The figures of one variant at one temperature.

    Args:
        calls: of the variant.
        plain: of plain decoding, for the same prompts.
        packed: of plain decoding with packed weights; None if that was not measured.
        groups: of the prompts.
    """
    ratios = [own.rate / base.rate for own, base in zip(calls, plain, strict=True)]
    over_packed = [own.rate / base.rate for own, base in zip(calls, packed or (), strict=False)]
    seconds, rounds = sum(call.seconds for call in calls), sum(call.rounds for call in calls)
    return {
        "tokens_per_s": round(sum(call.tokens for call in calls) / seconds, 1),
        "speedup": round(statistics.median(ratios), 3),
        "speedup_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]] if len(ratios) > 2 else [],
        "slowest_prompt": round(min(ratios), 3),
        "speedup_over_packed": round(statistics.median(over_packed), 3) if over_packed else None,
        "mean_acceptance_length": round(sum(call.committed for call in calls) / rounds, 3) if rounds else None,
        "drafting_share": round(sum(call.draft_s for call in calls) / seconds, 3) if rounds else None,
        "acceptance_by_group": acceptance_by_group(calls, groups) if rounds and any(groups) else {},
    }


def acceptance_by_group(calls: Sequence[Call], groups: Sequence[str]) -> dict[str, float]:
    """The mean acceptance length of each group of prompts."""
    totals: dict[str, list[int]] = {}
    for call, group in zip(calls, groups, strict=True):
        total = totals.setdefault(group, [0, 0])
        total[0] += call.committed
        total[1] += call.rounds
    return {group: round(committed / rounds, 2) for group, (committed, rounds) in totals.items() if rounds}


def report(console: Console, measured: Sequence[Prompt], names: Sequence[str], groups: Sequence[str]) -> Figures:
    """Prints a table per temperature; returns the figures. `groups` are those of the prompts."""
    figures: Figures = {}
    for temperature in TEMPERATURES:
        table = Table(title="greedy" if temperature == 0 else f"temperature {temperature}")
        headings = (
            "method", "tokens/s", "speedup", "quartiles", "slowest", "same products", "mean acceptance length",
            "drafting", "identical",
        )  # fmt: skip
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "method" else "right")
        calls = {name: [prompt[name, temperature] for prompt in measured] for name in names}
        figures[temperature] = {name: summary(calls[name], calls[PLAIN], calls.get(PACKED), groups) for name in names}
        for name, row in figures[temperature].items():
            if temperature == 0:
                row["identical"] = all(call.identical for call in calls[name])
            tau, share, over_packed = (
                row[key] for key in ("mean_acceptance_length", "drafting_share", "speedup_over_packed")
            )
            table.add_row(
                name,
                f"{row['tokens_per_s']:.0f}",
                f"{row['speedup']:.2f}x",
                "-".join(f"{quartile:.2f}" for quartile in row["speedup_quartiles"]),
                f"{row['slowest_prompt']:.2f}x",
                "-" if over_packed is None or name == PACKED else f"{over_packed:.2f}x",
                "-" if tau is None else f"{tau:.2f}",
                "-" if share is None else f"{share:.0%}",
                ("yes" if row["identical"] else "NO") if temperature == 0 else "",
            )
        console.print(table)
    return figures


def verdict(figures: Figures, drafting: Sequence[str]) -> str:
    """In words: what was fastest, and whether drafting pays on this machine. `drafting` are the variants that draft."""
    parts = []
    for temperature, rows in figures.items():
        best = max(drafting, key=lambda name: rows[name]["speedup"])
        speedup, over_packed = rows[best]["speedup"], rows[best]["speedup_over_packed"]
        same = "" if over_packed is None else f", {over_packed:.2f}x with the same products"
        how = "greedy" if temperature == 0 else f"at temperature {temperature}"
        pays = "pays" if (over_packed or speedup) > 1 else "does not pay"
        parts.append(f"{how}, {best} is fastest ({speedup:.2f}x plain{same}), and drafting {pays}")
    return f"On this machine: {'; '.join(parts)}."


def record_beside_weights(found: dict[str, Variant], record: dict[str, Any]) -> None:
    """Writes into the folder of each drafter what was measured of it, and brings its card up to date.

    Tables that a method's own script has written (`measure_*.py`) say more, and are left alone.
    """
    by_folder: dict[str, list[str]] = {}
    for name, variant in found.items():
        if variant.drafter is not None and hasattr(variant.drafter, "write_records"):
            by_folder.setdefault(variant.drafter.name_or_path, []).append(name)
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


def sample(
    model: Any, prompts: Sequence[Mapping[str, torch.Tensor]], variant: Variant, temperature: float, new_tokens: int
) -> Trace:
    """Of one continuation per prompt, the one that repeats the fewest n-grams; the first of equals."""
    traces = []
    for inputs in prompts:
        variant.drafter.trace = Trace()
        generate(model, inputs, variant, temperature, new_tokens)
        traces.append(variant.drafter.trace)
    variant.drafter.trace = None
    return min(traces, key=lambda trace: repeated_ngrams([token for token, _ in trace.output()]))


def repeated_ngrams(ids: Sequence[int], size: int = SHOWN_NGRAM) -> float:
    """The share of n-grams that have come before."""
    ngrams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def drafted_share(trace: Trace) -> float:
    """Of the tokens that were written."""
    return statistics.fmean(drafted for _, drafted in trace.output())


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target: Hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="PATH[:OPTION=VALUE,...]",
        help="Hub id or folder, with drafting options; may be repeated. Default: the bundled ones",
    )
    parser.add_argument("--draft-model", help="a small causal LM for transformers' own assisted generation")
    parser.add_argument("--prompts", help='lines of {"prompt": ...} or {"messages": ...}; default: of the target')
    parser.add_argument(
        "--minutes",
        type=float,
        help="end loading and measuring by then, with as many prompts as fit (default: 2.25; none with --num-prompts)",
    )
    parser.add_argument("--num-prompts", type=int, help="measure this many; 0 for all (default: those that fit)")
    parser.add_argument("--new-tokens", type=int, help="per prompt (default: 64; with --num-prompts 128)")
    parser.add_argument("--all", action="store_true", help="measure every bundled drafter and look-up")
    parser.add_argument("--dtype", help="of the target (default: its own, or float32 where that is faster on this CPU)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafters' folders and cards")
    arguments = parser.parse_args(argv)
    own = arguments.model not in (None, TINY.target, ASSISTANT.target)
    if own and arguments.drafter is None:
        parser.error(f"--model {arguments.model} needs a drafter that was made for it: name one with --drafter.")
    if own and arguments.prompts is None:
        parser.error(f"--model {arguments.model} needs prompts: name a file or a set with --prompts.")
    if (arguments.num_prompts or 0) < 0 or (arguments.new_tokens or 1) < 1:
        parser.error("--num-prompts must be at least 0, and --new-tokens at least 1.")
    if arguments.minutes is None:
        arguments.minutes = 2.25 if arguments.num_prompts is None else math.inf
    if arguments.new_tokens is None:
        arguments.new_tokens = 64 if arguments.num_prompts is None else 128
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    # Only what we print ourselves.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = wide_console(120)

    def line(text: str) -> None:
        console.print(f"{elapsed():4.0f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    try:
        bundle = bundle_of(arguments.model, line)
        name = bundle.target if bundle is not None else arguments.model
        asked = load_prompts(arguments.prompts or str(bundle.prompts), arguments.num_prompts or None)
        model, tokenizer = load_target(name, arguments.dtype or (bundle and bundle.dtype) or "auto")
        chat = bool(tokenizer.chat_template)
        prompts = [inputs_of(tokenizer, prompt).to(DEVICE) for prompt in asked]
        if DEVICE == "cpu" and torch.get_num_threads() > 1:
            threads = choose_threads(lambda: generate(model, prompts[0], Variant(PLAIN, "plain"), 0.0, 2)[1])
            line(f"decoding with {threads} thread(s): plain decoding is quickest so")
        if arguments.dtype is None and (choice := keep_faster_number_type(model, prompts[0])) is not None:
            line(choice)
        found = variants_of(model, arguments.drafter, arguments.draft_model, bundle and bundle.folder, arguments.all)
    except (OSError, ValueError) as error:  # what was asked for is not there, or does not fit together
        sys.exit(f"quickstart.py: {error}")
    line(f"loaded target {name} and {len(found)} variants, {DEVICE}")
    with Progress(console=console, transient=True, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task("")

        def tell(variant: str) -> None:
            progress.update(task, description=variant, advance=1, refresh=True)

        def run(inputs: Mapping[str, torch.Tensor], new_tokens: int) -> Prompt:
            progress.reset(task, total=len(TEMPERATURES) * len(found))
            return measure(model, inputs, found, new_tokens, tell)

        def measure_next() -> Iterator[Prompt]:
            run(prompts[0], min(WARM_UP_TOKENS, arguments.new_tokens))
            line("warmed up")
            for inputs in prompts:
                yield run(inputs, arguments.new_tokens)

        measured, interrupted = measure_while_it_fits(measure_next(), arguments.minutes * 60, line)
    stopped = "; interrupted: this is what was measured so far, and nothing is written" if interrupted else ""
    line(
        f"measured {len(measured)} of {len(prompts)} held-out prompts, {arguments.new_tokens} new tokens each{stopped}"
    )
    if measured:
        figures = report(console, measured, list(found), [prompt.group for prompt in asked[: len(measured)]])
    if interrupted:
        return 130

    drafting = {name: row["speedup"] for name, row in figures[SAMPLED].items() if found[name].drafter is not None}
    console.print(verdict(figures, list(drafting)), markup=False, highlight=False)
    quickest = max(drafting, key=drafting.__getitem__)
    shown = prompts[: 1 if chat else SHOWN_SAMPLES]
    new_tokens = max(ANSWER_TOKENS, arguments.new_tokens) if chat else arguments.new_tokens
    trace = sample(model, shown, found[quickest], SHOWN_TEMPERATURE, new_tokens)
    what = f"the continuation of {len(shown)} (one per prompt) that repeats the fewest {SHOWN_NGRAM}-grams"
    print(
        f"\nBy {quickest} at temperature {SHOWN_TEMPERATURE}, {'an answer' if chat else what};\n"
        f"{drafted_share(trace):.0%} of its tokens were drafted",
        end=", here on green:\n" if console.is_terminal else ":\n",
    )
    if console.is_terminal:
        print(terminal_text(trace, tokenizer))
    else:  # brackets would be read as part of the text
        print(tokenizer.decode(trace.prompt_ids[0] + [token for token, _ in trace.output()]))

    record = {
        "target": bundle.name if bundle is not None else arguments.model,
        "methods": figures[0.0],
        "sampled": {"temperature": SAMPLED, "methods": figures[SAMPLED]},
        "prompts": f"{len(measured)} held-out prompts, {arguments.new_tokens} new tokens",
        **about(),
    }
    write_json(arguments.json, record)
    if arguments.record:
        record_beside_weights(found, record)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nStopped; nothing was written.", file=sys.stderr)
        sys.exit(130)
