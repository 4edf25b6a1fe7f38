"""AdaptiveDrafter: a drafter that learns from what its target does with its drafts, while it serves.

    with AdaptiveDrafter(target, drafter) as adaptive:
        for inputs in stream:
            output = target.generate(**inputs, assistant_model=adaptive)
    drafter.save_pretrained("adapted")

The output is still the target's: an update changes the drafted tokens, never the accepted ones.
Experimental: names and defaults may change without notice.
Source: SpecBlock, Section 3.4 and Algorithm 1. `recording.py` records the data of a query, `policy.py` decides when to
update, `learner.py` updates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from hf_specdec.adaptation.base import LearningDrafter, recipe_for
from hf_specdec.adaptation.learner import Learner, Update
from hf_specdec.adaptation.policy import Action, CostAwareBandit, FailSafe, Policy, QueryResult, check_at_least
from hf_specdec.adaptation.recording import GivesDraftStates, Query, QueryRecorder
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.hub.pretrained import PretrainedDrafter

AUTO_NODES = 16  # of each tree with `tree_budget="auto"`


@dataclass
class AdaptationStats:
    """Statistics of an adaptation.

    Attributes:
        queries: results, in order.
        actions: per query the buffer to which it was added, or `"skip"`.
        updates: the updates whose weights were copied to the serving drafter, in order.
        reverts: number of queries before each revert of the fail-safe.
    """

    queries: list[QueryResult] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    reverts: list[int] = field(default_factory=list)

    @property
    def num_reverts(self) -> int:
        """How often the fail-safe restored earlier weights."""
        return len(self.reverts)

    @property
    def update_seconds(self) -> float:
        """Time of the updates, which run in parallel with the queries."""
        return sum(update.seconds for update in self.updates)

    def mean_acceptance_length(self, first: int = 0, last: int | None = None) -> float:
        """Over the queries `[first:last]`; 0 without rounds."""
        chosen = self.queries[first:last]
        rounds = sum(query.num_rounds for query in chosen)
        return 1 + sum(query.num_accepted for query in chosen) / rounds if rounds else 0.0

    def __str__(self) -> str:
        counts = {kind: sum(update.action == kind for update in self.updates) for kind in ("head", "full")}
        return (
            f"{len(self.queries)} queries, {counts['head']} head and {counts['full']} full updates in "
            f"{self.update_seconds:.1f} s, {self.num_reverts} reverts"
        )


class AdaptiveDrafter(LearningDrafter):
    """Drafts with a drafter and updates its weights between rounds; pass it as `assistant_model`.

    A call is one query; all rows of a batch are used for training. `drafter` is the serving copy: its weights change,
    and can be saved or published at any time, also with `save_pretrained` and `push_to_hub` of this class. Its method
    must support adaptation, see `Recipe.adapting`.

    It may be one source of a `MergedDrafter` beside a drafter that stays as it is, as in ATLAS: the merged drafter
    counts how often each is right, and its `tree_budget="auto"` chooses the length. Then it learns from the rounds in
    which it drafted, along the part of the accepted path that it had proposed.

    Departures from the paper, which trains on rejected positions: head updates train on all positions along the
    accepted paths, and full updates on the whole text of a query, because their forward computes its states in any
    case. Rejected positions alone are not a sample of the drafted ones. The gradient norm is clipped to 1.

    Args:
        target: of the drafter.
        drafter: to adapt, on its target's device. The drafter may also come first, then the target.
        policy: decides when to update which part; a `CostAwareBandit` by default.
        fail_safe: decides when to restore earlier weights; a `FailSafe` by default.
        learning_rate: of AdamW.
        kl_weight: lambda of Section 3.4: weight of the divergence from the drafter before the adaptation.
        steps_per_update: gradient steps on a buffer.
        max_positions: full updates train on at most this many last positions of a query's text.
        seed: of the updates' random choices.

    Attributes:
        drafter: the serving copy.
        adaptation: statistics.

    Raises:
        ValueError: the drafter's method does not support adaptation, an argument is out of range, or the drafter does
            not fit the target.
        TypeError: `drafter` is not a drafter.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PretrainedDrafter,
        *,
        policy: Policy | None = None,
        fail_safe: FailSafe | None = None,
        learning_rate: float = 1e-3,
        kl_weight: float = 0.01,
        steps_per_update: int = 2,
        max_positions: int = 256,
        seed: int = 0,
    ) -> None:
        self.policy = CostAwareBandit() if policy is None else policy
        self.fail_safe = FailSafe() if fail_safe is None else fail_safe
        check_at_least(0, learning_rate=learning_rate, kl_weight=kl_weight)
        check_at_least(1, steps_per_update=steps_per_update)
        check_at_least(8, max_positions=max_positions)
        super().__init__(target, drafter)
        target, drafter = self.target, self.drafter
        adapting = recipe_for(drafter, "adapting")
        self.adaptation = AdaptationStats()
        self.learner = Learner(
            drafter, lambda copy: adapting(copy, target), learning_rate=learning_rate, kl_weight=kl_weight,
            steps_per_update=steps_per_update, max_positions=max_positions, seed=seed,
        )  # fmt: skip
        self._buffers: dict[Action, list[Query]] = {"head": [], "full": []}
        self._closed = False

    def drafting_policy(self, model: PreTrainedModel, batch: int, stats: SpeculationStats) -> DraftingPolicy:
        """Drafts in every round, since it learns from the drafts; `tree_budget="auto"` is `AUTO_NODES` here."""
        return DraftingPolicy(AUTO_NODES if self.options.pauses else None)

    def check_target(self, model: PreTrainedModel) -> None:
        super().check_target(model)
        if self._closed:
            raise ValueError(
                "This AdaptiveDrafter is closed: pass its .drafter as assistant_model to draft without adaptation, or "
                "make a new one."
            )

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        self._swap_weights()  # a failed update raises before the first token
        inner = self.drafter.candidate_generator(target)
        if not isinstance(inner, GivesDraftStates):
            raise ValueError(
                f"Adaptation needs the states from which tokens are drafted, but method={self.drafter.method!r} of "
                f"{type(self.drafter).__name__} does not give them: choose another method, or pass the drafter itself."
            )
        width = self.feature_width(target.model)
        return QueryRecorder(inner, width, between_rounds=self._between_rounds, finished=self.finish_query)

    def wait(self) -> None:
        """Waits for a running update and copies its weights to the serving drafter. Call it between `generate` calls.

        Raises:
            RuntimeError: that update failed.
        """
        self._swap_weights(wait=True)

    def close(self) -> None:
        """Waits for a running update, copies its weights to the serving drafter, and ends the adaptation.

        Raises:
            RuntimeError: that update failed.
        """
        if not self._closed:
            self._closed = True
            update = self.learner.close()
            if update is not None:
                self.adaptation.updates.append(update)

    def __enter__(self) -> AdaptiveDrafter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _between_rounds(self) -> None:
        """Swaps the weights of a finished update. A failed update raises in the next call, not in this one."""
        if self.learner.ready:
            self._swap_weights()

    def _swap_weights(self, *, wait: bool = False) -> None:
        began = time.perf_counter()
        update = self.learner.swap(wait=wait)
        if update is not None:
            self.adaptation.updates.append(update)
            # Within a call the time is part of the query's.
            self.policy.brought(time.perf_counter() - began if wait else 0.0)

    def finish_query(self, query: Query) -> None:
        """Decides on the data of a finished query, Algorithm 1 from line 2 on."""
        result = QueryResult(self._signal(query), query.num_tokens, query.num_rounds, query.num_accepted, query.seconds)
        action = self.policy.decide(result)
        if action == "head" and not len(query.states):
            action = "skip"  # nothing was drafted
        self.adaptation.queries.append(result)
        self.adaptation.actions.append(action)
        verdict = self.fail_safe.observe(result)
        if verdict == "bad":
            self.learner.revert()
            self.policy.reset()
            for buffer in self._buffers.values():
                buffer.clear()
            self.adaptation.reverts.append(len(self.adaptation.queries))
            return
        if verdict == "good":
            self.learner.mark_good()
        if action == "skip":
            return
        buffer = self._buffers[action]
        buffer.append(query)
        full = len(buffer) >= self.policy.buffer_queries
        if full and self.policy.may_update() and not self.learner.busy:
            self.learner.start(action, buffer)
            self._buffers[action] = []
            self.policy.updated(action, result)

    @torch.no_grad()
    def _signal(self, query: Query) -> float:
        """Eq. 8, per row: the sum over rejected positions of 1 - the drafter's probability of the target's token."""
        step = self.learner.step
        probs = step.head_logits(self.drafter, query.rejected).float().softmax(-1)
        draft_ids = step.draft_ids(query.chosen_ids.to(probs.device))
        chosen = probs.gather(1, draft_ids.clamp(min=0).unsqueeze(1)).squeeze(1).where(draft_ids >= 0, 0.0)
        return float((1 - chosen).sum()) / len(query.rows)

    @property
    def learned(self) -> str | None:
        return str(self.adaptation) if self.adaptation.updates or self.adaptation.num_reverts else None
