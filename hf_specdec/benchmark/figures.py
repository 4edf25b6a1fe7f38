"""Figures computed from the calls of a run. Pure functions of records; names follow vLLM's metrics.

There is one set of figures per cell: one temperature and one batch size. The speedup of a call is relative to the
baseline's call on the same prompts in the same repeat, so that other load on the machine affects both. A prompt's
speedup is the median over repeats, a method's the median over prompts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_specdec.benchmark.records import Call, Environment
from hf_specdec.benchmark.variants import COMPILED, PACKED, PLAIN
from hf_specdec.decoding.stats import STAGES

# The stages of a round; the rest of a call is the prefill, and the work of generate before and after the loop.
ROUND_STAGES = tuple(stage for stage in STAGES if stage != "prefill")


@dataclass(frozen=True)
class Spread:
    """A median and quartiles.

    Attributes:
        median: of all values.
        low: first quartile; the minimum of fewer than four values.
        high: third quartile; the maximum of fewer than four values.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value.

        Examples:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, low=1.0, high=3.0)
        """
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Figures:
    """The figures of one variant in one cell.

    Attributes:
        variant: its name.
        tokens_per_s: all new tokens over all time, by repeat.
        speedup: over plain eager, by prompt; None for plain eager itself.
        speedup_packed: over plain with packed weights; None if that was not measured.
        speedup_compiled: over plain compiled; None if that was not measured.
        speedup_by_group: by prompt group.
        ttft_s: time to first token.
        tpot_s: time per further token.
        mean_acceptance_length: tokens per round, bonus included, pooled over rounds; None without speculation.
        continuous_acceptance_length: tokens from one rollback to the next, across rounds; None without speculation.
        rollback_rate: discarded share of the tokens drafted in sequence; None for drafters that do not count them.
        draft_acceptance_rate: accepted over drafted tokens; on trees comparable only at equal budgets.
        drafting_share: of the whole time.
        round_s: of one round, by stage.
        round_to_floor: a round's time over the time to read the target's weights once.
        peak_bytes: largest of any call.
        num_identical: calls whose output equals plain decoding's, of `num_compared`.
        num_compared: greedy calls.
        rank: by tokens/s, the fastest first; variants whose spreads over repeats overlap share one. 0 if not yet set.
        largest_gap: between the target's two best logits at any first difference; None without one.
    """

    variant: str
    tokens_per_s: Spread
    speedup: Spread | None
    speedup_packed: Spread | None
    speedup_compiled: Spread | None
    speedup_by_group: dict[str, Spread]
    ttft_s: Spread
    tpot_s: Spread | None
    mean_acceptance_length: float | None
    continuous_acceptance_length: float | None
    rollback_rate: float | None
    draft_acceptance_rate: float | None
    drafting_share: float | None
    round_s: dict[str, float]
    round_to_floor: float | None
    peak_bytes: int | None
    num_identical: int
    num_compared: int
    largest_gap: float | None
    rank: int = 0


@dataclass(frozen=True)
class Cell:
    """All variants at one temperature and batch size, in the order of the run; swept ones separately, by budget."""

    temperature: float
    batch_size: int
    figures: list[Figures]
    sweeps: dict[str, list[tuple[int, Figures]]]

    @property
    def title(self) -> str:
        how = "Greedy" if self.temperature == 0 else f"Temperature {self.temperature:g}"
        return f"{how}, batch size {self.batch_size}"


def cells(calls: Iterable[Call], environment: Environment) -> list[Cell]:
    """The figures of a run.

    Args:
        calls: in any order.
        environment: of the run.
    """
    by_cell: dict[tuple[float, int], list[Call]] = defaultdict(list)
    for call in calls:
        by_cell[call.temperature, call.batch_size].append(call)
    return [_cell(temperature, size, own, environment) for (temperature, size), own in by_cell.items()]


def _cell(temperature: float, batch_size: int, calls: list[Call], environment: Environment) -> Cell:
    by_variant: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_variant[call.variant].append(call)
    baselines = {name: by_variant.get(name, []) for name in (PLAIN, PACKED, COMPILED)}
    figures: list[Figures] = []
    sweeps: dict[str, list[tuple[int, Figures]]] = defaultdict(list)
    for own in sorted(by_variant.values(), key=lambda own: own[0].budget or 0):  # only swept variants have one
        made = figures_of(own, baselines, environment)
        if own[0].swept_from is None:
            figures.append(made)
        else:
            assert own[0].budget is not None
            sweeps[own[0].swept_from].append((own[0].budget, made))
    return Cell(temperature, batch_size, ranked(figures), dict(sweeps))


def ranked(figures: list[Figures]) -> list[Figures]:
    """The same figures with their ranks, in the same order.

    A variant shares the rank of the next faster one if their difference may be noise: its fastest repeat is at least as
    fast as the slowest repeat of the other.
    """
    ranks: dict[str, int] = {}
    above: Figures | None = None
    order = sorted(figures, key=lambda own: own.tokens_per_s.median, reverse=True)
    for position, own in enumerate(order, start=1):
        tied = above is not None and own.tokens_per_s.high >= above.tokens_per_s.low
        ranks[own.variant] = ranks[above.variant] if tied and above is not None else position
        above = own
    return [dataclasses.replace(own, rank=ranks[own.variant]) for own in figures]


def _over(baseline: list[Call], calls: list[Call]) -> Spread | None:
    ratios = list(speedups_by_prompt(calls, baseline).values())
    return Spread.of(ratios) if ratios and calls[0].variant != baseline[0].variant else None


def figures_of(calls: list[Call], baselines: dict[str, list[Call]], environment: Environment) -> Figures:
    """One variant's figures from its calls and those of the baselines in the same cell."""
    seconds = sum(call.seconds for call in calls)
    speedups = speedups_by_prompt(calls, baselines[PLAIN])
    rounds = [accepted for call in calls for row in call.per_round for accepted in row]
    forwards = sum(call.num_target_forwards for call in calls)
    drafted = sum(call.num_draft_tokens for call in calls)
    runs = max(1, len(rounds) - sum(call.num_foreseen for call in calls))
    path_drafts, path_kept = (sum(getattr(call, of) for call in calls) for of in ("num_path_drafts", "num_path_kept"))
    stages = {stage: sum(call.stages_s.get(stage, 0.0) for call in calls) for stage in STAGES}
    round_s = {stage: stages[stage] / forwards for stage in ROUND_STAGES} if forwards else {}
    floor_s = environment.weight_bytes / environment.copy_bytes_per_s
    tpots = [(call.seconds - call.ttft_s) / (max(call.new_tokens) - 1) for call in calls if max(call.new_tokens) > 1]
    gaps = [call.difference.top2_gap for call in calls if call.difference is not None]
    compared = [call.identical for call in calls if call.identical is not None]
    groups: dict[str, list[float]] = defaultdict(list)
    for batch, groups_of_batch in {call.batch: call.groups for call in calls}.items():
        for group in dict.fromkeys(groups_of_batch) if batch in speedups else ():
            groups[group].append(speedups[batch])
    peaks = [call.peak_bytes for call in calls if call.peak_bytes is not None]
    return Figures(
        variant=calls[0].variant,
        tokens_per_s=Spread.of(rates_by_repeat(calls)),
        speedup=_over(baselines[PLAIN], calls),
        speedup_packed=_over(baselines[PACKED], calls),
        speedup_compiled=_over(baselines[COMPILED], calls),
        speedup_by_group={group: Spread.of(values) for group, values in groups.items()},
        ttft_s=Spread.of([call.ttft_s for call in calls]),
        tpot_s=Spread.of(tpots) if tpots else None,
        mean_acceptance_length=1 + sum(rounds) / len(rounds) if rounds else None,
        continuous_acceptance_length=(len(rounds) + sum(rounds)) / runs if rounds else None,
        rollback_rate=1 - path_kept / path_drafts if path_drafts else None,
        draft_acceptance_rate=sum(rounds) / drafted if drafted else None,
        drafting_share=(stages["draft"] + stages["tree"]) / seconds if rounds else None,
        round_s=round_s,
        round_to_floor=sum(round_s.values()) / floor_s if round_s else None,
        peak_bytes=max(peaks, default=None),
        num_identical=sum(compared),
        num_compared=len(compared),
        largest_gap=max(gaps, default=None),
    )


def rates_by_repeat(calls: Iterable[Call]) -> list[float]:
    """Tokens per second of each repeat: all its tokens over all its time, prefill included."""
    by_repeat: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        by_repeat[call.repeat].append(call)
    return [sum(sum(call.new_tokens) for call in own) / sum(call.seconds for call in own) for own in by_repeat.values()]


def speedups_by_prompt(calls: Iterable[Call], baseline: Iterable[Call]) -> dict[int, float]:
    """The ratio of tokens per second to the baseline's, by batch of prompts; the median over repeats."""
    rates = {(call.batch, call.repeat): sum(call.new_tokens) / call.seconds for call in baseline}
    ratios: dict[int, list[float]] = defaultdict(list)
    for call in calls:
        if (base := rates.get((call.batch, call.repeat))) is not None:
            ratios[call.batch].append(sum(call.new_tokens) / call.seconds / base)
    return {batch: statistics.median(values) for batch, values in ratios.items()}
