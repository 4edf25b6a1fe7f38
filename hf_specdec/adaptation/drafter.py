"""AdaptiveDrafter: a drafter that learns from what its target does with its drafts, while it serves.

    with AdaptiveDrafter(drafter, target) as adaptive:
        for inputs in stream:
            output = target.generate(**inputs, assistant_model=adaptive)
    drafter.save_pretrained("adapted")

The output is the target's own as ever: an update changes which tokens are drafted, never which are accepted.
Experimental: names and defaults may change without notice.
Source: SpecBlock, Section 3.4 and Algorithm 1. The parts: `recording.py` keeps what a query shows, `policy.py` decides,
`learner.py` updates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.adaptation.learner import Learner, Update
from hf_specdec.adaptation.policy import Action, CostAwareBandit, FailSafe, Policy, QueryResult
from hf_specdec.adaptation.recording import GivesDraftStates, Query, QueryRecorder
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafters.base import Drafter, check_is_drafter
from hf_specdec.drafters.options import DrafterOptions, TreeOptions
from hf_specdec.drafters.pretrained import PretrainedDrafter
from hf_specdec.drafters.registry import FAMILIES
from hf_specdec.training.recipe import RECIPES  # importing the package registers all recipes
from hf_specdec.training.step import AdaptiveStep


@dataclass
class AdaptationStats:
    """What an adaptation did so far.

    Attributes:
        queries: results in order.
        actions: per query the buffer that it went to, or `"skip"`.
        updates: those whose weights serve, in order.
        reverts: after how many queries the fail-safe went back to good weights, each time.
    """

    queries: list[QueryResult] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    reverts: list[int] = field(default_factory=list)

    @property
    def num_reverts(self) -> int:
        """Times that the fail-safe went back to good weights."""
        return len(self.reverts)

    @property
    def update_seconds(self) -> float:
        """Spent in updates, beside the queries."""
        return sum(update.seconds for update in self.updates)

    def mean_acceptance_length(self, first: int = 0, last: int | None = None) -> float:
        """Over the queries from `first` to before `last`, as in a list's slice; 0 without rounds."""
        chosen = self.queries[first:last]
        rounds = sum(query.num_rounds for query in chosen)
        return 1 + sum(query.num_accepted for query in chosen) / rounds if rounds else 0.0

    def __str__(self) -> str:
        counts = {kind: sum(update.action == kind for update in self.updates) for kind in ("head", "full")}
        return (
            f"{len(self.queries)} queries, {counts['head']} head and {counts['full']} full updates in "
            f"{self.update_seconds:.1f} s, {self.num_reverts} reverts"
        )


