"""SpecBranch in one `generate` call, the target's side: H-RAD, the chains to verify, and the thread that drafts.

The state machine of Figure 9 has two parts: draft stage and branch stage are `BranchDrafting.draft` and `draft_ahead`;
this side reads the target's features, runs H-RAD, and turns chains into draft trees. Source: SpecBranch, Sections 5.1
and 5.2, Algorithm 1.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_specdec.decoding.accept import DrawnCandidates
from hf_specdec.decoding.devices import abilities, seconds_of
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.targets.modules import home_of
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafting.reader import last_features
from hf_specdec.drafting.thread import DraftingThread
from hf_specdec.methods.specbranch.drafting import (
    ALL_ACCEPT,
    ALL_REJECT,
    CONFIDENCE,
    BranchDrafting,
    Branches,
    Chains,
    DraftingPlan,
    Signals,
)

if TYPE_CHECKING:
    from hf_specdec.methods.specbranch.network import SpecBranchDrafter


class SpecBranchGenerator(TreeCandidateGenerator):
    """Drafts while the target verifies, for one call.

    Args:
        drafter: its options, H-RAD and draft model.
        target: the target of this call.
    """

    def __init__(self, drafter: SpecBranchDrafter, target: TargetModel) -> None:
        self.drafter, self.target, self.options = drafter, target, drafter.options
        # Without hedges the paper retains a part of a chosen branch only to branch there. With them it is verified
        # completely: verifying more tokens never reduces what is accepted.
        self.parallel = drafter.runs_parallel(target.model)
        self.hedged = self.parallel and self.options.hedge and self.options.k_max > 1
        self.drafting: BranchDrafting | None = None  # before the first draft
        self.thread: DraftingThread | None = None  # None drafts serially
        self.threads_before: int | None = None
        self.speed_ratio = 0.0  # c = T_p / T_q
        self.emitted: list[list[int]] = []
        self.last: Committed  # the latest commit, with the features that H-RAD reads
        self.signals: list[Signals] = []
        self.chains: Chains  # of the latest draft
        self.has_drafted = False  # in this round
        self.embeddings: Any = target.model.get_input_embeddings()
        self.device = home_of(self.embeddings)  # an offloaded model says "meta"
        self.began = time.perf_counter()

    def observe(self, committed: Committed) -> None:
        self.last = committed
        if committed.tree is not None:
            if self.drafting is not None and not self.has_drafted:
                self._call(self.drafting.skip, self.emitted, self.signals)  # of the round before
            self.emitted, self.has_drafted = list(committed.tokens), False
        if self.thread is not None:
            self.thread.count()

    def draft(self, context: DraftContext) -> DraftTree:
        if self.drafting is None:
            if min(context.lengths) < 2:  # the prompt was passed as embeddings, which the draft model cannot read
                return DraftTree.root_only(context.root_ids)
            self._start(context)
        assert self.drafting is not None
        self.signals = self._signals(context, self.drafting)
        chains: Chains = self._call(self.drafting.draft, self.emitted, context.active, self.signals)
        self.chains, self.has_drafted = chains, True
        token_ids = [[text[-1], *tokens] for text, tokens in zip(context.texts, chains.tokens, strict=True)]
        tree = DraftTree.from_lists(
            token_ids,
            [list(range(-1, len(tokens) - 1)) for tokens in token_ids],
            finite=None if all(chains.finite) else from_host(chains.finite, self.device),
            device=self.device,
        )
        return replace(tree, draft_probs=self._to_target_device(chains.draft_probs))

    def _call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments) if self.thread is None else self.thread.call(work, *arguments)

    def _start(self, context: DraftContext) -> None:
        options, draft_model = self.options, self.drafter.draft_model
        assert draft_model is not None, "check_target requires it"
        branches = options.k_max if self.parallel else 1
        plan = DraftingPlan(
            most_tokens=options.depth,
            most_branches=branches,
            most_hedges=branches - 1 if options.hedge else 0,
            min_confidence=options.min_confidence,
            draw_candidates=options.candidates == "drawn",
            choice=context.choice,
            vocab_size=self.last.target_logits.shape[-1],
        )
        self.drafting = drafting = BranchDrafting(draft_model, plan)
        # Drawn from torch's global generator, so that its seed determines the drafts.
        seed = int(torch.randint(2**62, (), device="cpu")) if context.choice.do_sample else 0
        can = abilities(draft_model.device)
        # transformers' own loop verifies outside of `verify`, and without streams both would share one queue.
        if self.parallel and self.assisted is None and (can.host_memory or can.works_ahead):
            self.thread = DraftingThread(draft_model.device, self.device, options.worker_threads)
            if self.device.type == "cpu" == draft_model.device.type:
                self._share_cores()
        self.emitted = [[] for _ in context.texts]
        self._call(drafting.start, context.texts, self.target.text_mask(min(context.lengths) - 1), seed)
        known, ratio = self.drafter.known_of(self.target.model), options.speed_ratio
        if ratio is None:
            if "speed ratio" not in known:  # measured once, so that draft lengths, and samples, are repeatable
                seconds = self._seconds_per_verification(context)
                known["speed ratio"] = seconds / self._call(drafting.seconds_per_forward)
            ratio = known["speed ratio"]
        self.speed_ratio = ratio
        # No longer than c, rounded down, so that drafting takes no longer than verification.
        drafting.plan = replace(plan, most_tokens=max(1, min(plan.most_tokens, int(ratio))))

    def _share_cores(self) -> None:
        """Reserves the worker's cores during the call: with more threads than cores both sides would be slower."""
        self.threads_before = torch.get_num_threads()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, min(self.threads_before, cores - self.options.worker_threads)))

    def _seconds_per_verification(self, context: DraftContext, nodes: int = 6, repeats: int = 3) -> float:
        """T_p: the median time of a verification of a few nodes. Nothing is committed, or counted."""
        tree, target = DraftTree.chain(context.root_ids.unsqueeze(1).expand(-1, nodes)), self.target
        counts = target.num_forwards, target.num_layers_run
        seconds = seconds_of(functools.partial(target.verify, tree, context.root_positions), self.device, repeats)
        target.num_forwards, target.num_layers_run = counts
        return seconds

    def _signals(self, context: DraftContext, drafting: BranchDrafting) -> list[Signals]:
        batch = len(context.lengths)
        if self.options.lengths == "fixed":
            # PEARL (arXiv 2408.11850): a new chain is verified from its first token on while the rest is drafted
            # (pre-verify), and a continued one is verified completely (post-verify). Serial: always all tokens.
            return [Signals(ALL_ACCEPT, ALL_ACCEPT if self.thread is None else ALL_REJECT)] * batch
        if self.options.lengths == "confidence":
            return [Signals(ALL_ACCEPT if self.hedged else CONFIDENCE, CONFIDENCE)] * batch
        posterior, rows = self.options.selection == "posterior", list(range(batch))
        if posterior and self.hedged:  # chosen branches are verified completely: H-RAD decides for other rows only
            pairs = zip(drafting.rows, self.emitted, strict=True)
            chosen = [row.chosen_branch(tokens) for row, tokens in pairs]
            rows = [row for row in rows if context.active[row] and chosen[row] is None]
        kinds: dict[int, int] = {}
        if rows:
            features, index = last_features(self.last), from_host(rows, context.root_ids.device)
            root_ids = context.root_ids[index]
            found_kinds = self.drafter.predict(features[index.to(features.device)], root_ids, self.embeddings)
            kinds = dict(zip(rows, found_kinds.tolist(), strict=True))
        return [
            Signals(
                kept_branch=kind if posterior and not self.hedged else ALL_ACCEPT,
                fresh=kind,
                branches=ALL_ACCEPT if posterior else kind,
            )
            for kind in (kinds.get(row, ALL_ACCEPT) for row in range(batch))
        ]

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        """Verifies while the thread drafts branches after the chains."""
        if self.drafting is not None and not self.has_drafted:  # a round that skips drafting, with all cores
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads_before or before)
            try:
                return target.verify(tree, state.root_positions)
            finally:
                torch.set_num_threads(before)
        if self.thread is None or self.drafting is None:
            return target.verify(tree, state.root_positions)
        verify = functools.partial(target.verify, tree, state.root_positions)
        output, branches = self.thread.beside(verify, self.drafting.draft_ahead, self.signals)
        return replace(output, drawn=self._drawn(branches, tree.num_nodes))

    def _drawn(self, branches: Branches, num_nodes: int) -> DrawnCandidates | None:
        """The sampled candidates after the chains, for the acceptance rule; None if none were sampled.

        A chain that was cut to fewer than its nodes has no end here, and so no candidates.
        """
        draft_probs = self._to_target_device(branches.draft_probs)
        if draft_probs is None:
            return None
        most, device = draft_probs.shape[1], draft_probs.device
        candidates, lengths = branches.candidates, [len(tokens) for tokens in self.chains.tokens]
        counts = [len(tokens) if length < num_nodes else 0 for tokens, length in zip(candidates, lengths, strict=True)]
        return DrawnCandidates(
            nodes=from_host([min(length, num_nodes - 1) for length in lengths], device),
            token_ids=from_host([tokens + [0] * (most - len(tokens)) for tokens in candidates], device),
            draft_probs=draft_probs,
            drafted=from_host([[index < count for index in range(most)] for count in counts], device),
        )

    def count(self, stats: SpeculationStats) -> None:
        if self.drafting is None:
            return
        stats.add_drafting(self._call(self.drafting.final_stats, self.emitted))
        if self.thread is not None:
            stats.add_drafting(self.thread.overlap)
        stats.speed_ratio = self.speed_ratio
        if num_tokens := stats.num_accepted_draft_tokens + stats.num_spec_steps:
            self.drafter.keep_pace(self.target.model, self.parallel, (time.perf_counter() - self.began) / num_tokens)

    def close(self) -> None:
        try:
            if self.thread is not None and self.drafting is not None:
                self.drafting.stopped = True
                self.thread.executor.shutdown(wait=True, cancel_futures=True)
        finally:
            if self.threads_before is not None:
                torch.set_num_threads(self.threads_before)

    def _to_target_device(self, draft_probs: Tensor | None) -> Tensor | None:
        return None if draft_probs is None else draft_probs.to(self.device)
