"""MergedDrafter: several drafters for one target, merged into one tree with one budget, likeliest paths first.

A node of the union is a prefix; several sources may have proposed it. Its probability is estimated from their stated
probabilities and from earlier acceptance (`ScoreCalibration`). Cheap sources draft first. Each further one drafts only
if it has added more tokens to the expected ones than could be decoded in its time. What is measured affects only the
speed.
"""

from __future__ import annotations

import bisect
import math
import statistics
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hf_specdec.decoding.exchange import GREEDY, Committed, DraftContext, NodeNotes, path_notes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.stats import SourceCounts, SpeculationStats
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import ALWAYS_DRAFTING, Drafter, WrappingDrafter, check_is_drafter
from hf_specdec.drafting.options import TreeOptions
from hf_specdec.drafting.registry import Serving, register

__all__ = ["MergedDrafter", "MergedOptions"]

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)  # of stated probabilities
DEEPEST = 6  # larger depths are counted as this one
PRIOR = 3.0  # number of cases that the coarser estimate counts as
MEMORY = 0.99  # decay of each count per case, since texts change
EXPECTED_EDGES = (0.3, 1.0, 2.0, 4.0)  # of the expected number of accepted tokens of cheaper sources
PROBING = 0.01  # share of the time for trying a source again that does not gain


class ScoreCalibration:
    """The probability that the target follows a node, given its sources, depth and stated probability.

    Every estimate shrinks towards a coarser one. The prior of a bin of stated probabilities is the stated probability,
    corrected by the ratio of followed to stated at this depth.
    """

    def __init__(self) -> None:
        self._cases: dict[Hashable, list[float]] = {}  # [followed, weight]: of bins; [followed, stated]: of depths

    def probability(self, sources: Hashable, depth: int, stated: float) -> float:
        """The probability that the target follows a node, given that it follows its parent.

        Args:
            sources: that proposed it.
            depth: of the node.
            stated: the largest probability that they stated for it.
        """
        depth = min(depth, DEEPEST)
        followed, expected = self._cases.get((sources, depth), (0.0, 0.0))
        prior = min(1.0, stated * (followed + PRIOR) / (expected + PRIOR))
        followed, seen = self._cases.get((sources, depth, _bin(stated, EDGES)), (0.0, 0.0))
        return (followed + PRIOR * prior) / (seen + PRIOR)

    def note(self, sources: Hashable, depth: int, stated: float, followed: bool) -> None:
        """Counts a node whose parent the target has followed."""
        depth = min(depth, DEEPEST)
        for case, weight in (((sources, depth), stated), ((sources, depth, _bin(stated, EDGES)), 1.0)):
            counts = self._cases.setdefault(case, [0.0, 0.0])
            counts[0] = MEMORY * counts[0] + followed
            counts[1] = MEMORY * counts[1] + weight


class SourceGain:
    """Whether a source gains more than its drafts cost, given the expected accepted tokens of cheaper sources."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=9)
        self._gains: dict[int, float] = {}  # running mean of the expected tokens that it adds per round
        self._rounds_to_skip: dict[int, int] = {}

    def should_draft(self, expected: float) -> bool:
        """Whether it drafts in this round, after sources with `expected` accepted tokens; counts skipped rounds."""
        bin_index = _bin(expected, EXPECTED_EDGES)
        if self._rounds_to_skip.get(bin_index, 0) > 0:
            self._rounds_to_skip[bin_index] -= 1
            return False
        return True

    def add_time(self, seconds: float) -> None:
        """Records the seconds of a draft."""
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Median time of its latest drafts; 0 before the first. A call's first draft is slow: it reads the prompt."""
        return statistics.median_low(self._seconds) if self._seconds else 0.0

    def note(self, expected: float, gain: float, seconds_per_token: float, seconds_per_round: float) -> None:
        """Records how many expected tokens a draft has added.

        A source that adds fewer tokens than could be decoded in its time is skipped for so many rounds that trying it
        again takes `PROBING` of the time.

        Args:
            expected: accepted tokens before it drafted.
            gain: expected tokens that it added.
            seconds_per_token: of a row.
            seconds_per_round: of the call.
        """
        bin_index = _bin(expected, EXPECTED_EDGES)
        mean = self._gains.get(bin_index)
        self._gains[bin_index] = mean = max(1.0, gain) if mean is None else 0.8 * mean + 0.2 * gain
        if mean * seconds_per_token < self.seconds:
            self._rounds_to_skip[bin_index] = int(self.seconds / (PROBING * seconds_per_round))


