"""Policies: how much of each tree is verified, and whether a round drafts at all.

`Always` drafts and verifies everything. `AutoBudget` weighs what a tree may gain against its time. A drafter that says
how likely it holds each path hands over its nodes in that order. Of these the first n are verified that make the most
of the round's time:

    n = argmax (1 + expected accepted nodes among the first n) / seconds(n)

Seconds are measured on the rounds themselves. The drafter's probabilities are corrected by how often drafts of such a
probability were accepted lately. Where even the best n gives fewer tokens per second than rounds without a draft, the
call goes on without, and looks again now and then; the pauses double as long as that finds nothing. Every choice
concerns speed only: any part of a tree is a tree, and the target decides as ever.
Verifying the likeliest prefixes is DDTree, arXiv 2604.12989, Proposition 2; weighing them against time is ours.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.generator import DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.observers import Observer, Round
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.tree import DraftTree

MOST_NODES = 64  # what a drafter is asked for, where it is left to us
# Node counts that are measured together; trees in device memory are cut to these, so that shapes repeat.
BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FIRST_LOOKS = (64, 16, 4)  # nodes of the first rounds, so that the slope of the times is known
EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)  # nats


class RoundTimes:
    """Seconds of a round by its number of drafted nodes: a line through the medians of what was measured lately."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=9)
        self._drafted: dict[int, deque[tuple[int, float]]] = {}
        self._points: dict[int, tuple[float, float, int]] = {}  # by bucket: mean nodes, median seconds, rounds
        self._line: tuple[float, float] | None = None

    def note(self, nodes: int, seconds: float) -> None:
        """Takes a measured round; 0 nodes means that nothing was drafted."""
        if nodes == 0:
            self._plain.append(seconds)
            return
        bucket = bucket_of(nodes)
        seen = self._drafted.setdefault(bucket, deque(maxlen=9))
        seen.append((nodes, seconds))
        count = len(seen)
        median = sorted(seconds for _, seconds in seen)[(count - 1) // 2]
        self._points[bucket] = (sum(nodes for nodes, _ in seen) / count, median, count)
        self._line = None

    @property
    def plain(self) -> float | None:
        """Seconds of a round without a draft; None before one was measured."""
        # The lower median: a first call's warming up is no round like others.
        return statistics.median_low(self._plain) if self._plain else None

    @property
    def num_plain(self) -> int:
        """Rounds without a draft that are still remembered."""
        return len(self._plain)

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a round with no drafted node, and of each node more; needs one measured round."""
        if self._line is None:
            self._line = self._fit()
        return self._line

    def of(self, nodes: int) -> float:
        """Seconds of a round with `nodes` drafted nodes; needs one measured round."""
        start, slope = self.line
        return start + slope * nodes

    def _fit(self) -> tuple[float, float]:
        points = list(self._points.values())
        weight = sum(count for _, _, count in points)
        mean_nodes = sum(nodes * count for nodes, _, count in points) / weight
        mean_s = sum(seconds * count for _, seconds, count in points) / weight
        spread = sum(count * (nodes - mean_nodes) ** 2 for nodes, _, count in points)
        joint = sum(count * (nodes - mean_nodes) * (seconds - mean_s) for nodes, seconds, count in points)
        slope = max(0.0, joint / spread) if spread else 0.0
        # More nodes never take no time: a line that starts at or below 0 has met a disturbed measurement.
        slope = min(slope, mean_s / (mean_nodes + 1))
        return mean_s - slope * mean_nodes, slope


class Calibration:
    """How often drafts of a given probability are accepted, by what happened lately.

    A node counts as accepted with its whole path. Without observations the drafter is taken at its word.
    """

    PRIOR = 4.0  # observations that the drafter's own word is worth
    DECAY = 0.98  # per round

    def __init__(self) -> None:
        self._accepted = [0.0] * (len(EDGES) + 1)
        self._drafted = [0.0] * (len(EDGES) + 1)

    def note(self, logprobs: Sequence[float], accepted: set[int]) -> None:
        """Takes a verified tree: log-probabilities of its drafted nodes, and which of them were accepted."""
        self._accepted = [self.DECAY * count for count in self._accepted]
        self._drafted = [self.DECAY * count for count in self._drafted]
        for node, logprob in enumerate(logprobs):
            if logprob > -math.inf:
                place = bisect.bisect_right(EDGES, -logprob)
                self._drafted[place] += 1
                self._accepted[place] += node in accepted

    def probabilities(self, logprobs: Sequence[float]) -> list[float]:
        """That nodes of these path log-probabilities are accepted; asked in every round, so no calls in the loop."""
        accepted, drafted, prior, lowest = self._accepted, self._drafted, self.PRIOR, -math.inf
        place_of, exp = bisect.bisect_right, math.exp
        found = []
        for logprob in logprobs:
            if logprob > lowest:
                place = place_of(EDGES, -logprob)
                said = prior * exp(logprob) if logprob < 0.0 else prior
                found.append((accepted[place] + said) / (drafted[place] + prior))
            else:
                found.append(0.0)
        return found

    def probability(self, logprob: float) -> float:
        """That a node of this path log-probability is accepted."""
        return self.probabilities([logprob])[0]


class BudgetKnowledge:
    """What calls with one target and one number of rows have learned; later calls begin with it."""

    def __init__(self) -> None:
        self.times = RoundTimes()
        self.calibration = Calibration()
        self.rounds = 0
        # Mean over recent rounds of how likely the first, second, ... node of a row is accepted.
        self.curve: list[float] = []
        # Sizes that recent trees were cut to, or more where they could have been larger.
        self.recent: deque[int] = deque([MOST_NODES], maxlen=8)

    @property
    def first_look(self) -> int | None:
        """Nodes of the next round where that is one of the first, which are for measuring; None afterwards."""
        return FIRST_LOOKS[self.rounds % len(FIRST_LOOKS)] if self.rounds < 2 * len(FIRST_LOOKS) else None

    def note_curve(self, probabilities: list[float]) -> None:
        """Takes the acceptance probabilities of one row's nodes, in order."""
        self.curve += probabilities[len(self.curve) :]
        for place in range(len(self.curve)):
            new = probabilities[place] if place < len(probabilities) else 0.0
            self.curve[place] += 0.1 * (new - self.curve[place])


class Always(Observer):
    """Drafts in every round, and has all of the tree verified."""

    def draft(self, generator: TreeCandidateGenerator, context: DraftContext) -> DraftTree:
        """The tree of the next round."""
        return generator.draft(context)

    def learn(self, tree: DraftTree, path: Tensor, num_accepted: list[int]) -> None:
        """Takes what came of the latest tree.

        Args:
            tree: that was verified; a root alone where nothing was drafted.
            path: [batch, steps] int64, accepted nodes in order, root first.
            num_accepted: drafted nodes kept per row; -1 for rows that took no part.
        """

    def keep_rows(self) -> None:
        """Fewer rows are left."""


class AutoBudget(Always):
    """Chooses the size of every tree of one `generate` call.

    Args:
        knowledge: of earlier calls; this call adds to it.
        stats: of the call.

    Attributes:
        drafting: whether the next round drafts.
        probing: whether it does so only to find out if drafting pays again.
    """

    waits = True

    FIRST_PAUSE, LONGEST_PAUSE = 4, 128  # rounds
    # Per drafted round, of tokens and seconds. Acceptance goes up and down over tens of rounds: with less memory calls
    # rest in each trough, and are late for the next crest.
    MEMORY = 0.98
    CREDIT, CREDIT_AFTER_REST, CREDITED_GAIN = 10.0, 3.0, 1.2  # rounds, and their gain, given before it is judged

    def __init__(self, knowledge: BudgetKnowledge, stats: SpeculationStats) -> None:
        self.knowledge, self.stats = knowledge, stats
        self.drafting, self.probing = True, False
        self._pause, self._rest = self.FIRST_PAUSE, 0
        self._since_plain = 0
        self._tokens = self._seconds = 0.0
        self._credit = self.CREDIT
        self._kept_up = 0
        self._late: tuple[Tensor, Tensor, list[int]] | None = None
        self._fewer_rows = False
        self._began = 0.0  # of the latest round
        self._last: tuple[DraftTree, Tensor, list[int]] | None = None  # what came of it, when that was read

    def draft(self, generator: TreeCandidateGenerator, context: DraftContext) -> DraftTree:
        now = time.perf_counter()
        if self._last is not None:  # from drafting to what the drafter was told of it
            self.note(*self._last, now - self._began)
        if self._fewer_rows:  # a smaller batch is another matter: see whether drafting pays there
            self.resume()
        self._began, self._last, self._fewer_rows = now, None, False
        if not self.drafting:
            self.stats.num_undrafted_steps += sum(context.active)
            return DraftTree.root_only(context.root_ids)
        self.stats.num_probe_steps += sum(context.active) if self.probing else 0
        return self.cut(generator.draft(replace(context, node_limit=self.node_limit)), context.active)

    def on_round(self, each: Round) -> None:
        self.learn(each.tree, each.verdict.path, [len(tokens) - 1 for tokens in each.host.tokens])

    def learn(self, tree: DraftTree, path: Tensor, num_accepted: list[int]) -> None:
        self._last = tree, path, num_accepted

    def keep_rows(self) -> None:
        self._fewer_rows = True

    @property
    def node_limit(self) -> int:
        """Nodes that a drafter in host memory need not exceed in the next round."""
        return self.knowledge.first_look or min(MOST_NODES, max(8, max(self.knowledge.recent) + 2))

    def cut(self, tree: DraftTree, active: list[bool]) -> DraftTree:
        """The part of `tree` that is worth its time; all of it where the drafter does not say how likely it is."""
        most = tree.num_nodes - 1
        if tree.path_logprobs is None or not most:
            return tree
        if self.knowledge.first_look is not None:
            return tree.first_nodes(min(most, self.knowledge.first_look))
        if not abilities(tree.path_logprobs.device).host_memory:
            # What they are is not known in time, so the mean of recent rounds has to do.
            gains = self.knowledge.curve[:most]
            sizes: Sequence[int] = [size for size in BUCKETS if size <= len(gains)] or [most]
        else:
            probabilities = self.knowledge.calibration.probabilities
            logprobs = zip(tree.path_logprobs.tolist(), active, strict=True)
            rows = [probabilities(row[1:]) for row, going in logprobs if going]
            gains = rows[0]
            if len(rows) > 1:
                gains = [sum(column) / len(rows) for column in itertools.zip_longest(*rows, fillvalue=0.0)]
            sizes = range(1, len(gains) + 1)
        size = self.best_size(gains, sizes)
        # A tree that is worth all its nodes might have been worth more.
        self.knowledge.recent.append(size if size < most else 2 * size)
        return tree.first_nodes(size)

    def best_size(self, gains: list[float], sizes: Sequence[int]) -> int:
        """Of `sizes` the one with the most tokens per second; `gains` are the acceptance probabilities in order."""
        start, slope = self.knowledge.times.line
        best, best_rate, expected, counted = sizes[0], 0.0, 1.0, 0
        for size in sizes:
            while counted < size:
                expected += gains[counted]
                counted += 1
            rate = expected / (start + slope * size)
            if rate > best_rate:
                best, best_rate = size, rate
        return best

    def note(self, tree: DraftTree, path: Tensor, num_accepted: list[int], seconds: float) -> None:
        """Takes a finished round and its seconds, and decides whether the next one drafts."""
        drafted = self.drafting
        nodes = tree.num_nodes - 1 if drafted else 0
        if drafted and not nodes:
            return  # a look-up without a match: neither a draft nor a rest from drafting
        self.knowledge.times.note(nodes, seconds)
        if drafted:
            self._calibrate(tree, path, num_accepted)
            looked = self.knowledge.first_look is not None
            self.knowledge.rounds += 1
            self._since_plain += 1
            kept = [kept for kept in num_accepted if kept >= 0]
            if kept and not looked:  # those are of any size, and slow from warming up: not what drafting gains
                self._weigh(1 + sum(kept) / len(kept), seconds)
        else:
            self._since_plain = 0
            self._rest -= 1
            if self._rest <= 0:
                self.resume()

    def _calibrate(self, tree: DraftTree, path: Tensor, num_accepted: list[int]) -> None:
        """Calibrates; what lies in device memory is fetched without waiting, and read a round later."""
        if tree.path_logprobs is None:
            return
        learns_curve = not abilities(tree.path_logprobs.device).host_memory
        logprobs, paths, counts = tree.path_logprobs, path, num_accepted
        if learns_curve:
            late = self._late
            # The round's own sync comes after this copy, so the next time it has arrived.
            self._late = (logprobs.to("cpu", non_blocking=True), path.to("cpu", non_blocking=True), num_accepted)
            if late is None:
                return
            logprobs, paths, counts = late
        calibration = self.knowledge.calibration
        for row, walked, kept in zip(logprobs.tolist(), paths.tolist(), counts, strict=True):
            if kept >= 0:
                calibration.note(row[1:], {node - 1 for node in walked[1 : 1 + kept]})
                if learns_curve:
                    self.knowledge.note_curve(calibration.probabilities(row[1:]))

    def _weigh(self, tokens: float, seconds: float) -> None:
        """After a drafted round: goes on drafting, or rests."""
        self._tokens = self.MEMORY * self._tokens + tokens
        self._seconds = self.MEMORY * self._seconds + seconds
        self._credit *= self.MEMORY
        self._kept_up += 1
        self.probing = False
        plain = self.knowledge.times.plain
        if plain is None or self.knowledge.times.num_plain < 3:
            if self._kept_up >= 2:
                self._pause_for(3)  # to see what a round without a draft takes
            return
        gain = (self._tokens + self.CREDITED_GAIN * self._credit) * plain / (self._seconds + self._credit * plain)
        if gain < 1:
            self._pause_for(self._pause)
            self._pause = min(2 * self._pause, self.LONGEST_PAUSE)
            self.probing = True
        elif self._kept_up >= 8:
            self._pause = self.FIRST_PAUSE
            if gain < 1.3 and self._since_plain >= 32:
                self._pause_for(1)

    def _pause_for(self, rounds: int) -> None:
        self.drafting, self._rest = False, rounds

    def resume(self) -> None:
        """Drafts in the next round."""
        self.drafting = True
        if self.probing:
            # What was before the rest is forgotten; one miss is not yet a sign that nothing has changed.
            self._tokens = self._seconds = 0.0
            self._credit, self._kept_up = self.CREDIT_AFTER_REST, 0


def bucket_of(nodes: int) -> int:
    """The smallest of `BUCKETS` that holds `nodes`; the largest for more.

    Example:
        >>> bucket_of(5), bucket_of(16), bucket_of(5000)
        (6, 16, 1024)
    """
    return BUCKETS[min(bisect.bisect_left(BUCKETS, nodes), len(BUCKETS) - 1)]
