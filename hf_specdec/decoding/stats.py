"""SpeculationStats: counts and times of speculative decoding in one `generate` call. Names follow vLLM's metrics."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from html import escape
from itertools import chain
from typing import Any

from torch import Tensor

from hf_specdec.decoding.observers import Observer, Round
from hf_specdec.decoding.stopwatch import Stopwatch
from hf_specdec.decoding.target import TargetModel

logger = logging.getLogger(__name__)

# The stages of a call, in order; work after the last round belongs to none of them.
STAGES = ("prefill", "draft", "tree", "verify", "accept", "commit")
# The properties in `SpeculationStats.to_dict`.
DERIVED = (
    "num_spec_steps", "num_accepted_draft_tokens", "mean_acceptance_length", "draft_acceptance_rate",
    "acceptance_histogram", "layers_per_token", "stage_time_s", "draft_time_s", "continuous_acceptance_length",
    "overlap_efficiency", "rollback_rate",
)  # fmt: skip


@dataclass
class SourceCounts:
    """Counts of one of several drafters in a call. A token that two drafters proposed counts for both.

    Attributes:
        num_drafts: rounds in which it drafted.
        num_draft_tokens: verified nodes that it proposed.
        num_accepted_tokens: accepted tokens that it proposed.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass
class SpeculationStats(Observer):
    """Counts and times of one `generate` call.

    A round ("spec step" in vLLM) is one draft, one target forward and one commit of one row: with a batch of three rows
    they count as three. The prefill is not a round. Accepted tokens exclude the root and the bonus token, and are
    counted as verified, before a stopping criterion cuts the last round. A round is counted before its tokens are
    streamed, so that a streamer can distinguish drafted tokens from the bonus token.

    Attributes:
        method: the drafter's method, for reports.
        lossless: False if the call accepted tokens that the target did not choose (`drafter.acceptance`).
        per_step_accepted: [row][round], number of accepted drafted tokens.
        num_draft_tokens: nodes drafted and verified, roots excluded.
        num_plain_steps: fallback rounds, which verified no draft: the drafter's output, or the target's logits, were
            NaN or infinite. The call logs their number and reason at its end; it warns if they are the majority.
        num_nan_steps: those of them in which the target's logits are NaN as in plain decoding.
        num_undrafted_steps: skipped rounds, without a draft because drafting was too slow (`tree_budget="auto"` only).
        num_probe_steps: rounds that drafted after skipped ones, to measure again whether drafting is fast enough.
        num_target_forwards: forwards of the target after the prefill; rows of a batch share them. With captured graphs
            this can include one forward after the last round, whose result is discarded.
        num_layers_run: forwards of single decoder layers of the target in rounds, over any number of rows and nodes. A
            layer that the drafter runs and the verification reuses counts once.
        same_bits: whether all logits were computed with the bits of plain decoding (option `same_bits`); if not, they
            are the same up to rounding.
        total_time_s: seconds of the whole call, prefill included.
        ahead_time_s: seconds of drafting in rounds that draft in parallel with the target; see `overlap_efficiency`.
        ahead_verify_s: seconds of the target in those rounds.
        ahead_wall_s: wall time of both together in those rounds, in seconds.
        ahead_shorter_s: sum over those rounds of the shorter of drafting and target, in seconds.
        num_path_drafts: tokens drafted in sequence, one forward of a draft model each, on the path that was continued
            or, if none was, on the likeliest one. Forwards that only other branches needed are not counted; 0 for
            drafters that do not draft in sequence.
        num_path_kept: those of them that became part of the text.
        speed_ratio: T_p / T_q, time of a target verification over time of a draft model forward; 0 if not measured.
        peak_draft_entries: largest number of cache entries per row of the draft model, text and all branches.
        num_prepared: rounds for which drafts had been prepared while the target verified the one before, summed over
            rows.
        num_foreseen: those of them that began with a prepared draft; see `continuous_acceptance_length`.
        by_source: counts of each drafter of a merged drafter, by name; empty for others.
        stopwatch: measures the stages of the call.
        has_begun: whether the call may have chosen tokens; before that it can still be decoded without a draft.
    """

    has_begun = False  # of the process, not a count

    method: str = ""
    lossless: bool = True
    per_step_accepted: list[list[int]] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_plain_steps: int = 0
    num_nan_steps: int = 0
    num_undrafted_steps: int = 0
    num_probe_steps: int = 0
    num_target_forwards: int = 0
    num_layers_run: int = 0
    same_bits: bool = False
    total_time_s: float = 0.0
    ahead_time_s: float = 0.0
    ahead_verify_s: float = 0.0
    ahead_wall_s: float = 0.0
    ahead_shorter_s: float = 0.0
    num_path_drafts: int = 0
    num_path_kept: int = 0
    speed_ratio: float = 0.0
    peak_draft_entries: int = 0
    num_prepared: int = 0
    num_foreseen: int = 0
    by_source: dict[str, SourceCounts] = field(default_factory=dict)

    def count_ahead(self, draft_s: float, verify_s: float, wall_s: float) -> None:
        """Adds a round in which drafter and target ran in parallel: the time of each, and the wall time of both."""
        self.ahead_time_s += draft_s
        self.ahead_verify_s += verify_s
        self.ahead_wall_s += wall_s
        self.ahead_shorter_s += min(draft_s, verify_s)

    def add_drafting(self, other: SpeculationStats) -> None:
        """Adds what a drafter counted on its own: times beside the target, drafts in sequence, cache entries."""
        for name in (
            *("ahead_time_s", "ahead_verify_s", "ahead_wall_s", "ahead_shorter_s"),
            *("num_path_drafts", "num_path_kept", "num_prepared", "num_foreseen"),
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.peak_draft_entries = max(self.peak_draft_entries, other.peak_draft_entries)

    @property
    def continuous_acceptance_length(self) -> float:
        """Mean tokens from one rollback to the next: M of SpecBranch, Section 6.1 and Appendix E.3.

        A round that begins with a prepared draft (`num_foreseen`) continues the run of the round before, so M counts
        across rounds. Without such rounds it is `mean_acceptance_length`.
        """
        return (self.num_accepted_draft_tokens + self.num_spec_steps) / max(1, self.num_spec_steps - self.num_foreseen)

    @property
    def overlap_efficiency(self) -> float:
        """Time saved by running drafter and target in parallel, as a share of the largest possible saving.

        (sum - wall) / (sum - maximum) of the two parts of a round: 1 if the wall time is that of the longer part, 0 if
        it is the sum of both, negative if running in parallel took longer, and 0 without such rounds. On a CPU the
        parts are the processor time of their threads, so that waiting does not count as work.
        """
        saved = self.ahead_time_s + self.ahead_verify_s - self.ahead_wall_s
        return saved / self.ahead_shorter_s if self.ahead_shorter_s else 0.0

    @property
    def rollback_rate(self) -> float:
        """Share of the tokens drafted in sequence that was discarded: RB of SpecBranch, Appendix E.3.

        Alternatives on other branches of a tree are not counted. 0 for drafters that do not count `num_path_drafts`.
        """
        return 1 - self.num_path_kept / self.num_path_drafts if self.num_path_drafts else 0.0

    def __post_init__(self) -> None:
        self.stopwatch = Stopwatch("cpu")

    @property
    def stage_time_s(self) -> dict[str, float]:
        """Seconds by stage. Together with the time after the last round they add up to `total_time_s`.

        prefill: the prompt's forward and the first token; draft: the drafter's forwards (and its tree, for methods that
        build it meanwhile); tree: building the tree; verify: the target's forward over it, masks included, and waiting
        for a parallel drafter; accept: the target's choices, stopping criteria and streaming; commit: caches and the
        drafter's `observe`. On CUDA the times are measured on the device, and reading them waits for it.
        """
        seconds = self.stopwatch.seconds
        return {stage: seconds.get(stage, 0.0) for stage in STAGES}

    @property
    def draft_time_s(self) -> float:
        """Seconds of the stages "draft" and "tree"."""
        stages = self.stage_time_s
        return stages["draft"] + stages["tree"]

    @property
    def num_spec_steps(self) -> int:
        """Rounds, summed over rows."""
        return sum(len(row) for row in self.per_step_accepted)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Drafted tokens kept, summed over rounds and rows."""
        return sum(sum(row) for row in self.per_step_accepted)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens per round (tau): 1 + mean accepted, bonus included, prefill excluded; 0 without rounds."""
        steps = self.num_spec_steps
        return 1 + self.num_accepted_draft_tokens / steps if steps else 0.0

    @property
    def layers_per_token(self) -> float:
        """Layers of the target run per committed token of a row; plain decoding runs all its layers. 0 without rounds.

        A layer that several rows share counts for each of them, as a target forward does in plain decoding.
        """
        if not self.num_spec_steps:
            return 0.0
        per_round = self.num_layers_run / self.num_target_forwards
        return per_round / self.mean_acceptance_length

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens. Most nodes of a tree are alternatives, so compare it at equal budgets only."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_histogram(self) -> list[int]:
        """Entry j: rounds that kept exactly j drafted tokens."""
        counts = Counter(chain.from_iterable(self.per_step_accepted))
        return [counts[accepted] for accepted in range(1 + max(counts, default=0))]

    def begin(self, input_ids: Tensor) -> None:
        """Begins a call with these prompts, [batch, seq]."""
        self.stopwatch = Stopwatch(input_ids.device)
        self.per_step_accepted += [[] for _ in range(len(input_ids))]

    def lap(self, stage: str) -> None:
        """Adds the time since the last lap to a stage of the call."""
        self.stopwatch.lap(stage)

    def on_round(self, step: Round) -> None:
        host = step.host
        for index, row in enumerate(step.sequences.rows):
            if step.kept[row]:
                self.per_step_accepted[row].append(len(host.tokens[index]) - 1)
                self.num_draft_tokens += host.num_drafted[index]
                self.num_plain_steps += not host.finite[index]
                self.num_nan_steps += not host.finite[index] and host.nan[index]

    def add_row(self, other: SpeculationStats) -> None:
        """Adds the rounds of a row, which has counted them itself."""
        self.per_step_accepted += other.per_step_accepted
        for name in ("num_draft_tokens", "num_plain_steps", "num_nan_steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def count_target(self, target: TargetModel) -> None:
        """Copies the target's counts of forwards and layers."""
        self.num_target_forwards, self.num_layers_run = target.num_forwards, target.num_layers_run

    def report_fallback_rounds(self) -> None:
        """Logs how many rounds fell back to plain decoding, and why; warns if they are the majority."""
        fallback, of_target = self.num_plain_steps, self.num_nan_steps
        if not fallback:
            return
        reasons = []
        if fallback > of_target:
            by = f"the drafter ({self.method}) gave NaN or infinite logits"
            reasons.append(f"{by}, or a drafted token for which the target's logits are NaN")
        if of_target:
            reasons.append(f"in {of_target} of them the target itself gives NaN for the row, as in plain decoding")
        message = (
            f"{fallback} of {self.num_spec_steps} rounds fell back to plain decoding (stats.num_plain_steps): "
            f"{'; '.join(reasons)}."
        )
        if 2 * fallback <= self.num_spec_steps:
            logger.warning(message)
            return
        remedy = "Check the drafter's weights and dtype, or generate without assistant_model."
        if 2 * of_target > fallback:
            remedy = (
                "This happens with left padding, attn_implementation='eager' and float64: load the target with 'sdpa', "
                "or in float32."
            )
        warnings.warn(f"{message} {remedy}", stacklevel=2)

    def to_dict(self) -> dict[str, Any]:
        """All counts and times, and what follows from them, as numbers, texts, lists and dictionaries, as for JSON."""
        counts = {each.name: getattr(self, each.name) for each in fields(self)}
        counts["by_source"] = {name: asdict(each) for name, each in self.by_source.items()}
        return counts | {name: getattr(self, name) for name in DERIVED}

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = {
            "method": self.method,
            "tokens per round": f"{self.mean_acceptance_length:.2f}",
            "rounds": self.num_spec_steps,
            "drafted tokens accepted": f"{self.num_accepted_draft_tokens} of {self.num_draft_tokens}",
            "seconds": f"{self.total_time_s:.2f}",
            **{f"seconds of {stage}": f"{seconds:.2f}" for stage, seconds in self.stage_time_s.items()},
        }
        lines = (f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
        return f"<table>{''.join(lines)}</table>"

    def __str__(self) -> str:
        share = self.draft_time_s / self.total_time_s if self.total_time_s else 0.0
        return (
            f"{self.method}: mean acceptance length {self.mean_acceptance_length:.2f} "
            f"over {self.num_spec_steps} rounds, "
            f"{self.num_accepted_draft_tokens} of {self.num_draft_tokens} drafted tokens accepted, "
            f"{self.total_time_s:.2f} s, {share:.0%} of it drafting"
            + (f"; {self.num_foreseen} of {self.num_prepared} rounds foreseen" if self.num_prepared else "")
            + ("" if self.lossless else "; NOT LOSSLESS, by drafter.acceptance")
            + "".join(
                f"; {name}: {counts.num_accepted_tokens} of {counts.num_draft_tokens} in {counts.num_drafts} rounds"
                for name, counts in self.by_source.items()
            )
        )