def _bin(value: float, edges: tuple[float, ...]) -> int:
    return bisect.bisect_right(edges, value)


UNSTATED = 0.8  # assumed probability of each node after its parent, for sources that state none
LEAST = 0.01  # less likely paths are not verified


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

    def add(
        self, source: int, token_ids: list[int], parents: list[int], valid: list[int], logprobs: list[float] | None
    ) -> None:
        """Adds the tree that a source proposes for this row, see `DraftTree.read`."""
        union_node = [0] * len(token_ids)
        own = self.own[source] = {0: 0}
        for number in range(1, len(token_ids)):
            if not valid[number]:
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

    def estimate(self, calibration: ScoreCalibration) -> None:
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
        self.knowledge = drafter.known_of(target.model).setdefault("sources", Knowledge(len(drafter.sources)))
        self.features: list[slice | None] = []  # the part of the target's features that each source reads
        layers = [len(source.feature_layers(target.model)) for source in drafter.sources]
        width, start = getattr(target.model.config.get_text_config(decoder=True), "hidden_size", 0), 0
        for count in layers:
            self.features.append(slice(start, start + count * width) if count else None)
            start += count * width
        self.sources = [source.candidate_generator(target) for source in drafter.sources]
        self.drops_rows = all(source.drops_rows for source in self.sources)
        self.joins_rows = all(source.joins_rows for source in self.sources)
        self.reads_cache = any(source.reads_cache for source in self.sources)
        self.trees: list[DraftTree | None] = [None for _ in self.sources]  # of the latest round; None if skipped
        # Expected accepted tokens before and after each source's draft.
        self.expected: list[tuple[float, float]] = [(0.0, 0.0) for _ in self.sources]
        self.unions: list[Union] = []
        self.counts = [SourceCounts() for _ in self.sources]
        self.began = 0.0  # start of the current round, by `time.perf_counter`

    def draft(self, context: DraftContext) -> DraftTree:
        self.began = time.perf_counter()
        budget = context.at_most(self.budget)
        # Sources must not sample: their tokens would not follow the distribution of the union.
        greedy = replace(context, choice=GREEDY, node_limit=budget)
        self.unions = [Union([text[-1]]) for text in context.texts]
        self.trees = [None for _ in self.sources]
        gains = self.knowledge.gains
        expected = 0.0
        order = list(range(len(self.sources)))
        if by_the_clock := not ALWAYS_DRAFTING.get():
            order.sort(key=lambda index: gains[index].seconds)
        for index in order:
            # Every source drafts once per call, because a new text may be of another kind.
            if by_the_clock and not gains[index].should_draft(expected) and self.counts[index].num_drafts:
                continue
            start = time.perf_counter()
            self.trees[index] = tree = self.sources[index].draft(greedy)
            for union, proposed, active in zip(self.unions, tree.read(), context.active, strict=True):
                if active:
                    union.add(index, *proposed)
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
        if committed.tree is not None:
            if self.unions:
                self._learn(committed)
            else:  # a round without a draft
                self.unions = [Union([root]) for root in committed.tree.token_ids[:, 0].tolist()]
        for index, source in enumerate(self.sources):
            source.observe(self._for_source(index, committed))
        self.unions, self.trees = [], [None for _ in self.sources]

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
        return replace(committed, features=features, tree=tree, path=torch.tensor(paths, device="cpu"))

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
        for source in self.sources:
            source.keep_rows(rows)

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        for index, source in enumerate(self.sources):
            source.join([other.sources[index] for other in others], places)

    def count(self, stats: SpeculationStats) -> None:
        stats.by_source = dict(zip(self.names, self.counts, strict=True))
        for source in self.sources:
            source.count(stats)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        if (notes := path_notes(tree)) is None:  # of a round without a draft
            return None
        rows = []
        for union in self.unions:
            proposed = [
                "+".join(name for index, name in enumerate(self.names) if union.sources[node] >> index & 1)
                for node in union.selected
            ]
            rows.append((proposed + [""] * tree.num_nodes)[: tree.num_nodes])
        return NodeNotes(notes.probs, sources=rows)


