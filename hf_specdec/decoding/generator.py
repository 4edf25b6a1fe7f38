"""TreeCandidateGenerator: the interface that every method implements, and the data passed between loop and method.

A drafter makes one generator per `generate` call; the generator owns all drafting state of that call. In each round the
loop calls `draft(context)` for a tree, `verify` to run the target on it, and `observe(committed)` to report what was
committed. The prefill is reported in the same form: the prompt is what it committed.

Generators are also `CandidateGenerator`s of transformers (the host): in the host's own loop they draft chains
(`chains.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import CandidateGenerator

from hf_specdec.decoding.accept import Verdict
from hf_specdec.decoding.state import Counts, RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree, from_host, pick

if TYPE_CHECKING:
    from hf_specdec.decoding.chains import HostChains


@dataclass(frozen=True)
class ChoiceRule:
    """How the target's tokens are chosen in this call. Drafts that are chosen in the same way are accepted more often.

    Attributes:
        do_sample: True: tokens are sampled. False: argmax.
        warpers: the processors of the call that depend on the logits only (temperature, top-k, ...), in their order.
            They have no state, so a drafter may apply them too. Drafts are verified under all processors.
    """

    do_sample: bool
    warpers: LogitsProcessorList


GREEDY = ChoiceRule(do_sample=False, warpers=LogitsProcessorList())


def _untimed(stage: str) -> None:
    """No-op for `DraftContext.lap`."""


@dataclass
class DraftContext:
    """Where a round starts.

    Attributes:
        root_ids: [batch] int64, the last committed token of each row; the target has not seen it yet.
        root_positions: [batch] int64, its position id in the target.
        sequences: [batch, capacity] int64, all tokens so far, prompt and root included; columns beyond a row's length
            are undefined.
        lengths: tokens in each row of `sequences`, root included.
        active: per row, whether its tokens can still become part of the output. Drafts of other rows are ignored.
        choice: how the call chooses tokens, the same in every round.
        node_limit: at most this many nodes of the tree will be verified; None for no limit. A smaller tree saves time,
            but a larger one is allowed.
        least_prob: descendants of a node that is drafted with a lower probability, given the path to its parent, will
            not be verified; None for no limit. Stopping there saves time, but a larger tree is allowed.
        lap: call `lap("draft")` after the drafter's last forward and `lap("tree")` after building the tree, so that the
            statistics separate the two. Without these calls all of `draft()` counts as drafting. Needs no device sync.
    """

    root_ids: Tensor
    root_positions: Tensor
    sequences: Tensor
    lengths: list[int]
    active: list[bool]
    choice: ChoiceRule = GREEDY
    node_limit: int | None = None
    least_prob: float | None = None
    lap: Callable[[str], None] = _untimed


@dataclass
class Committed:
    """What a round, or the prefill, committed to the target's cache: for a round the root and the accepted nodes.

    Attributes:
        token_ids: [batch, steps] int64. Zeros where the prompt was given as embeddings.
        features: [batch, steps, taps * hidden], the target's hidden states at these tokens, or None without taps.
        position_ids: [batch, steps] int64.
        valid: [batch, steps] bool, or None for all True. False for padding: left padding of the prompt, the end of
            shorter rows of a round.
        counts: valid entries of each row. Known on the host, except for generators with `drafts_early`.
        target_logits: [batch, nodes, vocab], the target's raw logits of the whole tree.
        tree: the tree that was verified; None for the prefill.
        path: [batch, steps] int64, the node of each token in `tree`, -1 for a token that this drafter has not drafted;
            None for the prefill.
        tokens: per row the accepted tokens, root excluded, then the bonus token; empty for the prefill, and where the
            host has not read them yet. The bonus token is the row's next root. It may have been drafted: a round may
            end before its accepted path does.
    """

    token_ids: Tensor
    features: Tensor | None
    position_ids: Tensor
    valid: Tensor | None
    counts: Counts
    target_logits: Tensor
    tree: DraftTree | None = None
    path: Tensor | None = None
    tokens: list[list[int]] = field(default_factory=list)

    @classmethod
    def of_prompt(cls, prompt_ids: Tensor, target: TargetModel, output: TargetOutput) -> Committed:
        """The commit of the prefill, for [batch, seq] int64 prompts."""
        positions, valid = target.prompt_positions()
        new = positions.shape[1]  # fewer than the prompt if a cache was continued
        token_ids = prompt_ids[:, -new:]
        # More positions than ids: the prompt was given as embeddings, and its tokens are unknown.
        token_ids = torch.nn.functional.pad(token_ids, (new - token_ids.shape[1], 0))
        counts = [new] * len(prompt_ids) if valid is None else valid.sum(1).tolist()
        return cls(token_ids, output.features, positions, valid, Counts.of(counts, prompt_ids.device), output.logits)

    @classmethod
    def of_round(cls, tree: DraftTree, output: TargetOutput, verdict: Verdict, state: RoundState) -> Committed:
        """The commit of a round that began with `state`."""
        path, counts, features = verdict.path, verdict.counts, output.features
        steps = torch.arange(path.shape[1], device=path.device)
        valid = None
        if counts.known is None or min(counts.known) < path.shape[1]:
            valid = steps < counts.tensor.unsqueeze(1)
        if features is not None:
            features = pick(features, path.to(features.device))
            if valid is not None:  # padding may be NaN, and a drafter's additive masks do not stop NaN
                features = features.masked_fill(~valid.unsqueeze(-1).to(features.device), 0)
        return cls(
            token_ids=verdict.path_ids,
            features=features,
            position_ids=state.root_positions.unsqueeze(1) + steps,
            valid=valid,
            counts=counts,
            target_logits=output.logits,
            tree=tree,
            path=path,
            tokens=[] if verdict.host is None else verdict.host.tokens,
        )

    @property
    def num_committed(self) -> list[int]:
        """Valid entries of each row, on the host."""
        assert self.counts.known is not None, "the host has not read the verdict of this round yet"
        return self.counts.known

    @property
    def num_accepted(self) -> list[int]:
        """Drafted tokens kept per row; zeros for the prefill."""
        return [0 if self.tree is None else max(0, count - 1) for count in self.num_committed]

    def of_rows(self, rows: Sequence[int]) -> Committed:
        """Selects rows."""
        index = from_host(rows, self.token_ids.device)

        def some(part: Tensor | None, steps: slice = slice(None)) -> Any:
            return None if part is None else part[index.to(part.device)][:, steps]

        counts = self.counts.of_rows(rows)
        width = max(1, counts.most)  # at least one step, of padding if no row committed anything
        steps = slice(0, width) if self.tree is not None else slice(None)
        return replace(
            self,
            token_ids=some(self.token_ids, steps),
            features=some(self.features, steps),
            position_ids=some(self.position_ids, steps),
            valid=some(self.valid, steps),
            counts=counts,
            target_logits=some(self.target_logits),
            tree=None if self.tree is None else self.tree.of_rows(rows),
            path=some(self.path, steps),
            tokens=[self.tokens[row] for row in rows] if self.tokens else [],
        )

    def followed_by(self, later: Committed) -> Committed:
        """Joins this commit and that of the next round, for drafters that did not draft in between."""
        device = self.token_ids.device
        token_ids = torch.cat([self.token_ids, later.token_ids], 1)
        position_ids = torch.cat([self.position_ids, later.position_ids], 1)
        features = None
        if self.features is not None and later.features is not None:
            features = torch.cat([self.features, later.features], 1)
        counts = Counts.of([sum(both) for both in zip(self.num_committed, later.num_committed, strict=True)], device)
        # Padding of the first part is now in the middle of a row: move the valid entries to the front, in order.
        present = torch.cat(
            [
                torch.ones_like(part.token_ids, dtype=torch.bool) if part.valid is None else part.valid
                for part in (self, later)
            ],
            1,
        )
        order = (~present).to(torch.int8).argsort(dim=1, stable=True)[:, : max(1, counts.most)]
        return replace(
            later,
            token_ids=token_ids.gather(1, order),
            features=None if features is None else pick(features, order.to(features.device)),
            position_ids=position_ids.gather(1, order),
            valid=torch.arange(order.shape[1], device=device) < counts.tensor.unsqueeze(1),
            counts=counts,
            path=None,
        )


class TreeCandidateGenerator(CandidateGenerator, ABC):
    """Drafts trees for one `generate` call.

    Attributes:
        drops_rows: whether `keep_rows` is implemented.
        drafts_early: whether `draft` depends only on `observe` and the roots, on the device, and samples nothing. The
            loop may then call it before the host has read the last verdict; `sequences`, `lengths` and `active` of the
            context are then one or two rounds old.
        reads_cache: whether it drafts from the target's own cache.
        host_loop: its state in the host's own loop; None in ours.
    """

    drops_rows: bool = False
    drafts_early: bool = False
    reads_cache: bool = False
    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}  # noqa: RUF012  (the host only reads it; features come from taps)
    host_loop: HostChains | None = None

    @abstractmethod
    def draft(self, context: DraftContext) -> DraftTree:
        """Proposes continuations of every row's root. Avoid device synchronisation."""

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        """Runs the target on a tree. Overridden by methods that run its layers while drafting, or draft in parallel.

        Args:
            target: of the call.
            tree: the last result of `draft`, or a part of it.
            state: at the start of the round.
        """
        return target.verify(tree, state.root_positions)

    def observe(self, committed: Committed) -> None:
        """Receives what the prefill or a round committed. The default ignores it."""

    def count(self, stats: SpeculationStats) -> None:
        """Adds the drafter's own counts to the statistics; called once, before `close`."""

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        """The drafter's notes on the nodes of `tree`, the last one it drafted; called only if a trace is recorded."""
        return None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Continues with these rows only, in this order: the others have finished. Called between rounds.

        Called only if `drops_rows`. Otherwise finished rows stay in the batch and are still computed.
        """

    def close(self) -> None:
        """Releases threads, processes, streams and hooks; called once, also after an error."""

    def get_candidates(
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Called by the host's loop: the text so far and the best path of the next tree.

        Args:
            input_ids: [1, length] int64, the text so far.
            model_kwargs: of the host's call.
            model_outputs: of its last forward.
            is_first_iteration: whether nothing has been run yet.
            n_last_matches: drafted tokens that the last round kept.
            kwargs: reserved for later versions of the host.

        Returns:
            [1, length + drafted] int64, and the logits [1, drafted, vocab] of the draft distributions if the path was
            sampled.
        """
        if self.host_loop is None:
            raise RuntimeError(
                f"{type(self).__name__}.get_candidates needs the target of the call, which is known only in calls "
                "of model.generate(assistant_model=drafter). Pass the drafter to generate."
            )
        return self.host_loop.candidates(self, input_ids, model_kwargs or {}, model_outputs, n_last_matches)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Called by the host's loop: passes the number of kept drafted tokens to policy and statistics."""
        if self.host_loop is not None:
            self.host_loop.note(num_matches)
