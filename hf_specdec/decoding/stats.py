"""SpeculationStats: what speculation did in one `generate` call, and what it cost. Names follow vLLM's metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_specdec.decoding.stopwatch import Stopwatch

# The parts of a call, in order; what happens after the last round is in none of them.
STAGES = ("prefill", "draft", "tree", "verify", "accept", "commit")


@dataclass
class SpeculationStats:
    """Counts and host times of one `generate` call.

    A round ("spec step" in vLLM's names) is one draft, one target forward, one commit, of one row: a batch of three
    rows counts three. The prefill is no round. Accepted tokens exclude the root and the bonus token, and are counted
    as verified, before a stopping criterion cuts the last round short.

    Attributes:
        method: the drafter's method, for reports.
        per_step_accepted: [row][round], drafted tokens kept.
        num_draft_tokens: nodes drafted and verified, roots excluded.
        num_plain_steps: rounds that verified nothing because the drafter's output was NaN or infinite.
        num_target_forwards: forwards of the target after the prefill; rows of a batch share them.
        num_layers_run: forwards of single decoder layers of the target in rounds, over any number of rows and nodes;
            a drafter that runs some of them itself shares them with the verification.
        total_time_s: seconds of the whole call, prefill included.
        stopwatch: times the stages of the call.
    """

    method: str = ""
    per_step_accepted: list[list[int]] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_plain_steps: int = 0
    num_target_forwards: int = 0
    num_layers_run: int = 0
    total_time_s: float = 0.0

    def __post_init__(self) -> None:
        self.stopwatch = Stopwatch("cpu")

    @property
    def stage_time_s(self) -> dict[str, float]:
        """Seconds by stage; with what follows the last round they add up to `total_time_s`.

        prefill: the prompt's forward and the first token; draft: the drafter's forwards (and its tree, for methods that
        build it on the way); tree: building the tree; verify: the target's forward over it, masks included; accept: the
        target's choices, stopping criteria and streaming; commit: the caches, and telling the drafter what was kept.
        On CUDA the times are the device's, and asking waits for it.
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

    def __str__(self) -> str:
        share = self.draft_time_s / self.total_time_s if self.total_time_s else 0.0
        return (
            f"{self.method}: mean acceptance length {self.mean_acceptance_length:.2f} "
            f"over {self.num_spec_steps} rounds, "
            f"{self.num_accepted_draft_tokens} of {self.num_draft_tokens} drafted tokens accepted, "
            f"{self.total_time_s:.2f} s, {share:.0%} of it drafting"
        )
