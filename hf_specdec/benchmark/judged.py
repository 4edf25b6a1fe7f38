"""What the speed of a round is judged by: each line with its figure from a run of `speed.py`, or "not measured".

A line about the GPU counts only if it was measured there, on an 8B shape in bfloat16. Nothing is carried over from
other runs: a record says what its own run has shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Line:
    """One claim.

    Attributes:
        text: what is asked.
        part: of the suite that shows it.
        limit: that the figure is held to.
        figure: from the rows of the part; None where they do not show it.
        at_least: whether the limit is the least, not the most.
        on_gpu: whether it is about 8B shapes in bfloat16 on a GPU.
    """

    text: str
    part: str
    limit: float
    figure: Callable[[Sequence[Row]], float | None]
    at_least: bool = False
    on_gpu: bool = True


def _best(rows: Iterable[Row], name: str, *, most: bool = False, **where: Any) -> float | None:
    """The least (or most) of a figure over the rows that have these values: modes compete, the better one counts."""
    values = [row[name] for row in rows if all(row.get(key) == value for key, value in where.items())]
    return (max if most else min)(values) if values else None


def _over_reference(rows: Sequence[Row], name: str) -> float | None:
    ours, reference = (_best(rows, name, way=way) for way in ("ours", "reference"))
    return ours / reference if ours is not None and reference else None


def _worst_auto(rows: Sequence[Row], name: str) -> float | None:
    return min((row[name] for row in rows), default=None)


LINES = (
    Line("round-to-floor, context 1024, 64 nodes, drafter included", "rounds", 1.5,
         lambda rows: _best(rows, "round_to_floor", context=1024, nodes=64, network=True)),
    Line("round-to-floor of verify alone, context 1024, 64 nodes", "rounds", 1.25,
         lambda rows: _best(rows, "verify_to_floor", context=1024, nodes=64)),
    Line("tokens/s at a mean acceptance length of 6.5, context 1024, 64 nodes", "rounds", 1000.0,
         lambda rows: _best(rows, "tokens_per_s", most=True, context=1024, nodes=64, network=True), at_least=True),
    Line("round at context 8192 over one at 1024, 64 nodes", "rounds", 1.3,
         lambda rows: _best(rows, "times_first_context", context=8192, nodes=64)),
    Line("last quarter of a long text over the first, per round", "length", 1.05,
         lambda rows: _best(rows, "last_over_first")),
    Line("tokens/s over those of the reference DDTree loop", "reference", 2.0,
         lambda rows: _best([row for row in rows if row["way"] != "reference"], "times_reference", most=True),
         at_least=True),
    Line("host time of a round besides both forwards, over that of the reference DDTree loop, on a CPU", "host", 0.8,
         lambda rows: _over_reference(rows, "host_ms"), on_gpu=False),
    Line("`auto` over the best fixed budget, worst prompt group", "auto", 0.95,
         lambda rows: _worst_auto(rows, "auto_over_best"), at_least=True, on_gpu=False),
    Line("`auto` over plain decoding, slowest prompt", "auto", 0.97,
         lambda rows: _worst_auto(rows, "slowest_auto"), at_least=True, on_gpu=False),
    Line("share of outputs in float32 that are plain decoding's, worst way of drafting", "exact", 1.0,
         lambda rows: _best(rows, "identical", dtype="float32"), at_least=True, on_gpu=False),
    Line("first differences from plain decoding above rounding", "exact", 0.0,
         lambda rows: sum(row["above_rounding"] for row in rows), on_gpu=False),
)  # fmt: skip


def judged(environment: Row, rows: Sequence[Row]) -> list[Row]:
    """A row per line: what is asked, the limit, the figure of this run, and whether it holds.

    Args:
        environment: of the run.
        rows: of all its parts.
    """
    on_gpu = environment["on_gpu"] and environment["shape"] != "tiny" and environment["dtype"] == "bfloat16"
    network = environment["drafter_network"]
    verdicts = []
    for line in LINES:
        own = [row | {"network": network} for row in rows if row["part"] == line.part]
        figure = line.figure(own) if own and (on_gpu or not line.on_gpu) else None
        holds: str | bool = NOT_MEASURED
        if figure is not None:
            holds = bool(figure >= line.limit if line.at_least else figure <= line.limit)
        limit = f"{'at least' if line.at_least else 'at most'} {line.limit:g}"
        verdicts.append(
            {"line": line.text, "limit": limit, "figure": NOT_MEASURED if figure is None else figure, "holds": holds}
        )
    return verdicts
