"""TreeCandidateGenerator: the interface that every method implements, and what the loop and a method say to each other.

A drafter makes one generator per `generate` call; all state of drafting in that call lives in it. Each round the loop
asks `draft(context)` for a tree, has it verified by `verify`, and reports with `observe(committed)` what was kept. The
prefill is reported in the same way; its committed tokens are the prompt's.

Generators are the host's `CandidateGenerator`s as well: in the host's own loop they draft chains (`chains.py`).
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
    """How the target's tokens are chosen in this call; drafts that are drawn alike are accepted more often.

    Attributes:
        do_sample: whether they are drawn, or are the likeliest ones.
        warpers: those processors of the call that look at logits alone (temperature, top-k, ...), in their order. They
            have no state, so a drafter may apply them too. What it drafts is verified under all processors.
    """

    do_sample: bool
    warpers: LogitsProcessorList


GREEDY = ChoiceRule(do_sample=False, warpers=LogitsProcessorList())


def _untimed(stage: str) -> None:
    """A lap that nobody takes."""


@dataclass
class DraftContext:
    """Where a round starts.

    Attributes:
        root_ids: [batch] int64, the last committed token of each row; the target has not seen it yet.
        root_positions: [batch] int64, its position id in the target.
        sequences: [batch, capacity] int64, all tokens so far, prompt and root included; columns beyond a row's length
            hold anything.
        lengths: tokens in each row of `sequences`, root included.
        active: per row, whether its tokens still matter; rows that have finished are drafted for but not read.
        choice: how the call chooses tokens, the same in every round.
        node_limit: no more nodes than these of the tree will be verified, so that drafting more is of no use; None
            where all will be. Smaller trees save time, but none has to be.
        lap: `lap("draft")` after the drafter's last forward and `lap("tree")` after building the tree let the
            statistics tell the two apart; without, all of `draft()` counts as drafting. Costs no sync.
    """

    root_ids: Tensor
    root_positions: Tensor
    sequences: Tensor
    lengths: list[int]
    active: list[bool]
    choice: ChoiceRule = GREEDY
    node_limit: int | None = None
    lap: Callable[[str], None] = _untimed


@dataclass
class Committed:
    """What a round, or the prefill, committed to the target's cache: for a round the root and the accepted nodes.

    Attributes:
        token_ids: [batch, steps] int64. Zeros where a prompt came as embeddings.
        features: [batch, steps, taps * hidden], the target's at exactly these tokens, or None without taps.
        position_ids: [batch, steps] int64.
        valid: [batch, steps] bool, or None for all True. False for padding: left padding of the prompt, the end of
            shorter rows of a round.
        counts: valid entries of each row. The host knows them at once, but for generators that draft early.
        target_logits: [batch, nodes, vocab], the target's raw logits of the whole tree.
        tree: the tree that was verified; None for the prefill.
        path: [batch, steps] int64, the node of each token in `tree`, -1 for a token that this drafter has not drafted;
            None for the prefill.
        tokens: per row the accepted tokens, root excluded, then the bonus token, as far as the host knows; empty for
            the prefill. The bonus token is the next root of rows that go on.
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
        """What the prefill committed of [batch, seq] int64 prompts."""
        positions, valid = target.prompt_positions()
        new = positions.shape[1]  # fewer than the prompt where a cache was continued
        token_ids = prompt_ids[:, -new:]
        # The prompt came as embeddings where they are more, so that what its tokens were is not known.
        token_ids = torch.nn.functional.pad(token_ids, (new - token_ids.shape[1], 0))
        counts = [new] * len(prompt_ids) if valid is None else valid.sum(1).tolist()
        return cls(token_ids, output.features, positions, valid, Counts.of(counts, prompt_ids.device), output.logits)

    @classmethod
    def of_round(cls, tree: DraftTree, output: TargetOutput, verdict: Verdict, state: RoundState) -> Committed:
        """What a round committed that began with `state`."""
        path, counts, features = verdict.path, verdict.counts, output.features
        steps = torch.arange(path.shape[1], device=path.device)
        valid = None
        if counts.known is None or min(counts.known) < path.shape[1]:
            valid = steps < counts.tensor.unsqueeze(1)
        if features is not None:
            features = pick(features, path.to(features.device))
            if valid is not None:  # padding may be NaN, which would pass a drafter's masks
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
        """Valid entries of each row, for the host."""
        assert self.counts.known is not None, "the host has not read yet what came of this round"
        return self.counts.known

    @property
    def num_accepted(self) -> list[int]:
        """Drafted tokens kept per row; zeros for the prefill."""
        return [0 if self.tree is None else max(0, count - 1) for count in self.num_committed]

    def of_rows(self, rows: Sequence[int]) -> Committed:
        """The same for some of the rows."""
        index = from_host(rows, self.token_ids.device)

        def some(part: Tensor | None, steps: slice = slice(None)) -> Any:
            return None if part is None else part[index.to(part.device)][:, steps]

        counts = self.counts.of_rows(rows)
        width = max(1, counts.most)  # rows that all have waited keep a step, of padding
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
        """This and what the next round committed, as one: for drafters that were not asked in between."""
        device = self.token_ids.device
        token_ids = torch.cat([self.token_ids, later.token_ids], 1)
        position_ids = torch.cat([self.position_ids, later.position_ids], 1)
        features = None
        if self.features is not None and later.features is not None:
            features = torch.cat([self.features, later.features], 1)
        counts = Counts.of([sum(both) for both in zip(self.num_committed, later.num_committed, strict=True)], device)
        # What a row waited out lies in the middle of it now: bring what it has to the front, in order.
        there = torch.cat(
            [
                torch.ones_like(part.token_ids, dtype=torch.bool) if part.valid is None else part.valid
                for part in (self, later)
            ],
            1,
        )
        order = (~there).to(torch.int8).argsort(dim=1, stable=True)[:, : max(1, counts.most)]
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
        drafts_early: whether it drafts from `observe` and the roots alone, on the device, and draws nothing: the loop
            may then ask for the next tree before the host has read what came of the last one. Of the context,
            `sequences`, `lengths` and `active` are those of a round or two before.
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
        """Proposes continuations of every row's root. Must not wait for the device more than its method needs."""

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        """Has the target verify a tree; for methods that run layers of it while drafting, or draft beside it.

        Args:
            target: of the call.
            tree: what `draft` gave last, or part of it.
            state: where the round began.
        """
        return target.verify(tree, state.root_positions)

    def observe(self, committed: Committed) -> None:
        """Takes note of what the prefill or a round committed. The default needs no such knowledge."""

    def count(self, stats: SpeculationStats) -> None:
        """Adds what only the drafter knows to the statistics; called once, before `close`."""

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        """What the drafter knows of the nodes of `tree`, the one it drafted last; asked only where a trace is kept."""
        return None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only, in this order: the others have finished. Called between rounds.

        Only generators with `drops_rows` are asked; for the others finished rows stay in the batch, and cost.
        """

    def close(self) -> None:
        """Releases what outlives a round (threads, processes, streams, hooks); called once, also after an error."""

    def get_candidates(
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """What the host's loop asks: the text with the best path of the next tree.

        Args:
            input_ids: [1, length] int64, the text so far.
            model_kwargs: of the host's call.
            model_outputs: of its last forward.
            is_first_iteration: nothing has been run yet.
            n_last_matches: drafted tokens that the last round kept.
            kwargs: what later versions of the host may add.

        Returns:
            [1, length + drafted] int64, and where the path was drawn the logits [1, drafted, vocab] of its laws.
        """
        if self.host_loop is None:
            raise RuntimeError(
                f"{type(self).__name__} drafts in the host's loop for calls that model.generate(assistant_model=...) "
                "has begun: it needs the target of the call. Pass the drafter to generate."
            )
        return self.host_loop.candidates(self, input_ids, model_kwargs or {}, model_outputs, n_last_matches)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """What the host's loop reports: how many drafted tokens were kept. It feeds policy and statistics."""
        if self.host_loop is not None:
            self.host_loop.note(num_matches)
