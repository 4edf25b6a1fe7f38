"""The columns of the main table, the same in Markdown and HTML, and the formats of their values."""

from __future__ import annotations

from collections.abc import Callable

from hf_specdec.benchmark.figures import Figures, Spread


def _of(spread: Spread | None, form: Callable[[float], str]) -> str:
    """A median with its interval; only the median if all three have the same format."""
    if spread is None:
        return "-"
    low, median, high = form(spread.low), form(spread.median), form(spread.high)
    return median if low == high == median else f"{median} ({low}-{high})"


def _identical(figures: Figures) -> str:
    if not figures.num_compared:
        return "-"
    if figures.num_identical == figures.num_compared:
        return "yes"
    return f"{figures.num_identical} of {figures.num_compared}, gap up to {figures.largest_gap:.2g}"


def milliseconds(seconds: float) -> str:
    """Seconds, in milliseconds with three significant digits.

    Example:
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
    "over compiled": lambda own: "-" if own.speedup_compiled is None else f"{own.speedup_compiled.median:.2f}x",
    "mean acceptance length": lambda own: (
        "-" if own.mean_acceptance_length is None else f"{own.mean_acceptance_length:.2f}"
    ),
    "draft acceptance rate": lambda own: (
        "-" if own.draft_acceptance_rate is None else f"{own.draft_acceptance_rate:.0%}"
    ),
    "drafting": lambda own: "-" if own.drafting_share is None else f"{own.drafting_share:.0%}",
    "ms per round": lambda own: milliseconds(sum(own.round_s.values())) if own.round_s else "-",
    "round / floor": lambda own: "-" if own.round_to_floor is None else f"{own.round_to_floor:.1f}",
    "TTFT ms": lambda own: milliseconds(own.ttft_s.median),
    "TPOT ms": lambda own: "-" if own.tpot_s is None else milliseconds(own.tpot_s.median),
    "peak MB": lambda own: "-" if own.peak_bytes is None else f"{own.peak_bytes / 1e6:.1f}",
    "identical": _identical,
}

LEGEND = (
    "Rank: by tokens/s; variants whose repeats overlap share one. Tokens/s: all new tokens over the time of whole "
    "calls, prefill included; median over repeats. Speedup: by prompt, in the same repeat; median over prompts "
    "(quartiles). Mean acceptance length: tokens per round, bonus token included, prefill excluded, pooled over "
    "rounds. Draft acceptance rate: accepted over drafted tokens; on trees most nodes are alternatives, so compare it "
    "only at equal budgets. Drafting: share of the whole time. Round / floor: time of a round over the time to read "
    "the target's weights once at the bandwidth of a copy. TTFT: time to first token; TPOT: time per further token. "
    "Peak MB: memory above the memory in use before a call, on the longest prompts. Identical: greedy output equal to "
    "plain eager decoding's, token for token; gap: between the target's two best logits at the first difference."
)
