"""The report as Markdown: the circumstances of the run, and a table per temperature and batch size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hf_specdec.benchmark.figures import cells
from hf_specdec.benchmark.records import Call, Environment, Note, Record, Table
from hf_specdec.benchmark.report.columns import COLUMNS, LEGEND, speedup


def markdown(records: Iterable[Record]) -> str:
    """The report of a run.

    Args:
        records: of one run, its environment first.
    """
    records = list(records)
    environment = environment_of(records)
    parts = [f"# Benchmark of {environment.target}", "", *(f"- {line}" for line in facts(environment)), ""]
    for note in (record for record in records if isinstance(record, Note)):
        parts += [f"> {note.text}", ""]
    for cell in cells((record for record in records if isinstance(record, Call)), environment):
        parts += [f"## {cell.title}", "", table([[form(own) for form in COLUMNS.values()] for own in cell.figures]), ""]
        compared = [own for own in cell.figures if own.speedup is not None]
        groups = list(dict.fromkeys(group for own in compared for group in own.speedup_by_group))
        if len(groups) > 1:
            rows = [[own.variant, *(speedup(own.speedup_by_group.get(group)) for group in groups)] for own in compared]
            parts += ["Speedup over eager by group of prompts:", "", table(rows, ["method", *groups]), ""]
        for name, points in cell.sweeps.items():
            rows = [
                [str(budget), *(COLUMNS[column](own) for column in ("speedup over eager", "mean acceptance length"))]
                for budget, own in points
            ]
            parts += [f"Budgets of {name}:", "", table(rows, ["budget", "speedup", "mean acceptance length"]), ""]
    for own in (record for record in records if isinstance(record, Table)):
        parts += [f"## {own.variant}: {own.title}", "", table(own.rows, own.columns), ""]
    return "\n".join([*parts, LEGEND, ""])


def environment_of(records: Sequence[Record]) -> Environment:
    """The first record.

    Raises:
        ValueError: it is something else, or there is none.
    """
    if not records or not isinstance(records[0], Environment):
        raise ValueError("The first record must be the environment of a run: give the complete .jsonl file.")
    return records[0]


def facts(environment: Environment) -> list[str]:
    """The circumstances of the run: machine, versions, settings, command, date."""
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    settings = ", ".join(f"{name} {value}" for name, value in environment.settings.items())
    return [
        f"target: {environment.target}, {environment.dtype}, {environment.attention} attention",
        f"machine: {environment.device}, {environment.threads} threads",
        f"floor: {environment.weight_bytes / 1e6:.1f} MB of weights per forward at "
        f"{environment.copy_bytes_per_s / 1e9:.1f} GB/s (copy, measured) = "
        f"{1000 * environment.weight_bytes / environment.copy_bytes_per_s:.3g} ms",
        f"prompts: {environment.prompts}",
        f"settings: {settings}",
        f"versions: {versions}",
        f"command: `{environment.command}`",
        f"date: {environment.date}",
    ]


def table(rows: Sequence[Sequence[str]], columns: Sequence[str] = tuple(COLUMNS)) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
