"""What needs a GPU, in one run of limited time, with one record: `bash .ci/gpu`.

    bash .ci/gpu                            # all parts in 25 minutes, the most important ones first
    bash .ci/gpu tests plain                # these parts, also if the record has them already
    bash .ci/gpu --minutes 9                # on machines that allow ten minutes a command: three times; each call
                                            # continues with the parts that the record lacks
    bash .ci/gpu plain -- --shape tiny --device cpu --compile-backend eager    # a dry run on a CPU

Each part is a command of its own with a limit of time, so that none takes the time of the others. Targets have a
published shape and random weights, drafts are scripted: see `__main__.py`, whose options can follow after `--`. What a
part has measured is kept when its time is over.

The record is `record.json` and `record.md` in `--folder`, and also in the folder `$OUT` if that is set. It is written
after each part, and names every part and why it was not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.drafting.registry import unknown_name

from .criteria import NOT_MEASURED

Row = dict[str, Any]
LEAST = 0.7  # of a part's limit; with less time it is not begun
SPEED = (sys.executable, "-m", "examples.speed")
TESTS = [f"tests/decoding/test_{name}.py" for name in ("on_gpu", "host_traffic", "attention")]


@dataclass(frozen=True)
class Part:
    """A command and the most seconds that it may take."""

    command: tuple[str, ...]
    limit_s: int


def _speed(part: str, limit_s: int, *options: str) -> Part:
    return Part((*SPEED, "--part", part, *options), limit_s)


# In the order in which they run. The first four take at most 24 minutes.
PARTS = {
    "tests": Part((sys.executable, "-m", "pytest", "-q", "-n", "4", "-p", "no:benchmark", *TESTS), 480),
    "plain": _speed("baselines", 300, "--variants", "plain", "plain compiled"),
    "dflash": _speed("rounds", 330, "--networks", "dflash"),
    "eagle3": _speed("rounds", 330, "--networks", "eagle3"),
    "verify": _speed("rounds", 200, "--networks", "none"),
    "stock": _speed("baselines", 300, "--variants", "stock assisted", "stock DFlash"),
    "reference": _speed("reference", 200),
    "exact": _speed("exact", 300, "--prompts-per-group", "8"),
    "auto": _speed("auto", 300, "--dtype", "float32"),
    "batch": _speed("batch", 300, "--new-tokens", "128"),
    "length": _speed("length", 300),
    "llama": _speed("rounds", 300, "--shape", "llama-3.1-8b"),
}


def run_for(command: Sequence[str], limit_s: float) -> int | None:
    """Runs a command; returns its exit status, or None if it was ended because its time was over."""
    try:
        return subprocess.run(command, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def run_parts(
    names: Sequence[str],
    folder: Path,
    seconds: float,
    options: Sequence[str] = (),
    run: Callable[[Sequence[str], float], int | None] = run_for,
    clock: Callable[[], float] = time.monotonic,
) -> Row:
    """Runs parts one after the other and writes the record after each of them.

    Args:
        names: of `PARTS`; without any, those that the record in `folder` does not have as "done".
        folder: of the record, and of the results of each part.
        seconds: for all parts together.
        options: of the speed suite, for each of its parts.
        run: runs one command, see `run_for`.
        clock: returns the time in seconds.

    Returns:
        the record.
    """
    began, path = clock(), folder / "record.json"
    folder.mkdir(parents=True, exist_ok=True)
    folders = [folder, *map(Path, filter(None, [os.environ.get("OUT")]))]
    states: dict[str, str] = json.loads(path.read_text("utf-8"))["parts"] if path.exists() else {}
    record = collect(states, folder)
    for name in names or [name for name in PARTS if states.get(name) != "done"]:
        part, left = PARTS[name], seconds - (clock() - began)
        if left < LEAST * part.limit_s:
            states[name] = f"not run: {max(0, left):.0f} s were left"
        else:
            limit = min(left, part.limit_s)
            print(f"\n== {name}, at most {limit:.0f} s", flush=True)
            result = folder / f"{name}.json"
            result.unlink(missing_ok=True)
            command = part.command
            if command[: len(SPEED)] == SPEED:  # the part's own options come last: they make it what it is
                command = (*SPEED, *options, *command[len(SPEED) :], "--output", str(result))
            status = run(command, limit)
            ended = {0: "done", None: f"stopped after {limit:.0f} s"}
            states[name] = ended.get(status, f"failed, exit status {status}")
        record = collect(states, folder)
        for each in folders:
            (each / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            (each / "record.md").write_text(report(record), encoding="utf-8")
    return record


def collect(states: dict[str, str], folder: Path) -> Row:
    """The record: states of all parts, environments and rows of those with results, and the criteria they measured."""
    found = {name: path for name in PARTS if (path := folder / f"{name}.json").exists()}
    results: dict[str, Row] = {name: json.loads(path.read_text("utf-8")) for name, path in found.items()}
    return {
        "parts": {name: states.get(name, "not asked for") for name in PARTS},
        "environments": {name: result["environment"] for name, result in results.items()},
        "rows": [{"of": name, **row} for name, result in results.items() for row in result["rows"]],
        "judged": [
            {"of": name, **line}
            for name, result in results.items()
            for line in result["judged"]
            if line["holds"] != NOT_MEASURED
        ],
    }


def report(record: Row) -> str:
    """The record as Markdown: rounds and baselines with their speedup over compiled plain decoding, and the parts."""
    rows = [row for row in record["rows"] if "tokens_per_s" in row and row["part"] in ("rounds", "baselines")]
    rows = [{"shape": record["environments"][row["of"]]["shape"], **row} for row in rows]
    compiled = {
        (row["shape"], row["context"]): row["tokens_per_s"] for row in rows if row.get("way") == "plain compiled"
    }
    columns = ["shape", "decoding", "nodes", "context", "ms", "draft ms", "to floor", "tau", "tokens/s", "speedup"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        way = row.get("way") or f"{row['network']}, compile_mode={row['mode']}"
        plain = compiled.get((row["shape"], row["context"]))
        figures = [row.get("round_ms", row.get("token_ms")), row.get("draft_ms")]
        figures += [row.get("round_to_floor", row.get("token_to_floor")), row.get("tau"), row["tokens_per_s"]]
        figures.append(row["tokens_per_s"] / plain if plain else None)
        shown = ["" if figure is None else f"{figure:.4g}" for figure in figures]
        lines.append([row["shape"], way, str(row.get("nodes", "")), str(row["context"]), *shown])
    environment: Row = next(iter(record["environments"].values()), {})
    facts = [f"{name}: {environment[name]}" for name in ("device", "dtype", "date") if name in environment]
    facts += [f"{name} {version}" for name, version in environment.get("versions", {}).items()]
    states = [f"- {name}: {state}" for name, state in record["parts"].items()]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    note = "Random weights, scripted drafts. ms: of a round, or of a token; speedup: over plain compiled decoding."
    return "\n".join([", ".join(facts), "", note, "", *table, "", *states, ""])


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="bash .ci/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: what is missing)")
    options.add_argument("--minutes", type=float, default=25, help="for all parts together (default: 25)")
    options.add_argument("--folder", type=Path, default=Path("build/gpu"), help="(default: build/gpu)")
    return options


def main(argv: Sequence[str] | None = None, run: Callable[[Sequence[str], float], int | None] = run_for) -> int:
    """Runs the command; returns 0 if all parts of the record that were begun are done, else 1."""
    argv = list(sys.argv[1:] if argv is None else argv)
    end = argv.index("--") if "--" in argv else len(argv)
    options = parser().parse_args(argv[:end])
    for name in options.parts:
        if name not in PARTS:
            parser().error(str(unknown_name("part", name, PARTS)))
    passed_on = ("--shape", "qwen3-8b", "--device", "cuda", *argv[end + 1 :])
    record = run_parts(options.parts, options.folder, 60 * options.minutes, passed_on, run)
    print(f"\n{report(record)}")
    return int(any(state.startswith(("failed", "stopped")) for state in record["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
