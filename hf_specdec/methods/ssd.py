"""Speculative speculative decoding (SSD): the next drafts are made while the target verifies this one.

A wrapper around another drafter. Of the tree that the drafter gives, the likeliest part is verified. The nodes behind
it say how the round may end: a node whose parent is verified is a token that may follow the path to that parent, though
it is no child there, so the round would end with that path and this token. While the target verifies, a thread drafts
the continuations of the likeliest of these outcomes. If the round ends with one of them, its tree is the next draft
and nothing has to be drafted; otherwise the drafter drafts as without this wrapper.

The likelihood of an outcome is the drafter's, times how often rounds of the call have ended at that depth. The drafter
must have `draft_text`. Look-ups and draft models draft from the text alone, and a foreseen tree is that of drafting
afterwards. EAGLE-3, `eagle` and `mtp` read the target's states, and those of this round do not exist yet: as in
the paper's code, they read their own outputs in their place, so that foreseen trees may be worse; verify stays exact.

Where drafter and target share cores, the target is slowed down by what is saved afterwards. So the first rounds of a
call are measured without and with the thread, and it is left alone for the rest of the call where it does not pay.

Source: Speculative Speculative Decoding, arXiv 2603.03251; for EAGLE-3 its authors' code. `specbranch` does the same
for the branches of a draft model, from its cache and with H-RAD.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from hf_specdec.decoding.devices import inference_on_cpu
from hf_specdec.decoding.exchange import GREEDY, Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.stopwatch import Stopwatch
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.targets.modules import home_of
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafting.drafter import Drafter, WrappingDrafter, check_is_drafter
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.registry import Serving, register
from hf_specdec.drafting.thread import DraftingThread

__all__ = ["DraftsFromText", "SSDDrafter", "SSDOptions"]

logger = logging.getLogger(__name__)

MAX_FAN_OUT = 64
TRIAL = 6  # rounds without the thread, then with it, that are compared


@runtime_checkable
class DraftsFromText(Protocol):
    """A candidate generator that can draft for a text that is not committed, and perhaps never will be.

    Attributes:
        rewinds: whether it can drop such a text again; models with recurrent states cannot.
    """

    @property
    def rewinds(self) -> bool: ...

    def draft_text(self, context: DraftContext, certain: Sequence[int]) -> DraftTree:
        """The tree for the text of the context, as if it were committed.

        Args:
            context: with `sequences` and `lengths` of that text.
            certain: tokens at the beginning of each row that are committed; what is kept of the rest must be dropped.
        """


@dataclass(slots=True, kw_only=True)
class SSDOptions(TreeOptions):
    """Drafting options of speculative speculative decoding; the wrapped drafter has its own.

    Attributes:
        tree_budget: see `TreeOptions`; nodes that are verified, of those that the wrapped drafter drafts. Default:
            three quarters of its own, or "auto" if that is its own.
        fan_out: most outcomes of a round that are prepared.
        threads: of the processor, for the thread that drafts.
        trial: whether the first rounds of a call are measured, and the thread is not used where it does not pay.
    """

    method = "ssd"
    fan_out: int = 4
    threads: int = 1
    trial: bool = True

    def validate(self, config: Any = None) -> None:
        TreeOptions.validate(self, config)
        self.check_integers(fan_out=MAX_FAN_OUT, threads=1024)
        self.check_switches("trial")


class SSDDrafter(WrappingDrafter):
    """Another drafter, whose next drafts are made while the target verifies.

    `stats.num_foreseen` of `stats.num_prepared` rounds began with a prepared draft.

    Args:
        drafter: a look-up, a draft model, or one of EAGLE's kind.
        drafting_options: of `SSDOptions`.

    Raises:
        ValueError: there is no drafter, or an option is out of range.
        TypeError: `drafter` is not a drafter.

    Examples:
        >>> from hf_specdec.methods.lookup import NGramDrafter
        >>> SSDDrafter(NGramDrafter(tree_budget=16)).options.tree_budget
        12
    """

    options_class = SSDOptions
    options: SSDOptions
    made_of = ("drafter",)

    def __init__(self, drafter: Drafter | None = None, **drafting_options: Any) -> None:
        if drafter is None:
            raise ValueError('load_drafter("ssd") needs drafter=..., a look-up, a draft model or an EAGLE drafter.')
        check_is_drafter(drafter)
        self.drafter, self.sources = drafter, (drafter,)
        own = getattr(drafter.options, "tree_budget", 16)
        self.options = SSDOptions(tree_budget=own if own == "auto" else max(1, own * 3 // 4))
        self.set_options(**drafting_options)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        inner = self.drafter.candidate_generator(target)
        if not isinstance(inner, DraftsFromText) or not inner.rewinds:
            inner.close()
            raise ValueError(
                f"A drafter of method {self.drafter.method!r} cannot draft while the target verifies: it needs what "
                "the target computes in that round, or what it keeps cannot be rewound, such as recurrent states and "
                "captured rounds. Look-ups, draft models with attention and EAGLE drafters can; pass this drafter to "
                "generate alone."
            )
        return SSDGenerator(inner, target, self.options)


@dataclass(frozen=True)
class RowTree:
    """The valid nodes of one row's tree."""

    token_ids: list[int]
    parents: list[int]
    logprobs: list[float] | None

    @classmethod
    def rows_of(cls, tree: DraftTree) -> list[RowTree]:
        """One for each row."""
        rows = []
        for tokens, parents, valid, logprobs in tree.read():
            nodes = [node for node, is_valid in enumerate(valid) if is_valid or node == 0]
            place = {node: at for at, node in enumerate(nodes)}
            rows.append(
                cls(
                    [tokens[node] for node in nodes],
                    [-1, *(place[parents[node]] for node in nodes[1:])],
                    None if logprobs is None else [logprobs[node] for node in nodes],
                )
            )
        return rows

    def outcomes(self, verified: int, ends: Counter[int]) -> list[tuple[int, ...]]:
        """How a round may end that verifies the first `verified` nodes, root included: tokens, likeliest first.

        Args:
            verified: number of nodes.
            ends: how often rounds have ended at each depth.
        """
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(self.token_ids)):
            paths.append((*paths[self.parents[node]], self.token_ids[node]))
        rounds = sum(ends.values())
        scores = {}
        for node in range(verified, len(paths)):
            if self.parents[node] < verified:
                depth = len(paths[node]) - 1
                share = (ends[depth] + 1) / (rounds + len(paths))
                likely = 1.0 / node if self.logprobs is None else math.exp(self.logprobs[node])
                scores[paths[node]] = likely * share
        return sorted(scores, key=scores.__getitem__, reverse=True)


