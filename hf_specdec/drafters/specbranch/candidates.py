"""SpecBranch in one `generate` call, the target's side: H-RAD, the chains to verify, and the worker that drafts.

The state machine of Figure 9 has two parts: draft stage and branch stage are `BranchDrafting.draft` and `draft_ahead`;
this side reads the target's features, runs H-RAD, and turns chains into draft trees. Source: SpecBranch, Sections 5.1
and 5.2, Algorithm 1.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_specdec.decoding.accept import DrawnCandidates
from hf_specdec.decoding.devices import abilities, wait_for
from hf_specdec.decoding.generator import ChoiceRule, Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.modules import home_of
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.specbranch.branches import (
    ALL_ACCEPT,
    ALL_REJECT,
    CONFIDENCE,
    Branches,
    Chains,
    Continuation,
    Counters,
    Signals,
    continuation,
)
from hf_specdec.drafters.specbranch.drafting import BranchDrafting
from hf_specdec.drafters.specbranch.worker import SerialWorker, Worker

# [batch, features] of the target at the last verified token, [batch] ids of the next token -> [batch] classes
Predictor = Callable[[Tensor, Tensor], Tensor]


class SpecBranchGenerator(TreeCandidateGenerator):
    """Drafts while the target verifies, for one call.

    Args:
        target: the target of this call.
        make_drafting: makes the draft model's side, from the call's choice rule and the columns of the target's logits.
        make_worker: makes the worker that runs it.
        speed_ratio: T_p / T_q; stores a newly measured value.
        predict: H-RAD; None if `lengths` does not use it.
        lengths: see `SpecBranchOptions`.
        posterior: whether the retained tokens of a branch are chosen after verification.
        hedged: whether there are branches from nodes within chains. A chosen branch is then verified completely: the
            paper retains a part only to branch there, and verifying more tokens never reduces what is accepted.
        num_threads: intra-op threads of the worker on a CPU.
    """

    def __init__(
        self,
        target: TargetModel,
        make_drafting: Callable[[ChoiceRule, int], BranchDrafting],
        make_worker: Callable[[BranchDrafting], Worker],
        speed_ratio: SpeedRatio,
        *,
        predict: Predictor | None,
        lengths: str,
        posterior: bool,
        hedged: bool,
        num_threads: int,
    ) -> None:
        self.target = target
        self.make_drafting = make_drafting
        self.make_worker = make_worker
        self.speed_ratio = speed_ratio
        self.predict = predict
        self.lengths = lengths
        self.posterior = posterior
        self.hedged = hedged
        self.num_threads = num_threads
        self.threads_before: int | None = None
        self.worker: Worker | None = None
        self.is_parallel = False
        self.emitted: list[list[int] | None] = []
        self.prepared: list[set[Continuation]] = []  # per row, the results for which the last round has a branch
        self.last: Committed | None = None  # the latest commit, with the features that H-RAD reads
        self.signals: list[Signals] = []
        self.chains: Chains | None = None
        self.device = home_of(target.model.get_input_embeddings())  # an offloaded model says "meta"
        self.overlap = SpeculationStats()

    def observe(self, committed: Committed) -> None:
        self.last = committed
        if committed.tree is not None:
            self.emitted = list(committed.tokens)

    def draft(self, context: DraftContext) -> DraftTree:
        if self.worker is None:
            if min(context.lengths) < 2:  # the prompt was passed as embeddings, which the draft model cannot read
                return DraftTree.root_only(context.root_ids)
            self.worker = self._start(context)
        self.signals = self._signals(context)
        self.chains = self.worker.call("draft", self.emitted, context.active, self.signals)
        self.prepared = [set() for _ in self.emitted]
        rows = zip(context.root_ids.tolist(), self.chains.tokens, strict=True)
        token_ids = [[root, *tokens] for root, tokens in rows]
        tree = DraftTree.from_lists(
            token_ids,
            [list(range(-1, len(tokens) - 1)) for tokens in token_ids],
            finite=None if all(self.chains.finite) else torch.tensor(self.chains.finite, device=self.device),
            device=self.device,
        )
        return replace(tree, draft_probs=self._to_target_device(self.chains.draft_probs))

    def _start(self, context: DraftContext) -> Worker:
        rows = zip(context.sequences.tolist(), context.lengths, strict=True)
        texts = [row[:length] for row, length in rows]
        assert self.last is not None, "the prefill has been observed"
        drafting = self.make_drafting(context.choice, self.last.target_logits.shape[-1])
        # Drawn from torch's global generator, so that its seed determines the drafts, equally for all kinds of workers.
        seed = int(torch.randint(2**62, ())) if context.choice.do_sample else 0
        worker = self.worker = self.make_worker(drafting)
        # transformers' own loop verifies outside of `verify`, so no drafting can run in parallel.
        self.is_parallel = self.host_loop is None and not isinstance(worker, SerialWorker)
        if self.is_parallel and self.device.type == "cpu" == drafting.drafter.model.device.type:
            self._share_cores()
        self.emitted = [[] for _ in texts]
        self.prepared = [set() for _ in texts]
        prompt_mask = self.target.prompt_mask
        worker.call("start", texts, None if prompt_mask is None else prompt_mask.tolist(), seed)
        if self.speed_ratio.value is None:
            draft_s = worker.call("seconds_per_forward")
            self.speed_ratio.value = self._seconds_per_verification(context) / draft_s
        worker.call("bound_tokens", self.speed_ratio.value)
        return worker

    def _share_cores(self) -> None:
        """Reserves the worker's cores during the call: with more threads than cores both sides would be slower."""
        self.threads_before = torch.get_num_threads()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, min(self.threads_before, cores - self.num_threads)))

    def _seconds_per_verification(self, context: DraftContext, nodes: int = 6, repeats: int = 3) -> float:
        """T_p: the median time of a verification of a few nodes. Nothing is committed."""
        tree = DraftTree.chain(context.root_ids.unsqueeze(1).expand(-1, nodes))
        seconds = []
        for _ in range(repeats + 1):  # the first one is a warm-up
            began = time.perf_counter()
            self.target.verify(tree, context.root_positions)
            wait_for(self.device)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[1:])

    def _signals(self, context: DraftContext) -> list[Signals]:
        batch = len(context.lengths)
        if self.lengths == "fixed":
            # PEARL (arXiv 2408.11850): a new chain is verified from its first token on while the rest is drafted
            # (pre-verify), and a continued one is verified completely (post-verify). Serial: always all tokens.
            return [Signals(ALL_ACCEPT, ALL_REJECT if self.is_parallel else ALL_ACCEPT)] * batch
        if self.lengths == "confidence":
            return [Signals(ALL_ACCEPT if self.hedged else CONFIDENCE, CONFIDENCE)] * batch
        # If a chosen branch is verified completely, H-RAD is only needed for rows without one.
        keeps_whole = self.posterior and self.hedged
        indices = self._rows_without_branch(context.active) if keeps_whole else list(range(batch))
        found = dict(zip(indices, self._predict(context.root_ids, indices), strict=True))
        classes = [found.get(row, ALL_ACCEPT) for row in range(batch)]
        if keeps_whole:
            return [Signals(ALL_ACCEPT, fresh=kind) for kind in classes]
        if self.posterior:
            return [Signals(kept_branch=kind, fresh=kind) for kind in classes]
        return [Signals(ALL_ACCEPT, fresh=kind, branches=kind) for kind in classes]

    def _rows_without_branch(self, active: Sequence[bool]) -> list[int]:
        """The active rows for which the target has chosen no branch."""
        rows = zip(self.emitted, self.prepared, active, strict=True)
        return [
            row
            for row, (tokens, prepared, is_active) in enumerate(rows)
            if is_active and not (tokens and continuation(tokens) in prepared)
        ]

    def _predict(self, root_ids: Tensor, rows: Sequence[int]) -> list[int]:
        """H-RAD's classes for some rows."""
        assert self.predict is not None, "lengths requires H-RAD"
        assert self.last is not None, "the prefill has been observed"
        if not rows:
            return []
        index = torch.tensor(rows, device=root_ids.device)
        features = last_features(self.last)
        return self.predict(features[index.to(features.device)], root_ids[index]).tolist()

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        """Verifies while the worker drafts branches after the chains."""
        if self.worker is None or not self.is_parallel:
            return target.verify(tree, state.root_positions)
        # The target's own time: on a CPU without the time that the drafter takes of this thread's core.
        clock = time.thread_time if abilities(self.device).host_memory else time.perf_counter
        launched, busy_from = time.perf_counter(), clock()
        pending = self.worker.submit("draft_ahead", self.signals)
        output = target.verify(tree, state.root_positions)
        if abilities(self.device).works_ahead:  # without waiting, only the launch would be measured
            wait_for(self.device)
        busy_s = clock() - busy_from
        branches: Branches = pending.result()
        self.overlap.count_ahead(branches.busy_s, busy_s, time.perf_counter() - launched)
        self.prepared = branches.prepared
        return replace(output, drawn=self._drawn(branches, tree.num_nodes))

    def _drawn(self, branches: Branches, num_nodes: int) -> DrawnCandidates | None:
        """The sampled candidates after the chains, for the acceptance rule; None if none were sampled.

        A chain that was cut to fewer than its nodes has no end here, and so no candidates.
        """
        draft_probs = self._to_target_device(branches.draft_probs)
        if draft_probs is None:
            return None
        assert self.chains is not None
        most, device = draft_probs.shape[1], draft_probs.device
        candidates = [tokens + [0] * (most - len(tokens)) for tokens in branches.candidates]
        lengths = [len(tokens) for tokens in self.chains.tokens]
        counts = [
            len(tokens) if length < num_nodes else 0
            for tokens, length in zip(branches.candidates, lengths, strict=True)
        ]
        return DrawnCandidates(
            nodes=torch.tensor([min(length, num_nodes - 1) for length in lengths], device=device),
            token_ids=torch.tensor(candidates, device=device),
            draft_probs=draft_probs,
            drafted=torch.tensor([[index < count for index in range(most)] for count in counts], device=device),
        )

    def count(self, stats: SpeculationStats) -> None:
        if self.worker is None:
            return
        counters: Counters = self.worker.call("final_counters", self.emitted)
        stats.add_overlap(self.overlap)
        stats.num_path_drafts += counters.path_drafts
        stats.num_path_kept += counters.path_kept
        stats.peak_draft_entries = max(stats.peak_draft_entries, counters.peak_entries)
        stats.speed_ratio = self.speed_ratio.value or 0.0

    def close(self) -> None:
        try:
            if self.worker is not None:
                self.worker.close()
        finally:
            if self.threads_before is not None:
                torch.set_num_threads(self.threads_before)

    def _to_target_device(self, draft_probs: Tensor | None) -> Tensor | None:
        """Copies distributions from the draft model's device and stream to the target's."""
        if draft_probs is None:
            return None
        if draft_probs.is_cuda:
            draft_probs.record_stream(torch.cuda.current_stream(draft_probs.device))
        return draft_probs.to(self.device)


class SpeedRatio:
    """c = T_p / T_q, once it is known. Stored across calls, so that draft lengths, and samples, are repeatable."""

    def __init__(self, value: float | None = None) -> None:
        self.value = value


def last_features(committed: Committed) -> Tensor:
    """[batch, taps * hidden]: the target's features at the last token that a round, or the prefill, committed."""
    assert committed.features is not None
    features, counts = committed.features, committed.num_committed
    if committed.tree is None:  # prompts are padded on the left
        return features[:, -1]
    if min(counts) == max(counts):
        return features[:, counts[0] - 1]
    last = torch.tensor([max(0, count - 1) for count in counts], device=features.device)
    return features[torch.arange(len(counts), device=features.device), last]
