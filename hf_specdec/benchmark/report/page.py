"""The report as one self-contained HTML page: no network, no script; for light and dark themes and print.

Every chart is followed by its numbers as a table, which is also its text alternative.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from hf_specdec.benchmark.figures import ROUND_STAGES, Cell, Figures, cells
from hf_specdec.benchmark.records import Call, Note, Picture, Record, Table
from hf_specdec.benchmark.report import charts
from hf_specdec.benchmark.report.charts import Bar, Line
from hf_specdec.benchmark.report.columns import COLUMNS, LEGEND, milliseconds
from hf_specdec.benchmark.report.markdown import environment_of, facts
from hf_specdec.benchmark.report.style import STYLE

_Rows = Sequence[Sequence[str]]


def page(records: Iterable[Record]) -> str:
    """The report of a run.

    Args:
        records: of one run, its environment first.
    """
    records = list(records)
    environment = environment_of(records)
    title = f"Benchmark of {environment.target}"
    parts = [f"<h1>{escape(title)}</h1>"]
    parts.append("<ul class='facts'>" + "".join(f"<li>{_code(fact)}</li>" for fact in facts(environment)) + "</ul>")
    notes = [record for record in records if isinstance(record, Note)]
    parts += [f"<p class='note' role='note'>{escape(note.text)}</p>" for note in notes]
    for cell in cells((record for record in records if isinstance(record, Call)), environment):
        parts.append(f"<section><h2>{escape(cell.title)}</h2>")
        rows = [[form(own) for form in COLUMNS.values()] for own in cell.figures]
        parts.append(f"<div class='wide'>{_table(list(COLUMNS), rows)}</div>")
        parts += _charts(cell)
        parts.append("</section>")
    for own in (record for record in records if isinstance(record, Table)):
        parts.append(
            f"<section><h2>{escape(own.variant)}: {escape(own.title)}</h2>{_table(own.columns, own.rows)}</section>"
        )
    pictures = [record for record in records if isinstance(record, Picture)]
    if pictures:
        parts.append("<section><h2>The rounds of one prompt</h2>")
        parts += [f"<h3>{escape(own.variant)}: {escape(own.title)}</h3>{own.html}" for own in pictures]
        parts.append("</section>")
    parts.append(f"<p class='legend'>{escape(LEGEND)}</p>")
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='icon' href='data:,'><title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _charts(cell: Cell) -> Iterator[str]:
    faster = [own for own in cell.figures if own.speedup is not None]
    drafting = [own for own in cell.figures if own.round_s]
    if faster:
        yield _speedups(faster)
        yield _distribution(faster)
    if any(own.unconditional for own in drafting):
        yield _by_depth(
            "Acceptance per depth, unconditional",
            "share of all rounds",
            [(own.variant, own.unconditional) for own in drafting],
        )
        yield _by_depth(
            "Acceptance per depth, conditional",
            "share of rounds that reached this depth",
            [(own.variant, own.conditional) for own in drafting],
        )
        yield _histogram(drafting)
    if drafting:
        yield _stages(drafting)
    curves = {variant: points for variant, points in cell.tokens_per_s_by_context.items() if points}
    if curves:
        yield _context(curves)
    if cell.sweeps:
        yield from _budgets(cell.sweeps)


def _speedups(faster: Sequence[Figures]) -> str:
    groups = list(dict.fromkeys(group for own in faster for group in own.speedup_by_group))
    sections = [
        (
            group,
            [
                Bar(own.variant, spread.median, spread.low, spread.high)
                for own in faster
                if (spread := own.speedup_by_group.get(group)) is not None
            ],
        )
        for group in groups
    ]
    rows = [
        [group, bar.label, f"{bar.value:.2f}", f"{bar.low:.2f}", f"{bar.high:.2f}"]
        for group, own in sections
        for bar in own
    ]
    return _figure(
        "Speedup by prompt group",
        charts.bars(
            sections,
            title="Speedup over plain eager decoding, by prompt group",
            axis="speedup over plain eager decoding (times)",
            reference=1.0,
        ),
        ["group", "method", "median", "first quartile", "third quartile"],
        rows,
        "Bars: median over prompts; whiskers: quartiles (of fewer than four prompts all). Dashed: no speedup.",
    )


def _distribution(faster: Sequence[Figures]) -> str:
    rows = [(own.variant, own.speedups) for own in faster if own.speedups]
    return _figure(
        "Speedup over prompts",
        charts.boxes(
            rows,
            title="Distribution of the speedup over prompts",
            axis="speedup over plain eager decoding (times)",
            reference=1.0,
        ),
        ["method", "prompts", "minimum", "median", "maximum", "prompts below 1.0"],
        [
            [
                variant,
                str(len(values)),
                f"{min(values):.2f}",
                f"{sorted(values)[len(values) // 2]:.2f}",
                f"{max(values):.2f}",
                str(sum(value < 1 for value in values)),
            ]
            for variant, values in rows
        ],
        "One dot per prompt (or batch of prompts); box: quartiles; thick line: median.",
    )


def _by_depth(title: str, axis: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    curves = [Line(variant, list(enumerate(values, start=1))) for variant, values in rows if values]
    deepest = max(len(curve.points) for curve in curves)
    return _figure(
        title,
        charts.lines(curves, title=title, x_axis="depth in the draft tree (tokens after the root)", y_axis=axis),
        ["method", *(f"depth {depth}" for depth in range(1, deepest + 1))],
        [[variant, *(f"{value:.2f}" for value in values)] + [""] * (deepest - len(values)) for variant, values in rows],
    )


def _histogram(drafting: Sequence[Figures]) -> str:
    most = max(len(own.histogram) for own in drafting)
    rows = [[own.variant, *map(str, own.histogram)] + [""] * (most - len(own.histogram)) for own in drafting]
    return (
        "<details class='alternative'><summary>Acceptance histogram: rounds by accepted tokens</summary>"
        + _table(["method", *map(str, range(most))], rows)
        + "</details>"
    )


def _stages(drafting: Sequence[Figures]) -> str:
    rows = [(own.variant, [1000 * own.round_s[stage] for stage in ROUND_STAGES]) for own in drafting]
    shares = [
        [own.variant, *(milliseconds(own.round_s[stage]) for stage in ROUND_STAGES)]
        + [f"{own.call_s[stage] / sum(own.call_s.values()):.1%}" for stage in ("prefill", "rest")]
        for own in drafting
    ]
    return _figure(
        "Time of a round by stage",
        charts.stacked(rows, ROUND_STAGES, title="Milliseconds per round by stage", axis="time per round (ms)"),
        ["method", *(f"{stage} (ms)" for stage in ROUND_STAGES), "prefill, of whole calls", "rest, of whole calls"],
        shares,
        "Prefill, these stages and the rest (before and after the rounds) add up to the time of the calls.",
    )


def _context(curves: dict[str, list[tuple[int, float]]]) -> str:
    centres = sorted({centre for points in curves.values() for centre, _ in points})
    rows = []
    for variant, points in curves.items():
        known = dict(points)
        rows.append([variant, *(f"{known[centre]:.0f}" if centre in known else "" for centre in centres)])
    return _figure(
        "Speed over context length",
        charts.lines(
            [Line(variant, [(float(centre), rate) for centre, rate in points]) for variant, points in curves.items()],
            title="Tokens per second over context length",
            x_axis="context (tokens, prompt included)",
            y_axis="speed (tokens/s)",
        ),
        ["method", *(f"{centre} tokens" for centre in centres)],
        rows,
        "The prefill is excluded here.",
    )


def _budgets(sweeps: dict[str, list[tuple[int, Figures]]]) -> Iterator[str]:
    known = {variant: [(budget, own) for budget, own in points if own.speedup] for variant, points in sweeps.items()}
    axis = "budget (drafted nodes per round, root not counted)"
    rows = [
        [variant, str(budget), COLUMNS["speedup over eager"](own), COLUMNS["mean acceptance length"](own)]
        for variant, points in known.items()
        for budget, own in points
    ]
    speed = [
        Line(variant, [(float(budget), own.speedup.median) for budget, own in points if own.speedup])
        for variant, points in known.items()
    ]
    length = [
        Line(variant, [(float(budget), own.mean_acceptance_length or 0.0) for budget, own in points])
        for variant, points in known.items()
    ]
    yield _figure(
        "Budget against speedup",
        charts.lines(
            speed, title="Speedup over budget", x_axis=axis, y_axis="speedup (times)", logarithmic=True, reference=1.0
        ),
        ["method", "budget", "speedup", "mean acceptance length"],
        rows,
        "As in Figure 3 of the DDTree paper: acceptance grows with the budget; the speedup peaks where verifying more "
        "nodes costs more than it saves.",
    )
    yield (
        "<figure><figcaption>Budget against mean acceptance length</figcaption>"
        + charts.lines(
            length, title="Mean acceptance length over budget", x_axis=axis, y_axis="tokens per round", logarithmic=True
        )
        + "<p class='remark'>The numbers are in the table above.</p></figure>"
    )


def _figure(title: str, chart: str, columns: Sequence[str], rows: _Rows, remark: str = "") -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{chart}"
        + (f"<p class='remark'>{escape(remark)}</p>" if remark else "")
        + f"<details class='alternative'><summary>{escape(title)}: the numbers</summary>"
        + f"{_table(columns, rows)}</details></figure>"
    )


def _table(columns: Sequence[str], rows: _Rows) -> str:
    head = "".join(f"<th scope='col'>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + f"<th scope='row'>{escape(row[0])}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _code(text: str) -> str:
    before, *rest = text.split("`")
    return escape(before) + "".join(
        f"<code>{escape(part)}</code>" if index % 2 == 0 else escape(part) for index, part in enumerate(rest)
    )
