"""`python -m hf_specdec.benchmark`: compares drafters with plain decoding and writes a report in three formats.

These are JSON lines (one per call), a Markdown table and one HTML page. Without arguments it measures the bundled model
with all its bundled drafters; `--quick` takes a few minutes.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec.benchmark import records, variants
from hf_specdec.benchmark.floor import copy_bandwidth, weight_bytes
from hf_specdec.benchmark.prompts import NAMED_SETS, Prompt, load_prompts, render
from hf_specdec.benchmark.records import Environment, Note, Picture, Record
from hf_specdec.benchmark.report import markdown, page
from hf_specdec.benchmark.run import Settings, device_name, run, tables, tokenise
from hf_specdec.benchmark.variants import BUNDLED, Variant
from hf_specdec.chat_template import uses_template
from hf_specdec.decoding.trace import Trace
from hf_specdec.drafters.targets import whole_target
from hf_specdec.hub.checkpoint import check_is_target
from hf_specdec.hub.loading import floating_dtype, usable_device
from hf_specdec.visualize.page import pictures

PART = "report.part.jsonl"  # of a run that is in progress or was stopped


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="hf-specdec bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = options.add_argument_group("what is measured")
    what.add_argument("--target", help="Hub id or folder (default: the bundled model)")
    what.add_argument(
        "--drafter",
        action="append",
        metavar="PATH[:OPTION=VALUE,...]",
        help="Hub id, folder, or the name of a drafter without weights, with drafting options, as in "
        "path:method=ddtree,tree_budget=31; may be repeated. Without a method, a row per method of the drafter. "
        "Default: every bundled drafter, if the target is the bundled one",
    )
    what.add_argument(
        "--draft-model",
        help="small causal LM for transformers' own assisted generation (default: the bundled one for the bundled "
        "target, else none)",
    )
    what.add_argument(
        "--prompts",
        help=f"JSONL file with a prompt per line, or one of: {', '.join(sorted(NAMED_SETS))} (default: the bundled "
        "ones for the bundled target)",
    )
    what.add_argument("--num-prompts", type=_positive, help="most, from all groups in turn (default: 32; quick: 8)")
    how = options.add_argument_group("how")
    how.add_argument("--quick", action="store_true", help="few prompts, few repeats; other options override it")
    how.add_argument("--temperature", type=_temperature, nargs="+", help="0 is greedy (default: 0 1)")
    how.add_argument("--batch-size", type=_positive, nargs="+", help="rows per call (default: 1)")
    how.add_argument("--new-tokens", type=_positive, help="most per row (default: 128; quick: 48)")
    how.add_argument("--repeats", type=_positive, help="of every call (default: 3; quick: 2)")
    how.add_argument(
        "--budgets",
        type=_positive,
        nargs="*",
        help="of tree_budget, to sweep over (default: 4 8 16 32 64; quick: 4 12 36)",
    )
    how.add_argument("--sweep-prompts", type=_positive, help="prompts of the sweep (default: 8; quick: 3)")
    how.add_argument("--chat", choices=["auto", "on", "off"], default="auto", help="use the target's chat template")
    how.add_argument("--thinking", choices=["default", "on", "off"], default="default", help="of the chat template")
    how.add_argument(
        "--compile-backend", default="inductor", help="of torch.compile, for the compiled baseline (default: inductor)"
    )
    how.add_argument("--no-compiled", action="store_true", help="omit the compiled baseline; the report says so")
    how.add_argument("--device", help="device of the target (default: the accelerator that torch finds, else the CPU)")
    how.add_argument("--dtype", help="of the target (default: bfloat16 on cuda, else float32)")
    how.add_argument("--attention", help="implementation of the target's attention (default: the model's own)")
    out = options.add_argument_group("output")
    out.add_argument(
        "--output",
        type=Path,
        help="folder for the three reports (default: benchmark; with --from-records the folder of that file)",
    )
    out.add_argument("--from-records", type=Path, help="measure nothing: make the reports again from this .jsonl file")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; None for those of the process.

    Returns:
        0; 2 if arguments, files or models do not fit, with the reason on stderr.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    try:
        if arguments.from_records is not None:
            made, folder = records.read(arguments.from_records), arguments.from_records.parent
        else:
            folder = arguments.output or Path("benchmark")
            made = _saved(_measure(arguments, ["hf-specdec", "bench", *given]), folder / PART)
            _show(made)
        for path in write_reports(made, arguments.output or folder):
            print(path)
        if arguments.from_records is None:
            (folder / PART).unlink()
    except (ValueError, OSError, ImportError) as error:
        print(f"hf-specdec bench: {error}", file=sys.stderr)
        return 2
    return 0


def write_reports(made: Sequence[Record], folder: Path) -> list[Path]:
    """Writes records, Markdown and page to a folder, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"report.{ending}" for ending in ("jsonl", "md", "html")]
    records.write(made, paths[0])
    paths[1].write_text(markdown(made), encoding="utf-8")
    paths[2].write_text(page(made), encoding="utf-8")
    return paths


