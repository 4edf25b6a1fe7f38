"""Measure SpecBranch on two cores: speed against the same pair in turn, overlap, rollback rate, branches, memory.

    taskset -c 0,1 python examples/measure_specbranch.py --record

Target and draft model have one thread each. For each prompt all variants run in turn, so that other load on the machine
slows all of them alike; speedups are computed per prompt and reported as medians. SpecBranch has hedges and H-RAD
(`hedge`, `lengths` of `SpecBranchDrafter`); "no hedges, H-RAD" is the paper's form. `--record` writes the figures
beside the weights and into the card.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bundle import TINY
from harness import (
    DEVICE,
    about,
    acceptance_for,
    load_inputs,
    load_target,
    mean_acceptance_length,
    table_of,
    wide_console,
    write_json,
)
from rich.progress import track

from hf_specdec import load_drafter
from hf_specdec.decoding.devices import wait_for

# Of every variant, whatever the checkpoint's own settings are.
SHARED = {"pauses": False, "parallel": True, "lengths": "h_rad", "hedge": True, "k_max": 6}
SERIAL = "in turn (SpS)"
WAYS: dict[str, dict[str, Any]] = {
    SERIAL: {"parallel": False, "lengths": "fixed"},
    "in turn, H-RAD": {"parallel": False},
    "PEARL": {"lengths": "fixed", "k_max": 1},
    "no hedges, no H-RAD": {"hedge": False, "lengths": "fixed"},
    "no hedges, H-RAD": {"hedge": False},
    "no hedges, H-RAD a priori": {"hedge": False, "selection": "a_priori"},
    "hedges, no H-RAD": {"lengths": "fixed"},
    "hedges, confidence": {"lengths": "confidence"},
    "SpecBranch k_max=1": {"k_max": 1},
    "SpecBranch k_max=2": {"k_max": 2},
    "SpecBranch k_max=4": {"k_max": 4},
    "SpecBranch k_max=6": {},
}


class Tally:
    """Measurements of one variant, one per prompt."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.stats: list[Any] = []

    def total(self, name: str) -> float:
        return sum(getattr(stats, name) for stats in self.stats)


def row_of(tally: Tally, plain: Tally, serial: Tally, entry_bytes: int) -> dict[str, Any]:
    """The figures of one variant."""
    rounds = tally.total("num_spec_steps")
    runs = rounds - tally.total("num_foreseen")
    shorter = tally.total("ahead_shorter_s")
    saved = tally.total("ahead_time_s") + tally.total("ahead_verify_s") - tally.total("ahead_wall_s")
    per_round = {part: round(1e3 * tally.total(f"ahead_{part}_s") / rounds, 3) for part in ("time", "verify", "wall")}

    def ratio(other: Tally) -> float:
        return round(statistics.median(b / a for a, b in zip(tally.seconds, other.seconds, strict=True)), 3)

    return {
        "speedup": ratio(plain),
        "speedup_over_in_turn": ratio(serial),
        "identical": True,  # else `main` has stopped with an error
        "mean_acceptance_length": mean_acceptance_length(tally.stats),
        "continuous_acceptance_length": round((rounds + tally.total("num_accepted_draft_tokens")) / max(1, runs), 3),
        "rollback_rate": round(1 - tally.total("num_path_kept") / tally.total("num_path_drafts"), 3),
        "overlap_efficiency": round(saved / shorter, 3) if shorter else None,
        "round_ms": per_round if shorter else None,
        "peak_draft_cache_kib": round(max(stats.peak_draft_entries for stats in tally.stats) * entry_bytes / 1024, 1),
        "speed_ratio": round(tally.stats[-1].speed_ratio, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY.target)
    parser.add_argument("--drafter", default=str(TINY.folder / "specbranch"))
    parser.add_argument("--prompts", type=Path, default=TINY.prompts, help='lines of {"prompt": ...}')
    parser.add_argument("--num-prompts", type=int, default=32, help="0 for all")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft-length", type=int, help="of all variants (default: the measured speed ratio)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="write the figures into the drafter's folder and card")
    arguments = parser.parse_args()

    console = wide_console()
    torch.set_num_threads(1)
    model, tokenizer = load_target(arguments.model)
    prompts = load_inputs(tokenizer, arguments.prompts, arguments.num_prompts)
    settings = {"max_new_tokens": arguments.new_tokens, "do_sample": False}

    ratio = arguments.draft_length
    if ratio is None:  # measured once, then the same for all variants
        first = load_drafter(arguments.drafter, model)
        model.generate(**prompts[0], **settings, assistant_model=first)
        ratio = first.stats.speed_ratio
        console.print(f"measured speed ratio c = T_p / T_q: {ratio:.2f}")
    length = max(1, int(ratio))
    drafters = {
        name: load_drafter(arguments.drafter, model, speed_ratio=float(ratio), depth=length, **(SHARED | options))
        for name, options in WAYS.items()
    }
    plain, tallies = Tally(), {name: Tally() for name in WAYS}
    for position, inputs in enumerate(track([prompts[0], *prompts], "generating", console=console, transient=True)):
        alone = None
        for name, drafter in [("plain", None), *drafters.items()]:
            started = time.perf_counter()
            extra = {} if drafter is None else {"assistant_model": drafter}
            output = model.generate(**inputs, **settings, **extra)
            wait_for(model.device)
            seconds = time.perf_counter() - started
            alone = output if alone is None else alone
            if not torch.equal(output, alone):
                raise SystemExit(f"{name} gave other tokens than the target alone, on prompt {position}")
            if position:  # the first call warms up
                tally = plain if drafter is None else tallies[name]
                tally.seconds.append(seconds)
                if drafter is not None:
                    tally.stats.append(drafter.stats)

    draft_model = drafters[SERIAL].draft_model
    config = draft_model.config
    entry_bytes = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * draft_model.dtype.itemsize
    )
    figures = {name: row_of(tally, plain, tallies[SERIAL], entry_bytes) for name, tally in tallies.items()}
    headings = (
        "variant", "speedup", "over in turn", "tau", "M", "rollback", "overlap", "draft|verify|wall ms", "draft KV KiB"
    )  # fmt: skip
    rows = [
        [
            name,
            f"{row['speedup']:.2f}x",
            f"{row['speedup_over_in_turn']:.2f}x",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['continuous_acceptance_length']:.2f}",
            f"{row['rollback_rate']:.0%}",
            "" if row["overlap_efficiency"] is None else f"{row['overlap_efficiency']:.2f}",
            "" if row["round_ms"] is None else "|".join(f"{value:.1f}" for value in row["round_ms"].values()),
            f"{row['peak_draft_cache_kib']:.0f}",
        ]
        for name, row in figures.items()
    ]
    title = f"greedy, {len(prompts)} prompts, {arguments.new_tokens} tokens, drafts of at most {length}"
    console.print(table_of(title, headings, rows))

    # Theorem 1, from the acceptance rate of drafts of one length and the time of one forward of each model.
    serial = tallies[SERIAL]
    tau, drafted_s = figures[SERIAL]["mean_acceptance_length"], sum(s.stage_time_s["draft"] for s in serial.stats)
    draft_s = drafted_s / serial.total("num_path_drafts")
    verify_s = sum(s.stage_time_s["verify"] for s in serial.stats) / serial.total("num_spec_steps")
    alpha = acceptance_for(tau - 1, length)
    tokens = arguments.new_tokens * len(prompts)
    predictions = {
        SERIAL: serial_latency(alpha, length, verify_s / draft_s, draft_s),
        "PEARL": parallel_latency(alpha, length, verify_s / draft_s, draft_s),
    }
    latencies = {}
    for name, predicted in predictions.items():
        measured = sum(tallies[name].seconds) / tokens
        latencies[name] = {"predicted_ms": round(1e3 * predicted, 3), "measured_ms": round(1e3 * measured, 3)}
        console.print(f"{name}: {1e3 * predicted:.2f} ms per token by the model, {1e3 * measured:.2f} ms measured")
    console.print(
        f"alpha {alpha:.3f}, T_q {1e3 * draft_s:.2f} ms, T_p {1e3 * verify_s:.2f} ms (Theorem 1, Section 4.1)"
    )

    record = {
        "target": arguments.model,
        "drafter": arguments.drafter,
        "methods": figures,
        "latency_model": {"alpha": round(alpha, 4), "draft_length": length, **latencies},
        "prompts": f"{len(prompts)} held-out prompts, {arguments.new_tokens} new tokens",
        **about(f"{DEVICE}, {len(os.sched_getaffinity(0))} cores"),
    }
    write_json(arguments.json, record)
    if arguments.record:
        drafter = drafters["SpecBranch k_max=6"]
        drafter.measurements = record
        drafter.write_records(arguments.drafter)


