"""The project's criteria for speed and exactness, evaluated on the rows of one run of the speed suite.

A criterion for GPUs is evaluated only if the run used an 8B shape in bfloat16 on a GPU. A criterion whose part was not
run is "not measured".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Criterion:
    """One criterion.

    Attributes:
        text: what is compared with the limit.
        part: part of the suite that measures it.
        limit: of the figure.
        figure: computes the figure from the rows of the part; None if they do not contain it.
        at_least: whether the limit is a lower bound; else it is an upper bound.
        on_gpu: whether the criterion is for 8B shapes in bfloat16 on a GPU.
    """

    text: str
    part: str
    limit: float
    figure: Callable[[Sequence[Row]], float | None]
    at_least: bool = False
    on_gpu: bool = True


def _best(rows: Iterable[Row], name: str, *, most: bool = False, **where: Any) -> float | None:
    """The smallest (or largest) figure over the rows with these values: of several modes, the best one counts."""
    values = [row[name] for row in rows if all(row.get(key) == value for key, value in where.items())]
    return (max if most else min)(values) if values else None


def _over_reference(rows: Sequence[Row], name: str) -> float | None:
    ours, reference = (_best(rows, name, way=way) for way in ("ours", "reference"))
    return ours / reference if ours is not None and reference else None


def _worst_auto(rows: Sequence[Row], name: str) -> float | None:
    return min((row[name] for row in rows), default=None)


CRITERIA = (
    Criterion("round-to-floor, context 1024, 64 nodes, drafter included", "rounds", 1.5,
              lambda rows: _best(rows, "round_to_floor", context=1024, nodes=64, network="dflash")),
    Criterion("round-to-floor of verify alone, context 1024, 64 nodes", "rounds", 1.25,
              lambda rows: _best(rows, "verify_to_floor", context=1024, nodes=64)),
    Criterion("tokens/s at a mean acceptance length of 6.5, context 1024, 64 nodes", "rounds", 1000.0,
              lambda rows: _best(rows, "tokens_per_s", most=True, context=1024, nodes=64, network="dflash"),
              at_least=True),
    Criterion("round at context 8192 over one at 1024, 64 nodes", "rounds", 1.3,
              lambda rows: _best(rows, "times_first_context", context=8192, nodes=64)),
    Criterion("last quarter of a long text over the first, per round", "length", 1.05,
              lambda rows: _best(rows, "last_over_first")),
    Criterion("tokens/s over those of the reference DDTree loop", "reference", 2.0,
              lambda rows: _best([row for row in rows if row["way"] != "reference"], "times_reference", most=True),
              at_least=True),
    Criterion("host time of a round outside both forwards, over the reference DDTree loop's, on a CPU", "host", 0.8,
              lambda rows: _over_reference(rows, "host_ms"), on_gpu=False),
    Criterion("`auto` over the best fixed budget, worst prompt group", "auto", 0.95,
              lambda rows: _worst_auto(rows, "auto_over_best"), at_least=True, on_gpu=False),
    Criterion("`auto` over plain decoding, slowest prompt", "auto", 0.97,
              lambda rows: _worst_auto(rows, "slowest_auto"), at_least=True, on_gpu=False),
    Criterion("share of outputs in float32 identical to plain decoding, worst drafter", "exact", 1.0,
              lambda rows: _best(rows, "identical", dtype="float32"), at_least=True, on_gpu=False),
    Criterion("first differences from plain decoding that rounding does not explain", "exact", 0.0,
              lambda rows: sum(row["above_rounding"] for row in rows), on_gpu=False),
)  # fmt: skip


def verdicts(environment: Row, rows: Sequence[Row]) -> list[Row]:
    """A row per criterion: its text, the limit, the figure of this run, and whether it holds.

    Args:
        environment: of the run.
        rows: of all its parts.
    """
    on_gpu = environment["on_gpu"] and environment["shape"] != "tiny" and environment["dtype"] == "bfloat16"
    found = []
    for criterion in CRITERIA:
        own = [row for row in rows if row["part"] == criterion.part]
        figure = criterion.figure(own) if own and (on_gpu or not criterion.on_gpu) else None
        holds: str | bool = NOT_MEASURED
        if figure is not None:
            holds = bool(figure >= criterion.limit if criterion.at_least else figure <= criterion.limit)
        limit = f"{'at least' if criterion.at_least else 'at most'} {criterion.limit:g}"
        shown = NOT_MEASURED if figure is None else figure
        found.append({"line": criterion.text, "limit": limit, "figure": shown, "holds": holds})
    return found