@dataclass(slots=True, kw_only=True)
class MergedOptions(TreeOptions):
    """Drafting options of a merged drafter; the sources have their own options.

    Attributes:
        tree_budget: see `TreeOptions`; of the whole tree. Default: the first source's.
    """

    method = "merged"


class Knowledge:
    """What calls on one target have measured, for later ones."""

    def __init__(self, num_sources: int) -> None:
        self.calibration = ScoreCalibration()
        self.gains = [SourceGain() for _ in range(num_sources)]
        self._rounds: deque[tuple[float, float]] = deque(maxlen=32)  # seconds, and tokens per row, of the latest rounds

    def note_round(self, seconds: float, tokens: float) -> None:
        """Records the seconds of a round and its mean number of tokens per row."""
        self._rounds.append((seconds, tokens))

    @property
    def pace(self) -> tuple[float, float]:
        """Seconds per token of a row, and per round, of the latest rounds."""
        seconds, tokens = (sum(each) for each in zip(*self._rounds, strict=True))
        return seconds / tokens, seconds / len(self._rounds)


class MergedDrafter(WrappingDrafter):
    """Drafts one tree from the proposals of several drafters: the paths that the target will most likely follow.

    Look-ups and trained drafters are right on different texts. How often each is right is counted while they draft, so
    a source that is often wrong gets fewer nodes, and one that gains less than its time costs is skipped in most
    rounds. Drafts therefore depend on measured times; the output does not.

    Args:
        sources: at least two drafters for the same target. Drafters that run the target's own layers, or draft while it
            verifies (SpecBound, SpecBranch), are not supported.
        drafting_options: of `MergedOptions`.

    Raises:
        TypeError: a source is not a drafter.
        ValueError: there are fewer than two, one occurs twice or cannot be merged, or an option is out of range.

    Examples:
        >>> from hf_specdec.methods.lookup import NGramDrafter, SuffixDrafter
        >>> merged = MergedDrafter(SuffixDrafter(tree_budget=8), NGramDrafter())
        >>> merged.names, merged.options.tree_budget
        (('suffix', 'ngram'), 8)
    """

    options_class = MergedOptions
    options: MergedOptions

    def __init__(self, *sources: Drafter, **drafting_options: Any) -> None:
        for source in sources:
            check_is_drafter(source)
        if len(sources) < 2 or len(set(map(id, sources))) < len(sources):
            raise ValueError(f"{len(set(map(id, sources)))} drafters were given; a merged drafter needs two or more.")
        for source in sources:
            if not source.mergeable:
                raise ValueError(
                    f"A drafter of method {source.method!r} cannot be merged: it runs layers of the target, drafts "
                    "while the target verifies, or is merged itself. Leave it out, or pass it to generate alone."
                )
        self.sources = sources
        budget = getattr(sources[0].options, "tree_budget", None)
        self.options = self.options_class(**({} if budget is None else {"tree_budget": budget}))
        self.set_options(**drafting_options)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sources: their methods, numbered if several are equal."""
        methods = [source.method for source in self.sources]
        return tuple(
            f"{method} {methods[: index + 1].count(method)}" if methods.count(method) > 1 else method
            for index, method in enumerate(methods)
        )

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        return tuple(network for source in self.sources for network in source.networks)

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return MergedGenerator(self, target)


register(
    "merged",
    MergedDrafter,
    origin="drafters",
    serving=Serving(
        not_exported="vLLM runs one drafter at a time; export the merged drafters that it supports one by one"
    ),
)
