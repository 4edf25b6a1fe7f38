"""SpeculationStats: what speculation did in one `generate` call, and what it cost. Names follow vLLM's metrics."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field

from torch import Tensor

from hf_specdec.decoding.observers import Observer, Round
from hf_specdec.decoding.stopwatch import Stopwatch
from hf_specdec.decoding.target import TargetModel

logger = logging.getLogger(__name__)

# The parts of a call, in order; what happens after the last round is in none of them.
STAGES = ("prefill", "draft", "tree", "verify", "accept", "commit")


@dataclass
class SourceCounts:
    """What one of several drafters contributed to a call; a token that two proposed counts for both.

    Attributes:
        num_drafts: rounds in which it was asked.
        num_draft_tokens: verified nodes that it proposed.
        num_accepted_tokens: accepted tokens that it proposed.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass
class SpeculationStats(Observer):
    """Counts and host times of one `generate` call.

    A round ("spec step" in vLLM's names) is one draft, one target forward, one commit, of one row: a batch of three
    rows counts three. The prefill is no round. Accepted tokens exclude the root and the bonus token, and are counted
    as verified, before a stopping criterion cuts the last round short. A round is counted before its tokens are
    streamed, so a streamer can tell its drafted tokens from the bonus token.

    Attributes:
        method: the drafter's method, for reports.
        per_step_accepted: [row][round], drafted tokens kept.
        num_draft_tokens: nodes drafted and verified, roots excluded.
        num_plain_steps: rounds that verified nothing: what the drafter gave, or the target for it, was NaN or infinite.
            A call says at its end how many there were, and why; as a warning where they were most.
        num_nan_steps: those of them in which the target itself gives NaN for the row, as in plain decoding.
        num_undrafted_steps: rounds without a draft because drafting did not pay (`tree_budget="auto"` only).
        num_probe_steps: rounds that drafted after such ones, to see whether it pays again.
        num_target_forwards: forwards of the target after the prefill; rows of a batch share them. With captured graphs
            one more may have been launched than the text had rounds.
        num_layers_run: forwards of single decoder layers of the target in rounds, over any number of rows and nodes;
            a drafter that runs some of them itself shares them with the verification.
        total_time_s: seconds of the whole call, prefill included.
        ahead_time_s: seconds that drafting beside the target took of its own time; see `overlap_efficiency`.
        ahead_verify_s: seconds that the target took of its own time in those rounds.
        ahead_wall_s: seconds from starting both to having both, summed over those rounds.
        ahead_shorter_s: the smaller of the first two of each round, summed.
        num_path_drafts: tokens drafted in sequence, a forward of a draft model each, on the path that was gone on with
            or, where that failed, the likeliest one. Forwards that only other branches needed are not among them; 0 for
            drafters that do not draft in sequence.
        num_path_kept: those of them that became part of the text.
        speed_ratio: T_p / T_q, a verification by the target over a forward of the draft model; 0 where not measured.
        peak_draft_entries: most cache entries a row that the draft model held at once, text and all branches.
        by_source: for drafters that are made of several, what each contributed, by name; empty for others.
        stopwatch: times the stages of the call.
    """

    method: str = ""
    per_step_accepted: list[list[int]] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_plain_steps: int = 0
    num_nan_steps: int = 0
    num_undrafted_steps: int = 0
    num_probe_steps: int = 0
    num_target_forwards: int = 0
    num_layers_run: int = 0
    total_time_s: float = 0.0
    ahead_time_s: float = 0.0
    ahead_verify_s: float = 0.0
    ahead_wall_s: float = 0.0
    ahead_shorter_s: float = 0.0
    num_path_drafts: int = 0
    num_path_kept: int = 0
    speed_ratio: float = 0.0
    peak_draft_entries: int = 0
    by_source: dict[str, SourceCounts] = field(default_factory=dict)

    def count_ahead(self, draft_s: float, verify_s: float, wall_s: float) -> None:
        """Adds a round in which drafter and target ran at the same time: own time of each, and time of both."""
        self.ahead_time_s += draft_s
        self.ahead_verify_s += verify_s
        self.ahead_wall_s += wall_s
        self.ahead_shorter_s += min(draft_s, verify_s)

    def add_overlap(self, other: SpeculationStats) -> None:
        """Adds what another has counted of rounds in which drafter and target ran at the same time."""
        for name in ("ahead_time_s", "ahead_verify_s", "ahead_wall_s", "ahead_shorter_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def overlap_efficiency(self) -> float:
        """How much of what could be saved by running drafter and target at once was saved; 0 where nothing ran so.

        (sum - wall) / (sum - maximum) of a round's two parts: 1 where the wall time is that of the longer part, 0 where
        it is that of both in turn, negative where running at once cost time. On a CPU the parts are the processor time
        of their threads, so that waiting for each other is not taken for work.
        """
        saved = self.ahead_time_s + self.ahead_verify_s - self.ahead_wall_s
        return saved / self.ahead_shorter_s if self.ahead_shorter_s else 0.0

    @property
    def rollback_rate(self) -> float:
        """Drafted in sequence and thrown away, over all drafted in sequence: RB of SpecBranch, Appendix E.3.

        Alternatives on other branches of a tree are not counted. Drafters that do not count their sequence are taken to
        have drafted what was verified.
        """
        if self.num_path_drafts:
            return 1 - self.num_path_kept / self.num_path_drafts
        return 1 - self.draft_acceptance_rate if self.num_draft_tokens else 0.0

    def __post_init__(self) -> None:
        self.stopwatch = Stopwatch("cpu")

    @property
    def stage_time_s(self) -> dict[str, float]:
        """Seconds by stage; with what follows the last round they add up to `total_time_s`.

        prefill: the prompt's forward and the first token; draft: the drafter's forwards (and its tree, for methods that
        build it on the way); tree: building the tree; verify: the target's forward over it, masks included, and
        waiting for what is drafted meanwhile; accept: the target's choices, stopping criteria and streaming; commit:
        the caches, and telling the drafter what was kept. On CUDA the times are the device's, and asking waits for it.
        """
        seconds = self.stopwatch.seconds
        return {stage: seconds.get(stage, 0.0) for stage in STAGES}

    @property
    def draft_time_s(self) -> float:
        """Seconds from asking for a tree to having it, drafter forward included."""
        stages = self.stage_time_s
        return stages["draft"] + stages["tree"]

    @property
    def verify_time_s(self) -> float:
        """Seconds in the target's forward over trees, its masks included."""
        return self.stage_time_s["verify"]

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
        """Accepted over drafted tokens. On a tree most nodes are alternatives, so compare it at equal budgets only."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_histogram(self) -> list[int]:
        """Entry j: rounds that kept exactly j drafted tokens."""
        counts = [0] * (1 + max((max(row, default=0) for row in self.per_step_accepted), default=0))
        for row in self.per_step_accepted:
            for accepted in row:
                counts[accepted] += 1
        return counts

    def begin(self, input_ids: Tensor) -> None:
        """Begins a call with these prompts, [batch, seq]."""
        self.stopwatch = Stopwatch(input_ids.device)
        self.per_step_accepted += [[] for _ in range(len(input_ids))]

    def lap(self, stage: str) -> None:
        """Gives the time since the last lap to a stage of the call."""
        self.stopwatch.lap(stage)

    def on_round(self, each: Round) -> None:
        host = each.host
        for place, row in enumerate(each.sequences.rows):
            if each.kept[row]:
                self.per_step_accepted[row].append(len(host.tokens[place]) - 1)
                self.num_draft_tokens += host.num_drafted[place]
                self.num_plain_steps += not host.finite[place]
                self.num_nan_steps += not host.finite[place] and host.nan[place]

    def count_target(self, target: TargetModel) -> None:
        """Takes over what the target has run in rounds so far."""
        self.num_target_forwards, self.num_layers_run = target.num_forwards, target.num_layers_run

    def report_plain_steps(self) -> None:
        """Says of a call whose rounds fell back to plain decoding how many did, and why; as a warning if most did."""
        plain, of_target = self.num_plain_steps, self.num_nan_steps
        if not plain:
            return
        reasons = []
        if plain > of_target:
            by = f"the drafter ({self.method}) gave NaN or infinite logits"
            reasons.append(f"{by}, or a token that the target gives NaN for")
        if of_target:
            reasons.append(f"in {of_target} of them the target itself gives NaN for the row, as in plain decoding")
        message = (
            f"{plain} of {self.num_spec_steps} rounds were decoded plainly (stats.num_plain_steps): "
            f"{'; '.join(reasons)}. The output is not affected."
        )
        if 2 * plain <= self.num_spec_steps:
            logger.warning(message)
            return
        way_out = "Check the drafter's weights and dtype, or generate without assistant_model."
        if 2 * of_target > plain:
            way_out = (
                "Left padding with attn_implementation='eager' in float64 does this: load the target with 'sdpa', "
                "or in float32."
            )
        warnings.warn(f"{message} {way_out}", stacklevel=2)

    def __str__(self) -> str:
        share = self.draft_time_s / self.total_time_s if self.total_time_s else 0.0
        return (
            f"{self.method}: mean acceptance length {self.mean_acceptance_length:.2f} "
            f"over {self.num_spec_steps} rounds, "
            f"{self.num_accepted_draft_tokens} of {self.num_draft_tokens} drafted tokens accepted, "
            f"{self.total_time_s:.2f} s, {share:.0%} of it drafting"
            + "".join(
                f"; {name}: {counts.num_accepted_tokens} of {counts.num_draft_tokens} in {counts.num_drafts} rounds"
                for name, counts in self.by_source.items()
            )
        )
