"""Merged drafting in one `generate` call: the union of the sources' trees, likeliest paths first.

A node of the union is a prefix; several sources may have proposed it. Its probability is estimated from their stated
probabilities and from earlier acceptance (`calibration.py`). Cheap sources draft first. Each further one drafts only if
it has added more tokens to the expected ones than could be decoded in its time.
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

UNSTATED = 0.8  # assumed probability of each node after its parent, for sources that state none
LEAST = 0.01  # less likely paths are not verified


@dataclass
class Proposal:
    """The tree that one source proposes for one row, as lists; see `DraftTree` for the fields."""

    token_ids: list[int]
    parents: list[int]
    valid: list[bool]
    logprobs: list[float] | None

    @classmethod
    def of_rows(cls, tree: DraftTree) -> list[Proposal]:
        """One for each row of a tree, with one transfer from the device."""
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
        sources: which sources proposed the node, as bits.
        children: by node and token.
        own: per source, its own node for each node of the union that it proposed.
        paths: estimated probability of the path to each node.
        selected: the nodes that are verified, likeliest first, root included.
    """

    token_ids: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    stated: list[float] = field(default_factory=lambda: [1.0])
    sources: list[int] = field(default_factory=lambda: [0])
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    own: dict[int, dict[int, int]] = field(default_factory=dict)
    paths: list[float] = field(default_factory=lambda: [1.0])
    selected: list[int] = field(default_factory=lambda: [0])

    def add(self, source: int, proposal: Proposal) -> None:
        """Adds a source's proposal for this row."""
        token_ids, parents, logprobs = proposal.token_ids, proposal.parents, proposal.logprobs
        union_node = [0] * len(token_ids)
        own = self.own[source] = {0: 0}
        for number in range(1, len(token_ids)):
            if not proposal.valid[number]:
                continue
            parent, token = union_node[parents[number]], token_ids[number]
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
            own[node], union_node[number] = number, node

    def estimate(self, calibration: Calibration) -> None:
        """Updates `paths`; no node is likelier than its parent."""
        self.paths = [1.0]
        for node in range(1, len(self.token_ids)):
            after = calibration.probability(self.sources[node], self.depths[node], self.stated[node])
            self.paths.append(self.paths[self.parents[node]] * after)

    def longest_match(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of the longest proposed prefix of `tokens`, root first."""
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
        self.features: list[slice | None] = []  # the part of the target's features that each source reads
        layers = [len(source.feature_layers(target.model)) for source in drafter.sources]
        width, start = getattr(target.model.config.get_text_config(decoder=True), "hidden_size", 0), 0
        for count in layers:
            self.features.append(slice(start, start + count * width) if count else None)
            start += count * width
        self.sources = [source.candidate_generator(target) for source in drafter.sources]
        self.drops_rows = all(source.drops_rows for source in self.sources)
        self.reads_cache = any(source.reads_cache for source in self.sources)
        self.trees: list[DraftTree | None] = [None for _ in self.sources]  # of the latest round; None if skipped
        # Expected accepted tokens before and after each source's draft.
        self.expected: list[tuple[float, float]] = [(0.0, 0.0) for _ in self.sources]
        self.unions: list[Union] = []
        self.counts = [SourceCounts() for _ in self.sources]
        self.began = 0.0  # start of the current round, by `time.perf_counter`

    def draft(self, context: DraftContext) -> DraftTree:
        self.began = time.perf_counter()
        budget = self.budget if context.node_limit is None else min(self.budget, context.node_limit)
        # Sources must not sample: their tokens would not follow the distribution of the union.
        greedy = replace(context, choice=GREEDY, node_limit=budget)
        self.unions = [Union([root]) for root in context.root_ids.tolist()]
        self.trees = [None for _ in self.sources]
        gains = self.knowledge.gains
        expected = 0.0
        for index in sorted(range(len(self.sources)), key=lambda index: gains[index].seconds):
            # Every source drafts once per call, because a new text may be of another kind.
            if not gains[index].should_draft(expected) and self.counts[index].num_drafts:
                continue
            start = time.perf_counter()
            self.trees[index] = tree = self.sources[index].draft(greedy)
            for union, proposal, active in zip(self.unions, Proposal.of_rows(tree), context.active, strict=True):
                if active:
                    union.add(index, proposal)
                    union.estimate(self.knowledge.calibration)
            before, expected = expected, self._expected(budget, context.active)
            self.expected[index] = before, expected
            gains[index].add_time(time.perf_counter() - start)
            self.counts[index].num_drafts += 1
        tree = self._cut(budget, context.root_ids.device)
        context.lap("tree")
        return tree

    def _expected(self, budget: int, active: Sequence[bool]) -> float:
        """Expected accepted tokens of all proposals so far, the mean of the active rows."""
        sums = [
            sum(sorted(union.paths[1:], reverse=True)[:budget])
            for union, is_active in zip(self.unions, active, strict=True)
            if is_active
        ]
        return sum(sums) / max(1, len(sums))

    def _cut(self, budget: int, device: torch.device) -> DraftTree:
        """The `budget` likeliest nodes of each row."""
        token_ids, parents, logprobs = [], [], []
        for union in self.unions:
            paths = union.paths
            likely = [node for node in range(1, len(paths)) if paths[node] >= LEAST]
            # The sort is stable, so a parent precedes a child with the same probability.
            union.selected = [0, *sorted(likely, key=paths.__getitem__, reverse=True)[:budget]]
            rank = {node: index for index, node in enumerate(union.selected)}
            token_ids.append([union.token_ids[node] for node in union.selected])
            parents.append([rank.get(union.parents[node], -1) for node in union.selected])
            logprobs.append([math.log(paths[node]) for node in union.selected])
        return DraftTree.from_lists(token_ids, parents, path_logprobs=logprobs, device=device)

    def observe(self, committed: Committed) -> None:
        if committed.tree is not None and self.unions:
            self._learn(committed)
        for index, source in enumerate(self.sources):
            source.observe(self._for_source(index, committed))

    def _for_source(self, index: int, committed: Committed) -> Committed:
        """The committed tokens with the source's own features, tree and path."""
        part = self.features[index]
        features = None if committed.features is None or part is None else committed.features[..., part]
        if committed.tree is None:
            return replace(committed, features=features)
        tree = self.trees[index]
        if tree is None:
            tree = DraftTree.root_only(committed.tree.token_ids[:, 0])
        steps = committed.token_ids.shape[1]
        paths = []
        for union, tokens in zip(self.unions, committed.tokens, strict=True):
            own = union.own.get(index, {0: 0})
            path = [own.get(node, -1) for node in union.longest_match(tokens[:-1])]
            paths.append((path + [-1] * steps)[:steps])
        return replace(committed, features=features, tree=tree, path=torch.tensor(paths))

    def _learn(self, committed: Committed) -> None:
        """Updates the counts from the tokens that the target chose, for nodes that were not verified too."""
        calibration = self.knowledge.calibration
        assert committed.tree is not None
        num_verified = committed.tree.num_nodes
        num_rows = 0
        for union, tokens in zip(self.unions, committed.tokens, strict=True):
            if not tokens:
                continue
            num_rows += 1
            proposed = union.longest_match(tokens)
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
            for index in range(len(self.sources)):
                verified = union.selected[:num_verified]
                self.counts[index].num_draft_tokens += sum(union.sources[node] >> index & 1 for node in verified)
                self.counts[index].num_accepted_tokens += sum(union.sources[node] >> index & 1 for node in accepted)
        if not num_rows:
            return
        knowledge = self.knowledge
        knowledge.note_round(time.perf_counter() - self.began, sum(map(len, committed.tokens)) / num_rows)
        for gain, tree, (before, after) in zip(knowledge.gains, self.trees, self.expected, strict=True):
            if tree is not None:
                gain.note(before, after - before, *knowledge.pace)

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
                "+".join(name for index, name in enumerate(self.names) if union.sources[node] >> index & 1)
                for node in union.selected
            ]
            rows.append((proposed + [""] * tree.num_nodes)[: tree.num_nodes])
        return NodeNotes((tree.path_logprobs - above).exp(), sources=rows)