def _saved(made: Iterable[Record], path: Path) -> list[Record]:
    """All records of a run. Each is also written to a file immediately, which remains if the run is stopped."""
    saved: list[Record] = []
    for record in made:  # the first one comes after all arguments have been checked
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if saved else "w", encoding="utf-8") as file:
            file.write(records.line(record) + "\n")
        saved.append(record)
    return saved


def _show(made: Sequence[Record]) -> None:
    from rich.console import Console  # of the bench extra

    Console(stderr=True).print(markdown(made), markup=False, highlight=False, soft_wrap=True)


def _measure(arguments: argparse.Namespace, command: list[str]) -> Iterator[Record]:
    """Loads target, drafters and prompts, and yields the records of the run."""
    from rich.console import Console  # of the bench extra
    from rich.progress import Progress

    console = Console(stderr=True)
    if arguments.target is None and not (BUNDLED / "target").is_dir():
        raise FileNotFoundError(
            f"No --target was given, and the bundled model is not at {BUNDLED}: it is part of a checkout of the "
            "repository, not of the installed package. Name a target and drafters."
        )
    name = os.path.relpath(BUNDLED / "target") if arguments.target is None else arguments.target
    bundled = Path(name).resolve() == (BUNDLED / "target").resolve()
    if arguments.drafter is None and not bundled:
        raise ValueError(f"No --drafter was given for target {name!r}; name at least one: 'ngram' needs no weights.")
    texts, of_set = _prompts(arguments, name, bundled)
    model, tokenizer = _load_target(arguments, name)
    chat = uses_template(tokenizer, name, chat=arguments.chat, thinking=arguments.thinking)
    settings = _settings(arguments, chat)
    rendered = [(render(prompt, tokenizer, chat=chat, thinking=arguments.thinking), prompt) for prompt in texts]

    notes: list[Record] = []
    compared = _variants(arguments, model, bundled, notes)
    environment = Environment(
        target=name,
        device=device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=str(model.config._attn_implementation),
        threads=torch.get_num_threads(),
        versions={
            "hf_specdec": hf_specdec.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        date=date.today().isoformat(),
        command=shlex.join(command),
        prompts=f"{len(texts)} of {of_set}",
        settings={
            "new tokens": settings.new_tokens,
            "repeats": settings.repeats,
            "temperatures": list(settings.temperatures),
            "batch sizes": list(settings.batch_sizes),
            "chat template": "yes" if chat else "no",
            "thinking": arguments.thinking,
        },
        copy_bytes_per_s=copy_bandwidth(model.device),
        weight_bytes=weight_bytes(model),
        variants={
            variant.name: {key: _plain(value) for key, value in variant.settings.items()} for variant in compared
        },
    )
    yield environment
    yield from notes
    # generate repeats warnings about its settings in every call; here there are thousands of calls.
    transformers.logging.set_verbosity_error()
    # Refreshed between calls only: a refreshing thread would slow down the measured calls.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=_num_calls(settings, compared, len(rendered)))

        def advance(variant: str) -> None:
            progress.update(task, description=variant)
            progress.advance(task)
            progress.refresh()

        yield from run(model, tokenizer, compared, rendered, settings, advance)
        inputs = [tokenise(tokenizer, [text], chat=chat).to(model.device) for text, _ in rendered]
        own = [variant for variant in compared if variant.swept_from is None]
        yield from tables(own, model, inputs)
        for variant in own:
            if variant.drafter is not None:
                yield _picture(model, tokenizer, variant, inputs[0], settings)


def _settings(arguments: argparse.Namespace, chat: bool) -> Settings:
    quick = arguments.quick
    return Settings(
        temperatures=tuple(arguments.temperature or (0.0, 1.0)),
        batch_sizes=tuple(arguments.batch_size or (1,)),
        new_tokens=arguments.new_tokens or (48 if quick else 128),
        repeats=arguments.repeats or (2 if quick else 3),
        sweep_prompts=arguments.sweep_prompts or (3 if quick else 8),
        chat=chat,
    )


def _prompts(arguments: argparse.Namespace, target: str, bundled: bool) -> tuple[list[Prompt], str]:
    source = arguments.prompts
    if source is None:
        if not bundled:
            raise ValueError(
                f"No --prompts were given for target {target!r}. Give a JSONL file, or one of: "
                f"{', '.join(sorted(NAMED_SETS))}."
            )
        source = os.path.relpath(BUNDLED / "prompts.jsonl")
    limit = arguments.num_prompts or (8 if arguments.quick else 32)
    return load_prompts(source, limit), source


def _load_target(arguments: argparse.Namespace, name: str) -> tuple[Any, Any]:
    device = usable_device(arguments.device)
    dtype = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    if dtype != "auto":
        floating_dtype(dtype)  # raises with the known names
    attention = {} if arguments.attention is None else {"attn_implementation": arguments.attention}
    check_is_target(name, ", ".join(arguments.drafter or ["none"]))
    model = whole_target(name, dtype=dtype, **attention).to(device).eval()
    return model, AutoTokenizer.from_pretrained(name)


def _variants(arguments: argparse.Namespace, model: Any, bundled: bool, notes: list[Record]) -> list[Variant]:
    """All variants to compare, plain eager first; a note for each that is omitted."""
    compared = variants.baselines(arguments.compile_backend)
    if arguments.no_compiled:
        compared = [variant for variant in compared if variant.name != variants.COMPILED]
        notes.append(Note(f"{variants.COMPILED} was omitted because of --no-compiled."))
    draft_model = arguments.draft_model
    if draft_model is None and bundled and (BUNDLED / "draft-lm").is_dir():
        draft_model = os.path.relpath(BUNDLED / "draft-lm")
    if draft_model is not None:
        compared.append(variants.stock_assisted(draft_model, model))
    if arguments.drafter is not None:
        drafting = variants.distinct([variant for spec in arguments.drafter for variant in variants.load(spec, model)])
    else:
        found, not_loaded = variants.discover(BUNDLED, model)
        drafting = variants.distinct(found)
        notes += [Note(f"{name} was skipped: {problem}") for name, problem in not_loaded.items()]
    if arguments.budgets is None:
        budgets = [4, 12, 36] if arguments.quick else [4, 8, 16, 32, 64]
    else:
        budgets = arguments.budgets
    return [*compared, *drafting, *variants.sweep(drafting, budgets)]


def _num_calls(settings: Settings, compared: Sequence[Variant], num_prompts: int) -> int:
    own = sum(variant.swept_from is None for variant in compared)
    swept = len(compared) - own
    calls = 0
    for size in settings.batch_sizes:
        batches = num_prompts // size
        in_sweep = min(batches, -(-settings.sweep_prompts // size))
        calls += settings.repeats * (batches * own * len(settings.temperatures) + in_sweep * swept) + len(compared)
    return calls


def _picture(model: Any, tokenizer: Any, variant: Variant, inputs: Any, settings: Settings) -> Picture:
    assert variant.drafter is not None
    variant.begin()
    variant.drafter.trace = trace = Trace()
    try:
        model.generate(**inputs, assistant_model=variant.drafter, max_new_tokens=settings.new_tokens, do_sample=False)
    finally:
        variant.drafter.trace = None
    lengths = [len(traced.path) for traced in trace.rounds]
    longest = max(range(len(lengths)), key=lengths.__getitem__) if lengths else 0
    return Picture(
        variant.name, "the text, and the tree of its longest accepted path", pictures(trace, tokenizer, [longest])
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | type(None)) else str(value)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a temperature: 0 (greedy) or above")
    return value


if __name__ == "__main__":
    sys.exit(main())