# The possible gain of parallel drafting: the latency model of SpecBranch, Section 4.1 and Appendix B. Times are in
# units of `draft_s`, the time of one forward of the draft model (T_q, the paper's t). A verification takes
# `speed_ratio` (c) of them, a draft has `length` (gamma) tokens, and each is accepted with probability `acceptance`
# (alpha), independently of the others. The model has no branches and no H-RAD, so it is a bound for PEARL.


def expected_accepted(acceptance: float, length: int) -> float:
    """Mean accepted tokens of a draft: alpha (1 - alpha^gamma) / (1 - alpha). SpecBranch, Lemma 1.

    Example:
        >>> round(expected_accepted(0.5, 3), 3), expected_accepted(1.0, 3)
        (0.875, 3.0)
    """
    if acceptance == 1:
        return float(length)
    return acceptance * (1 - acceptance**length) / (1 - acceptance)


def serial_latency(acceptance: float, length: int, speed_ratio: float, draft_s: float = 1.0) -> float:
    """Time per token if drafting and verifying alternate: (gamma + c) t over 1 + the accepted tokens.

    Section 4.1 gives it for full acceptance. After a rejection the target still adds the bonus token.

    Example:
        >>> serial_latency(1.0, 8, 8.0) == (8 + 8) / 9
        True
    """
    return (length + speed_ratio) * draft_s / (1 + expected_accepted(acceptance, length))


def parallel_latency(acceptance: float, length: int, speed_ratio: float, draft_s: float = 1.0) -> float:
    """Time per token if both run in parallel and a rejection wastes the parallel drafts. SpecBranch, Theorem 1.

    2 max(gamma t, c t) / ((1 + alpha^gamma) E[accepted]): two rounds, of which the second adds its tokens only if the
    first was accepted completely. Bonus tokens are not counted, so for low acceptance the model overestimates the time.

    Raises:
        ValueError: an argument is out of range; with acceptance 0 the time would be infinite.

    Example:
        >>> parallel_latency(1.0, 8, 8.0)  # Eq. 1: one draft token's time per token
        1.0
        >>> round(parallel_latency(0.8, 8, 8.0), 3)
        4.116
    """
    if not 0 < acceptance <= 1 or length < 1 or speed_ratio <= 0:
        raise ValueError(
            f"acceptance={acceptance}, length={length}, speed_ratio={speed_ratio}: the model needs an acceptance above "
            "0 and at most 1, a length of at least 1 and a positive speed ratio."
        )
    both = 2 * max(length, speed_ratio) * draft_s
    return both / ((1 + acceptance**length) * expected_accepted(acceptance, length))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nStopped; nothing was written.")