class SSDGenerator(TreeCandidateGenerator):
    """One `generate` call: the prepared drafts, and the thread that makes them.

    Args:
        inner: the generator of the wrapped drafter.
        target: of the call.
        options: of the drafter.
    """

    def __init__(self, inner: Any, target: TargetModel, options: SSDOptions) -> None:
        self.inner, self.options = inner, options
        self.drops_rows = inner.drops_rows
        # In the target's stream, copies from its device would wait for `verify`. A drafter's own device is free anyway.
        self.device = home_of(target.model.get_input_embeddings())
        self.thread = DraftingThread(self.device, self.device, options.threads)
        self.committed: Committed | None = None  # kept while the thread may read it
        self.verified: Stopwatch | None = None  # has measured a round without the thread
        self.context: DraftContext | None = None  # of the running round
        self.rows: list[RowTree] = []  # its whole trees
        self.prepared: list[dict[tuple[int, ...], RowTree]] = []  # per row, by the tokens that the round ends with
        self.ended: list[tuple[int, ...]] = []  # tokens that the latest round committed, per row
        self.ends: Counter[int] = Counter()
        self.num_prepared = self.num_foreseen = 0
        self.pays: bool | None = None  # None: not known yet
        self.seconds: dict[str, list[float]] = {"draft": [], "alone": [], "both": []}

    def draft(self, context: DraftContext) -> DraftTree:
        self.context = replace(context, choice=GREEDY, node_limit=None, least_prob=None, lap=lambda stage: None)
        found = self._foreseen(context)
        if found is None:
            began = time.perf_counter()
            with self.thread.here():
                self.rows = RowTree.rows_of(self.inner.draft_text(self.context, context.lengths))
            self.seconds["draft"].append(time.perf_counter() - began)
        else:
            self.rows = found
        has_logprobs = all(row.logprobs is not None for row in self.rows)  # otherwise no row may have them
        tree = DraftTree.from_lists(
            [row.token_ids for row in self.rows],
            [row.parents for row in self.rows],
            path_logprobs=[row.logprobs or [] for row in self.rows] if has_logprobs else None,
            device=context.root_ids.device,
        )
        budget = context.at_most(self.options.node_limit)
        context.lap("draft")
        return tree.first_nodes(budget)

    def _foreseen(self, context: DraftContext) -> list[RowTree] | None:
        """The prepared trees of all rows; None if one lacks its own. Rows whose text has ended need none."""
        if not any(self.prepared):
            return None
        self.num_prepared += sum(context.active)
        rows = []
        for row, (prepared, tokens) in enumerate(zip(self.prepared, self.ended, strict=True)):
            tree = prepared.get(tokens)
            if tree is None and context.active[row]:
                return None
            rows.append(RowTree([context.texts[row][-1]], [-1], None) if tree is None else tree)
        self.num_foreseen += sum(context.active)
        return rows

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        self.prepared = []
        if self.context is None:  # a round without a draft
            return target.verify(tree, state.root_positions)
        plans = self._plans(self.context, tree.num_nodes)
        if not plans or self.assisted is not None:
            self.verified = Stopwatch(self.device)
            output = target.verify(tree, state.root_positions)
            self.verified.lap("alone")
            return output
        verify = functools.partial(target.verify, tree, state.root_positions)
        output, self.prepared = self.thread.beside(verify, self._prepare, self.context, plans)
        return output

    def _plans(self, context: DraftContext, num_nodes: int) -> list[list[tuple[int, ...]]]:
        """Per row the outcomes to prepare; empty if there are none, or it does not pay."""
        if self.options.trial and not self._worth_it():
            return []
        plans = [
            row.outcomes(min(num_nodes, len(row.token_ids)), self.ends)[: self.options.fan_out] if active else []
            for row, active in zip(self.rows, context.active, strict=True)
        ]
        return plans if any(plans) else []

    def _worth_it(self) -> bool:
        """Compares rounds without and with the thread, once both have been measured; the first of each is slow."""
        seconds = self.seconds
        if self.pays is None and len(seconds["both"]) > TRIAL and len(seconds["alone"]) > TRIAL:
            cost = statistics.median(seconds["both"][1:]) - statistics.median(seconds["alone"][1:])
            saved = self.num_foreseen / max(1, self.num_prepared) * statistics.median(seconds["draft"])
            self.pays = saved > max(0.0, cost)
            if not self.pays:
                logger.warning(
                    "Drafting while the target verifies does not pay here: it takes %.1f ms a round and saves %.1f ms. "
                    "The rest of this call drafts in turn.",
                    1e3 * cost,
                    1e3 * saved,
                )
        return self.pays if self.pays is not None else len(seconds["alone"]) > TRIAL

    @torch.no_grad()
    def _prepare(
        self, context: DraftContext, plans: list[list[tuple[int, ...]]]
    ) -> list[dict[tuple[int, ...], RowTree]]:
        """Drafts for one outcome of every row at a time, behind the texts of the running round; runs in the thread."""
        prepared: list[dict[tuple[int, ...], RowTree]] = [{} for _ in plans]
        device = context.root_positions.device
        with inference_on_cpu(self.device):
            for outcomes in itertools.zip_longest(*plans):
                grown = [list(outcome or ()) for outcome in outcomes]
                texts = [text + more for text, more in zip(context.texts, grown, strict=True)]
                lengths = [len(text) for text in texts]
                supposed = replace(
                    context,
                    root_ids=from_host([text[-1] for text in texts], device),
                    root_positions=context.root_positions + from_host([len(more) for more in grown], device),
                    sequences=from_host([text + [0] * (max(lengths) - len(text)) for text in texts], device),
                    lengths=lengths,
                    active=[outcome is not None for outcome in outcomes],
                    read_texts=functools.partial(list, texts),
                )
                trees = RowTree.rows_of(self.inner.draft_text(supposed, context.lengths))
                for known, outcome, tree in zip(prepared, outcomes, trees, strict=True):
                    if outcome is not None:
                        known[outcome] = tree
        return prepared

    def observe(self, committed: Committed) -> None:
        with self.thread.here():
            self.inner.observe(committed)
        self.context, self.committed = None, committed
        if wall_s := self.thread.count():
            self.seconds["both"].append(wall_s)
        if self.verified is not None:
            self.seconds["alone"].append(self.verified.seconds["alone"])
            self.verified = None
        if committed.tree is not None:
            self.ended = [tuple(tokens) for tokens in committed.tokens]
            self.ends.update(len(tokens) - 1 for tokens in committed.tokens if tokens)

    def keep_rows(self, rows: Sequence[int]) -> None:
        with self.thread.here():
            self.inner.keep_rows(rows)
        self.prepared = [self.prepared[row] for row in rows] if self.prepared else []
        self.ended = [self.ended[row] for row in rows] if self.ended else []

    def count(self, stats: SpeculationStats) -> None:
        self.inner.count(stats)
        stats.num_prepared, stats.num_foreseen = self.num_prepared, self.num_foreseen
        stats.add_drafting(self.thread.overlap)

    def close(self) -> None:
        self.thread.executor.shutdown()
        self.inner.close()


register(
    "ssd", SSDDrafter, origin="name", serving=Serving(not_exported="vLLM does not draft while the target verifies")
)
