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
from hf_specdec.benchmark import records, ways
from hf_specdec.benchmark.floor import copy_bandwidth, weight_bytes
from hf_specdec.benchmark.prompts import NAMED_SETS, Prompt, load_prompts, render
from hf_specdec.benchmark.records import Environment, Note, Picture, Record
from hf_specdec.benchmark.report import markdown, page
from hf_specdec.benchmark.run import Settings, device_name, run, tables, tokenise
from hf_specdec.benchmark.ways import BUNDLED, Way
from hf_specdec.chat_template import uses_template
from hf_specdec.decoding.trace import Trace
from hf_specdec.drafters.causal_lm.loading import whole_target
from hf_specdec.hub.checkpoint import check_is_target
from hf_specdec.hub.loading import floating_dtype, usable_device
from hf_specdec.visualize.page import pictures

PART = "report.part.jsonl"  # of a run under way, or stopped


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="hf-specdec bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = options.add_argument_group("what is measured")
    what.add_argument("--target", help="Hub id or folder; the bundled model where omitted")
    what.add_argument(
        "--drafter",
        action="append",
        metavar="PATH[:OPTION=VALUE,...]",
        help="Hub id, folder, or the name of a drafter without weights, with drafting options, as in "
        "path:method=ddtree,tree_budget=31; may be repeated. A row per method where it is left open. Every drafter "
        "beside the target where omitted and the target is the bundled one",
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
    what.add_argument("--num-prompts", type=_positive, help="most, groups taking turns (default: 32; quick: 8)")
    how = options.add_argument_group("how")
    how.add_argument("--quick", action="store_true", help="few prompts, few repeats; all of it can be set one by one")
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
    how.add_argument("--sweep-prompts", type=_positive, help="prompts that the sweep runs on (default: 8; quick: 3)")
    how.add_argument("--chat", choices=["auto", "on", "off"], default="auto", help="use the target's chat template")
    how.add_argument("--thinking", choices=["default", "on", "off"], default="default", help="of the chat template")
    how.add_argument(
        "--compile-backend", default="inductor", help="of torch.compile, for the compiled baseline (default: inductor)"
    )
    how.add_argument("--no-compiled", action="store_true", help="leave the compiled baseline out; the report says so")
    how.add_argument("--device", help="where the target runs (default: the accelerator that torch finds, else the CPU)")
    how.add_argument("--dtype", help="of the target (default: bfloat16 on cuda, else float32)")
    how.add_argument("--attention", help="implementation of the target's attention (default: the model's own)")
    out = options.add_argument_group("what comes out")
    out.add_argument(
        "--output",
        type=Path,
        help="folder for the three reports (default: benchmark; with --from-records the folder of that file)",
    )
    out.add_argument("--from-records", type=Path, help="measure nothing: make the reports of this .jsonl file again")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; those of the process where None.

    Returns:
        0; 2 where arguments, files or models do not fit, with the reason on stderr.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    try:
        if arguments.from_records is not None:
            made, folder = records.read(arguments.from_records), arguments.from_records.parent
        else:
            folder = arguments.output or Path("benchmark")
            made = _kept(_measure(arguments, ["hf-specdec", "bench", *given]), folder / PART)
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
    """Writes records, Markdown and page to a folder, and says where."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"report.{ending}" for ending in ("jsonl", "md", "html")]
    records.write(made, paths[0])
    paths[1].write_text(markdown(made), encoding="utf-8")
    paths[2].write_text(page(made), encoding="utf-8")
    return paths


def _kept(made: Iterable[Record], path: Path) -> list[Record]:
    """All records of a run; each is written to a file as soon as there is one, which stays where the run is stopped."""
    kept: list[Record] = []
    for record in made:  # the first one comes when all arguments have been looked at
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if kept else "w", encoding="utf-8") as file:
            file.write(records.line(record) + "\n")
        kept.append(record)
    return kept


def _show(made: Sequence[Record]) -> None:
    from rich.console import Console  # of the bench extra

    Console(stderr=True).print(markdown(made), markup=False, highlight=False, soft_wrap=True)


def _measure(arguments: argparse.Namespace, command: list[str]) -> Iterator[Record]:
    """Loads target, drafters and prompts, and runs."""
    from rich.console import Console  # of the bench extra
    from rich.progress import Progress

    console = Console(stderr=True)
    if arguments.target is None and not (BUNDLED / "target").is_dir():
        raise FileNotFoundError(
            f"No --target was given, and the bundled model is not at {BUNDLED}: it comes with a checkout of the "
            "repository, not with the installed package. Name a target and drafters."
        )
    name = os.path.relpath(BUNDLED / "target") if arguments.target is None else arguments.target
    bundled = Path(name).resolve() == (BUNDLED / "target").resolve()
    if arguments.drafter is None and not bundled:
        raise ValueError(f"No --drafter was given for target {name!r}; name at least one, 'ngram' needs no weights.")
    texts, of_set = _prompts(arguments, name, bundled)
    model, tokenizer = _load_target(arguments, name)
    chat = uses_template(tokenizer, name, chat=arguments.chat, thinking=arguments.thinking)
    settings = _settings(arguments, chat)
    rendered = [(render(prompt, tokenizer, chat=chat, thinking=arguments.thinking), prompt) for prompt in texts]

    notes: list[Record] = []
    compared = _ways(arguments, model, bundled, notes)
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
        ways={way.name: {key: _plain(value) for key, value in way.settings.items()} for way in compared},
    )
    yield environment
    yield from notes
    # A generate call reports on its own settings where they come with warnings; here it is called thousands of times.
    transformers.logging.set_verbosity_error()
    # Drawn between calls only: a thread that draws it would take its time from what is measured.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=_num_calls(settings, compared, len(rendered)))

        def advance(way: str) -> None:
            progress.update(task, description=way)
            progress.advance(task)
            progress.refresh()

        yield from run(model, tokenizer, compared, rendered, settings, advance)
        inputs = [tokenise(tokenizer, [text], chat=chat).to(model.device) for text, _ in rendered]
        own = [way for way in compared if way.swept_from is None]
        yield from tables(own, model, inputs)
        for way in own:
            if way.drafter is not None:
                yield _picture(model, tokenizer, way, inputs[0], settings)


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
        floating_dtype(dtype)  # says which there are
    attention = {} if arguments.attention is None else {"attn_implementation": arguments.attention}
    check_is_target(name, ", ".join(arguments.drafter or ["none"]))
    model = whole_target(name, dtype=dtype, **attention).to(device).eval()
    return model, AutoTokenizer.from_pretrained(name)


def _ways(arguments: argparse.Namespace, model: Any, bundled: bool, notes: list[Record]) -> list[Way]:
    """All that is compared, plain eager first; what is left out is noted."""
    compared = ways.baselines(arguments.compile_backend)
    if arguments.no_compiled:
        compared = [way for way in compared if way.name != ways.COMPILED]
        notes.append(Note(f"{ways.COMPILED} was left out with --no-compiled."))
    draft_model = arguments.draft_model
    if draft_model is None and bundled and (BUNDLED / "draft-lm").is_dir():
        draft_model = os.path.relpath(BUNDLED / "draft-lm")
    if draft_model is not None:
        compared.append(ways.stock_assisted(draft_model, model))
    if arguments.drafter is not None:
        drafting = ways.distinct([way for spec in arguments.drafter for way in ways.load(spec, model)])
    else:
        found, passed_over = ways.discover(BUNDLED, model)
        drafting = ways.distinct(found)
        notes += [Note(f"{name} was passed over: {problem}") for name, problem in passed_over.items()]
    if arguments.budgets is None:
        budgets = [4, 12, 36] if arguments.quick else [4, 8, 16, 32, 64]
    else:
        budgets = arguments.budgets
    return [*compared, *drafting, *ways.sweep(drafting, budgets)]


def _num_calls(settings: Settings, compared: Sequence[Way], num_prompts: int) -> int:
    own = sum(way.swept_from is None for way in compared)
    swept = len(compared) - own
    calls = 0
    for size in settings.batch_sizes:
        batches = num_prompts // size
        in_sweep = min(batches, -(-settings.sweep_prompts // size))
        calls += settings.repeats * (batches * own * len(settings.temperatures) + in_sweep * swept) + len(compared)
    return calls


def _picture(model: Any, tokenizer: Any, way: Way, inputs: Any, settings: Settings) -> Picture:
    assert way.drafter is not None
    way.begin()
    way.drafter.trace = trace = Trace()
    try:
        model.generate(**inputs, assistant_model=way.drafter, max_new_tokens=settings.new_tokens, do_sample=False)
    finally:
        way.drafter.trace = None
    lengths = [len(traced.path) for traced in trace.rounds]
    telling = max(range(len(lengths)), key=lengths.__getitem__) if lengths else 0
    return Picture(
        way.name, "the text, and the tree of its longest accepted path", pictures(trace, tokenizer, [telling])
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
