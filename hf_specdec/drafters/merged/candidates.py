"""Merged drafting in one `generate` call: the union of what the sources propose, likeliest paths first.

A node of the union is a prefix; several sources may have proposed it. How likely the target follows it is read from
their stated probabilities by what was accepted before (`calibration.py`). Cheap sources are asked first, and each
further one where it has gained more tokens, beside what those before it expect, than could be written in its time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_specdec.decoding.generator import GREEDY, Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.stats import SourceCounts, SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.merged.calibration import Calibration
from hf_specdec.drafters.merged.drafter import MergedDrafter

UNSTATED = 0.8  # what a source that states no probabilities is taken to state of each node after its parent
LEAST = 0.01  # a path less likely than this is not worth a node


@dataclass
class Proposal:
    """What one source proposes for one row, as lists; see `DraftTree` for the fields."""

    token_ids: list[int]
    parents: list[int]
    valid: list[bool]
    logprobs: list[float] | None

    @classmethod
    def of_rows(cls, tree: DraftTree) -> list[Proposal]:
        """One for each row of a tree, read from the device at once and not row by row."""
        rows = len(tree.token_ids)
        logprobs = [None] * rows if tree.path_logprobs is None else tree.path_logprobs.tolist()
        return list(map(cls, tree.token_ids.tolist(), tree.parents.tolist(), tree.valid.tolist(), logprobs))


@dataclass
class Union:
    """The prefixes that the sources propose for one row. Node 0 is the root; parents come before their children.

    Attributes:
        token_ids: of the nodes.
        parents: index of each node's parent, -1 at the root.
        depths: 0 at the root.
        stated: the largest probability that a source states for the node after its parent.
        sources: who proposed the node, as bits.
        children: by node and token.
        own: per source, its own node for each of these that it has proposed.
        paths: how likely the target follows the path to each node, as estimated last.
        kept: the nodes that are verified, likeliest first, root included.
    """

    token_ids: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    stated: list[float] = field(default_factory=lambda: [1.0])
    sources: list[int] = field(default_factory=lambda: [0])
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    own: dict[int, dict[int, int]] = field(default_factory=dict)
    paths: list[float] = field(default_factory=lambda: [1.0])
    kept: list[int] = field(default_factory=lambda: [0])

    def add(self, source: int, proposal: Proposal) -> None:
        """Adds what a source proposes for this row."""
        token_ids, parents, logprobs = proposal.token_ids, proposal.parents, proposal.logprobs
        place = [0] * len(token_ids)
        own = self.own[source] = {0: 0}
        for number in range(1, len(token_ids)):
            if not proposal.valid[number]:
                continue
            parent, token = place[parents[number]], token_ids[number]
            stated = UNSTATED
            if logprobs is not None:
                stated = math.exp(min(0.0, logprobs[number] - logprobs[parents[number]]))
            node = self.children.setdefault((parent, token), len(self.token_ids))
            if node == len(self.token_ids):
                self.token_ids.append(token)
                self.parents.append(parent)
                self.depths.append(self.depths[parent] + 1)
                self.stated.append(stated)
                self.sources.append(0)
            self.stated[node] = max(self.stated[node], stated)
            self.sources[node] |= 1 << source
            own[node], place[number] = number, node

    def estimate(self, calibration: Calibration) -> None:
        """Sets `paths`; no node beats its parent."""
        self.paths = [1.0]
        for node in range(1, len(self.token_ids)):
            after = calibration.probability(self.sources[node], self.depths[node], self.stated[node])
            self.paths.append(self.paths[self.parents[node]] * after)

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of the longest prefix of `tokens` that was proposed, root first."""
        path = [0]
        for token in tokens:
            if (node := self.children.get((path[-1], token))) is None:
                break
            path.append(node)
        return path