class AdaptiveDrafter(Drafter):
    """Serves with a drafter and updates it in between; pass it as `assistant_model`.

    A call is one query; rows of a batch are learned from alike. The drafter given is the copy that serves: its weights
    change, and can be saved or published at any time (`save_pretrained` and `push_to_hub` here are its own). It needs
    a method that can learn while it serves: one whose training recipe says so.

    Departures from the paper. It learns from rejected positions; here head updates learn from all positions on the way
    that the target took, rejected or not, and full updates from all that a query wrote, whose states their forward
    computes anyway: rejections alone are a sample of what goes wrong, not of what is drafted. Gradients are clipped at
    norm 1.

    Args:
        drafter: to adapt, on its target's device.
        target: that it serves.
        policy: when to update what; a `CostAwareBandit` by default.
        fail_safe: when to go back to good weights; a `FailSafe` by default.
        learning_rate: of AdamW.
        kl_weight: lambda of Section 3.4: weight of the divergence from the drafter as it is now.
        steps_per_update: gradient steps on a buffer.
        max_positions: of a query's text, its last ones, that full updates learn from.
        seed: of the updates' random choices.

    Attributes:
        drafter: the copy that serves.
        adaptation: what was done so far.

    Raises:
        ValueError: the drafter's method cannot learn while it serves, an argument is out of range, or the drafter does
            not fit the target.
        TypeError: `drafter` is no drafter.
    """

    mergeable = False

    def __init__(
        self,
        drafter: PretrainedDrafter,
        target: PreTrainedModel,
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
        for name, value, least in (
            ("learning_rate", learning_rate, 0),
            ("kl_weight", kl_weight, 0),
            ("steps_per_update", steps_per_update, 1),
            ("max_positions", max_positions, 8),
        ):
            if value < least:
                raise ValueError(f"{name}={value!r} must be at least {least}.")
        check_is_drafter(drafter, "The drafter comes first, then the target.")
        drafter.check_target(target)
        adapting = _adapting(drafter)

        def make_step(copy: PretrainedDrafter) -> AdaptiveStep:
            return adapting(copy, target)

        self.drafter = drafter
        self.adaptation = AdaptationStats()
        self.learner = Learner(
            drafter, make_step, learning_rate=learning_rate, kl_weight=kl_weight, steps_per_update=steps_per_update,
            max_positions=max_positions, seed=seed,
        )  # fmt: skip
        self._buffers: dict[Action, list[Query]] = {"head": [], "full": []}
        self._closed = False

    @property
    def options(self) -> DrafterOptions:  # those of the copy that serves
        return self.drafter.options

    @options.setter
    def options(self, options: DrafterOptions) -> None:
        self.drafter.options = options

    def validate_options(self, options: DrafterOptions) -> None:
        self.drafter.validate_options(options)
        if isinstance(options, TreeOptions) and options.tree_budget == "auto":
            raise ValueError(
                "tree_budget='auto' decodes some rounds plainly, while an AdaptiveDrafter learns from what every round "
                "drafted: set a number, as in set_options(tree_budget=16)."
            )

    def check_target(self, model: PreTrainedModel) -> None:
        if model is not self.learner.step.reader.model:
            raise ValueError(
                f"This AdaptiveDrafter learns from target {self.learner.step.reader.model.name_or_path!r}, but was "
                f"passed to another one, {model.name_or_path!r}. Make one AdaptiveDrafter per target object."
            )
        if self._closed:
            raise ValueError(
                "This AdaptiveDrafter was closed: pass its .drafter as assistant_model to serve on without learning, "
                "or make a new one."
            )
        self.drafter.check_target(model)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """The drafter's own, and what enters the target's head."""
        depth = model.config.get_text_config(decoder=True).num_hidden_layers
        return (*self.drafter.feature_layers(model), depth)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        self._bring_weights()  # a failed update is reported before the first token
        inner = self.drafter.candidate_generator(target)
        if not isinstance(inner, GivesDraftStates):
            raise ValueError(
                f"method={self.drafter.method!r} of {type(self.drafter).__name__} does not tell which states its "
                "drafts came from, which adaptation needs; choose another method, or pass the drafter itself."
            )
        hidden = target.model.config.get_text_config(decoder=True).hidden_size
        width = len(self.drafter.feature_layers(target.model)) * hidden
        return QueryRecorder(inner, width, between_rounds=self._between_rounds, finished=self.finish_query)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Saves the drafter as it is now, with a record of its adaptation; see `PretrainedDrafter.save_pretrained`."""
        self._record()
        self.drafter.save_pretrained(save_directory, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Publishes the drafter as it is now; see `PretrainedDrafter.push_to_hub`."""
        self._record()
        return self.drafter.push_to_hub(repo_id, **kwargs)

    def wait(self) -> None:
        """Waits for a running update and brings its weights over; between calls only.

        Raises:
            RuntimeError: that update failed.
        """
        self._bring_weights(wait=True)

    def close(self) -> None:
        """Waits for a running update, brings its weights over, and ends the learning.

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
        """A failed update is left for the next call to report: it is no reason to lose the output of this one."""
        if self.learner.ready:
            self._bring_weights()

    def _bring_weights(self, *, wait: bool = False) -> None:
        began = time.perf_counter()
        update = self.learner.swap(wait=wait)
        if update is not None:
            self.adaptation.updates.append(update)
            # Within a call the time is the query's own.
            self.policy.brought(time.perf_counter() - began if wait else 0.0)

    def finish_query(self, query: Query) -> None:
        """The end of a query, Algorithm 1 from line 2 on; called by the call that it ends."""
        result = QueryResult(self._signal(query), query.num_tokens, query.num_rounds, query.num_accepted, query.seconds)
        action = self.policy.decide(result)
        if action == "head" and not len(query.states):
            action = "skip"  # nothing was drafted, so there is nothing to push
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
            self.learner.keep()
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
        """Eq. 8, per row: the sum over rejected positions of 1 - the drafter's probability of the target's choice."""
        step = self.learner.step
        probs = step.head_logits(self.drafter, query.rejected).float().softmax(-1)
        draft_ids = step.draft_ids(query.chosen_ids.to(probs.device))
        chosen = probs.gather(1, draft_ids.clamp(min=0).unsqueeze(1)).squeeze(1).where(draft_ids >= 0, 0.0)
        return float((1 - chosen).sum()) / len(query.rows)

    def _record(self) -> None:
        """Figures of the weights from before the adaptation are no figures of these."""
        if self.adaptation.updates or self.adaptation.num_reverts:
            self.drafter.measurements = None
            self.drafter.training_record = (self.drafter.training_record or {}) | {"adapted": str(self.adaptation)}


def _adapting(drafter: PretrainedDrafter) -> Any:
    """Makes adaptive steps for this kind of drafter."""
    able = {name: recipe.adapting for name, recipe in RECIPES.items() if recipe.adapting is not None}
    for name, adapting in able.items():
        if isinstance(drafter, FAMILIES[name].drafter):
            return adapting
    raise ValueError(
        f"A {type(drafter).__name__} cannot learn while it serves; drafters that can: {', '.join(sorted(able))}. "
        "Pass the drafter itself as assistant_model."
    )
