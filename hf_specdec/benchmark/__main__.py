"""`python -m hf_specdec.benchmark`: compares drafters with plain decoding, and writes the records and a report.

These are JSON lines (one per call) and Markdown tables. Without arguments it measures the bundled model with all its
bundled drafters; `--quick` takes a few minutes. In Python: `benchmark(target, drafter)`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_specdec import progress
from hf_specdec.benchmark import records
from hf_specdec.benchmark.compare import benchmark, write_reports
from hf_specdec.benchmark.prompts import NAMED_SETS
from hf_specdec.benchmark.report import markdown
from hf_specdec.cli import number


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
    what.add_argument(
        "--num-prompts", type=number(int, 1), help="most, from all groups in turn (default: 32; quick: 8)"
    )
    how = options.add_argument_group("how")
    how.add_argument("--quick", action="store_true", help="few prompts, few repeats; other options override it")
    how.add_argument("--temperature", type=number(float, 0), nargs="+", help="0 is greedy (default: 0 1)")
    how.add_argument("--batch-size", type=number(int, 1), nargs="+", help="rows per call (default: 1)")
    how.add_argument("--new-tokens", type=number(int, 1), help="most per row (default: 128; quick: 48)")
    how.add_argument("--repeats", type=number(int, 1), help="of every call (default: 3; quick: 2)")
    how.add_argument(
        "--budgets",
        type=number(int, 1),
        nargs="*",
        help="of tree_budget, to sweep over (default: 4 8 16 32 64; quick: 4 12 36)",
    )
    how.add_argument("--sweep-prompts", type=number(int, 1), help="prompts of the sweep (default: 8; quick: 3)")
    how.add_argument("--chat", choices=["auto", "on", "off"], default="auto", help="use the target's chat template")
    how.add_argument("--thinking", choices=["default", "on", "off"], default="default", help="of the chat template")
    how.add_argument(
        "--compile-backend", default="inductor", help="of torch.compile, for the compiled baseline (default: inductor)"
    )
    how.add_argument(
        "--no-compiled", dest="compiled", action="store_false", help="omit the compiled baseline; the report says so"
    )
    how.add_argument("--device", help="device of the target (default: the accelerator that torch finds, else the CPU)")
    how.add_argument("--dtype", help="of the target (default: its own, or float32 where that is faster on this CPU)")
    how.add_argument("--attention", help="implementation of the target's attention (default: the model's own)")
    out = options.add_argument_group("output")
    out.add_argument(
        "--output",
        type=Path,
        help="folder for records and report (default: benchmark; with --from-records the folder of that file)",
    )
    out.add_argument("--from-records", type=Path, help="measure nothing: make the report again from this .jsonl file")
    out.add_argument("--json", action="store_true", help="print the records as a JSON list, not their files and report")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; None for those of the process.

    Returns:
        0; 2 if arguments, files or models do not fit, with the reason on stderr.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = vars(parser().parse_args(given))
    source, folder, as_json = (arguments.pop(name) for name in ("from_records", "output", "json"))
    try:
        if source is None:
            folder = folder or Path("benchmark")
            made = benchmark(**arguments, output=folder, command=shlex.join(["hf-specdec", "bench", *given]))
            if not as_json and not progress.quiet:
                print(markdown(made), file=sys.stderr)
        else:
            folder = folder or source.parent
            made = records.read(source)
            write_reports(made, folder)
        if as_json:
            print(json.dumps([json.loads(records.line(record)) for record in made], indent=2))
        else:
            print(folder / "report.jsonl", folder / "report.md", sep="\n")
    except (ValueError, OSError, ImportError) as error:
        print(f"hf-specdec bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