class MergedGenerator(TreeCandidateGenerator):
    """One `generate` call of a `MergedDrafter`."""

    def __init__(self, drafter: MergedDrafter, target: TargetModel) -> None:
        self.names = drafter.names
        self.budget = drafter.options.node_limit
        self.knowledge = drafter.knowledge(target.model)
        self.features: list[slice | None] = []  # of the target's features, those that each source reads
        layers = [len(source.feature_layers(target.model)) for source in drafter.sources]
        width, start = getattr(target.model.config.get_text_config(decoder=True), "hidden_size", 0), 0
        for count in layers:
            self.features.append(slice(start, start + count * width) if count else None)
            start += count * width
        self.sources = [source.candidate_generator(target) for source in drafter.sources]
        self.drops_rows = all(source.drops_rows for source in self.sources)
        self.reads_cache = any(source.reads_cache for source in self.sources)
        self.trees: list[DraftTree | None] = [None for _ in self.sources]  # of the latest round, of those asked
        # Tokens that are expected to be accepted, before and after each was asked.
        self.expected: list[tuple[float, float]] = [(0.0, 0.0) for _ in self.sources]
        self.unions: list[Union] = []
        self.counts = [SourceCounts() for _ in self.sources]
        self.began = 0.0  # when the round under way did, by the clock of `time.perf_counter`

    def draft(self, context: DraftContext) -> DraftTree:
        self.began = time.perf_counter()
        budget = self.budget if context.node_limit is None else min(self.budget, context.node_limit)
        # What is drawn for one source would not be of the law of the union.
        asked = replace(context, choice=GREEDY, node_limit=budget)
        self.unions = [Union([root]) for root in context.root_ids.tolist()]
        self.trees = [None for _ in self.sources]
        worths = self.knowledge.worths
        expected = 0.0
        for place in sorted(range(len(self.sources)), key=lambda place: worths[place].seconds):
            # A new text may be of another kind: everybody is asked once.
            if not worths[place].asks(expected) and self.counts[place].num_drafts:
                continue
            start = time.perf_counter()
            self.trees[place] = tree = self.sources[place].draft(asked)
            for union, proposal, active in zip(self.unions, Proposal.of_rows(tree), context.active, strict=True):
                if active:
                    union.add(place, proposal)
                    union.estimate(self.knowledge.calibration)
            before, expected = expected, self._expected(budget, context.active)
            self.expected[place] = before, expected
            worths[place].timed(time.perf_counter() - start)
            self.counts[place].num_drafts += 1
        tree = self._cut(budget, context.root_ids.device)
        context.lap("tree")
        return tree

    def _expected(self, budget: int, active: Sequence[bool]) -> float:
        """Tokens that are expected to be accepted of what was proposed so far, the mean of the rows."""
        sums = [
            sum(sorted(union.paths[1:], reverse=True)[:budget])
            for union, going in zip(self.unions, active, strict=True)
            if going
        ]
        return sum(sums) / max(1, len(sums))

    def _cut(self, budget: int, device: torch.device) -> DraftTree:
        """The `budget` likeliest nodes of each row."""
        token_ids, parents, logprobs = [], [], []
        for union in self.unions:
            paths = union.paths
            likely = [node for node in range(1, len(paths)) if paths[node] >= LEAST]
            # The sort is stable, so a parent wins a tie with its child.
            union.kept = [0, *sorted(likely, key=paths.__getitem__, reverse=True)[:budget]]
            rank = {node: place for place, node in enumerate(union.kept)}
            token_ids.append([union.token_ids[node] for node in union.kept])
            parents.append([rank.get(union.parents[node], -1) for node in union.kept])
            logprobs.append([math.log(paths[node]) for node in union.kept])
        return DraftTree.from_lists(token_ids, parents, path_logprobs=logprobs, device=device)

    def observe(self, committed: Committed) -> None:
        if committed.tree is not None and self.unions:
            self._learn(committed)
        for place, source in enumerate(self.sources):
            source.observe(self._as_seen_by(place, committed))

    def _as_seen_by(self, place: int, committed: Committed) -> Committed:
        """What was committed, with the source's own features, tree and path."""
        part = self.features[place]
        features = None if committed.features is None or part is None else committed.features[..., part]
        if committed.tree is None:
            return replace(committed, features=features)
        tree = self.trees[place]
        if tree is None:
            tree = DraftTree.root_only(committed.tree.token_ids[:, 0])
        steps = committed.token_ids.shape[1]
        paths = []
        for union, tokens in zip(self.unions, committed.tokens, strict=True):
            own = union.own.get(place, {0: 0})
            path = [own.get(node, -1) for node in union.walk(tokens[:-1])]
            paths.append((path + [-1] * steps)[:steps])
        return replace(committed, features=features, tree=tree, path=torch.tensor(paths))

    def _learn(self, committed: Committed) -> None:
        """Counts who was right about the tokens that the target chose, those of nodes that were cut among them."""
        calibration = self.knowledge.calibration
        assert committed.tree is not None
        num_verified = committed.tree.num_nodes
        going = 0
        for union, tokens in zip(self.unions, committed.tokens, strict=True):
            if not tokens:
                continue
            going += 1
            proposed = union.walk(tokens)
            below: dict[int, list[int]] = {}
            for node, parent in enumerate(union.parents):
                below.setdefault(parent, []).append(node)
            for depth, token in enumerate(tokens):
                if depth >= len(proposed):
                    break
                for node in below.get(proposed[depth], ()):
                    followed = union.token_ids[node] == token
                    calibration.note(union.sources[node], union.depths[node], union.stated[node], followed)
            accepted = proposed[1 : len(tokens)]
            for place in range(len(self.sources)):
                verified = union.kept[:num_verified]
                self.counts[place].num_draft_tokens += sum(union.sources[node] >> place & 1 for node in verified)
                self.counts[place].num_accepted_tokens += sum(union.sources[node] >> place & 1 for node in accepted)
        if not going:
            return
        knowledge = self.knowledge
        knowledge.note_round(time.perf_counter() - self.began, sum(map(len, committed.tokens)) / going)
        for worth, tree, (before, after) in zip(knowledge.worths, self.trees, self.expected, strict=True):
            if tree is not None:
                worth.note(before, after - before, *knowledge.pace)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.unions = [self.unions[row] for row in rows] if self.unions else []
        self.trees = [None if tree is None else tree.of_rows(rows) for tree in self.trees]
        for source in self.sources:
            source.keep_rows(rows)

    def count(self, stats: SpeculationStats) -> None:
        stats.by_source = dict(zip(self.names, self.counts, strict=True))
        for source in self.sources:
            source.count(stats)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        assert tree.path_logprobs is not None
        above: Tensor = tree.path_logprobs.gather(1, tree.parents.clamp(min=0))
        rows = []
        for union in self.unions:
            proposed = [
                "+".join(name for place, name in enumerate(self.names) if union.sources[node] >> place & 1)
                for node in union.kept
            ]
            rows.append((proposed + [""] * tree.num_nodes)[: tree.num_nodes])
        return NodeNotes((tree.path_logprobs - above).exp(), sources=rows)
