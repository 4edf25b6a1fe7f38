"""The report as Markdown: the circumstances of the run, and tables per temperature and batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hf_specdec.benchmark.figures import ROUND_STAGES, Figures, Spread, cells
from hf_specdec.benchmark.records import Call, Environment, Note, Record, Table


def _of(spread: Spread | None, form: Callable[[float], str]) -> str:
    """A median with its interval; only the median if all three have the same format."""
    if spread is None:
        return "-"
    low, median, high = form(spread.low), form(spread.median), form(spread.high)
    return median if low == high == median else f"{median} ({low}-{high})"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _identical(figures: Figures) -> str:
    if not figures.num_compared:
        return "-"
    if figures.num_identical == figures.num_compared:
        return "yes"
    return f"{figures.num_identical} of {figures.num_compared}, gap up to {figures.largest_gap:.2g}"


def milliseconds(seconds: float) -> str:
    """Seconds, in milliseconds with three significant digits.

    Examples:
        >>> milliseconds(0.01234), milliseconds(0.5), milliseconds(0.00000123)
        ('12.3', '500', '0.00123')
    """
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def speedup(spread: Spread | None) -> str:
    """The median ratio to plain decoding with its interval; a dash for None."""
    return _of(spread, lambda value: f"{value:.2f}x")


# Heading to the format of its values.
COLUMNS: dict[str, Callable[[Figures], str]] = {
    "method": lambda own: own.variant,
    "rank": lambda own: str(own.rank),
    "tokens/s": lambda own: _of(own.tokens_per_s, lambda value: f"{value:.0f}"),
    "speedup over eager": lambda own: speedup(own.speedup),
    "over packed": lambda own: "-" if own.speedup_packed is None else f"{own.speedup_packed.median:.2f}x",
    "over compiled": lambda own: "-" if own.speedup_compiled is None else f"{own.speedup_compiled.median:.2f}x",
    "mean acceptance length": lambda own: _or_dash(own.mean_acceptance_length, ".2f"),
    "across rounds": lambda own: _or_dash(own.continuous_acceptance_length, ".2f"),
    "rollback rate": lambda own: _or_dash(own.rollback_rate, ".0%"),
    "draft acceptance rate": lambda own: _or_dash(own.draft_acceptance_rate, ".0%"),
    "drafting": lambda own: _or_dash(own.drafting_share, ".0%"),
    "ms per round": lambda own: milliseconds(sum(own.round_s.values())) if own.round_s else "-",
    "round / floor": lambda own: _or_dash(own.round_to_floor, ".1f"),
    "TTFT ms": lambda own: milliseconds(own.ttft_s.median),
    "TPOT ms": lambda own: "-" if own.tpot_s is None else milliseconds(own.tpot_s.median),
    "peak MB": lambda own: "-" if own.peak_bytes is None else f"{own.peak_bytes / 1e6:.1f}",
    "identical": _identical,
}

LEGEND = (
    "Rank: by tokens/s; variants whose repeats overlap share one. Tokens/s: all new tokens over the time of whole "
    "calls, prefill included; median over repeats. Speedup: by prompt, in the same repeat; median over prompts "
    "(quartiles). Over packed: over plain decoding with the packed weights that rounds use on a CPU, so without their"
    " part of the speedup. Mean acceptance length: tokens per round, bonus token included, prefill excluded, pooled "
    "over rounds. Across rounds: tokens from one rollback to the next (M of SpecBranch); only drafters that prepare "
    "the next round during verification write more than a round's. Rollback rate: discarded share of the tokens "
    "drafted in sequence (RB of SpecBranch). Draft acceptance rate: accepted over drafted tokens; on trees most nodes"
    " are alternatives, so compare it only at equal budgets. Drafting: share of the whole time. Round / floor: time "
    "of a round over the time to read the target's weights once at the bandwidth of a copy. TTFT: time to first "
    "token; TPOT: time per further token. Peak MB: memory above the memory in use before a call, on the longest "
    "prompts. Identical: greedy output equal to plain eager decoding's, token for token; gap: between the target's "
    "two best logits at the first difference."
)


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
        parts += ["```text", *chart({own.variant: own.speedup.median for own in compared if own.speedup}), "```", ""]
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
        if drafting := [own for own in cell.figures if own.round_s]:
            rows = [[own.variant, *(milliseconds(own.round_s[stage]) for stage in ROUND_STAGES)] for own in drafting]
            parts += ["Milliseconds of a round by stage:", "", table(rows, ["method", *ROUND_STAGES]), ""]
    for own in (record for record in records if isinstance(record, Table)):
        parts += [f"## {own.variant}: {own.title}", "", table(own.rows, own.columns), ""]
    return "\n".join([*parts, LEGEND, ""])


def chart(speedups: dict[str, float]) -> list[str]:
    """Bars of the speedups over plain decoding, the largest first; a bar of 20 characters is 1x.

    Examples:
        >>> chart({"ngram": 0.5, "ddtree": 1.25})
        ['ddtree  █████████████████████████ 1.25x', 'ngram   ██████████ 0.50x']
    """
    widest = max(map(len, speedups), default=0)
    ordered = sorted(speedups.items(), key=lambda item: -item[1])
    return [f"{name:{widest}}  {'█' * round(20 * value)} {value:.2f}x" for name, value in ordered]


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
