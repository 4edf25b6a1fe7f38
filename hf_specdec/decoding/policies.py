"""Policies: how much of each tree is verified, and whether a round drafts.

`DraftingPolicy` drafts and verifies all that the caller of `generate` allows. `AutoBudget` compares the expected tokens
of a tree with its time. Drafters with path probabilities return the nodes sorted by them, and the first n nodes are
verified, for the n with the most tokens per second:

    n = argmax (1 + expected accepted nodes among the first n) / seconds(n)

Seconds are measured on the rounds themselves. The drafter's probabilities are calibrated by how often drafts with such
a probability were accepted recently. If even the best n gives fewer tokens per second than rounds without a draft,
drafting is disabled for some rounds and then tried again (`Pauses`). All of this is kept for later calls. Every choice
affects only the speed: any part of a tree is a tree, and the target decides as always.
Verifying the likeliest prefixes is DDTree, arXiv 2604.12989, Proposition 2; the comparison with time is our own.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_specdec.decoding.devices import ToHost, abilities
from hf_specdec.decoding.exchange import GREEDY, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.observers import Observer, Round
from hf_specdec.decoding.speed.cuda_graphs import DRAFT_SIZES, draft_size
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.tree import DraftTree

MOST_NODES = 64  # upper limit of "auto"
FIRST_SIZES = (4, 0, 4, 0, 16)  # drafted nodes of the first rounds, to measure how the time depends on them
COSTLY = 3.0  # the last of them is left out if such a round may take more than this many plain ones
COSTLY_TRIAL = 2.0  # in plain rounds: with small drafts costlier than this, a new call does not begin with a trial
EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)  # nats


class RoundTimes:
    """Seconds of a round by its number of drafted nodes: a line fitted to the medians of recent measurements.

    Attributes:
        line: seconds of a round without drafted nodes, and of each further node; 0 before one was measured.
    """

    def __init__(self) -> None:
        self._skipped: deque[float] = deque(maxlen=9)
        self._drafted: dict[int, deque[tuple[int, float]]] = {}
        self._points: dict[int, tuple[float, float, int]] = {}  # by bucket: mean nodes, median seconds, rounds
        self.line = (0.0, 0.0)

    def note(self, nodes: int, seconds: float) -> None:
        """Records a measured round; 0 nodes means that nothing was drafted."""
        if nodes == 0:
            self._skipped.append(seconds)
        else:
            seen = self._drafted.setdefault(draft_size(nodes), deque(maxlen=9))
            seen.append((nodes, seconds))
            median, count = sorted(seconds for _, seconds in seen)[(len(seen) - 1) // 2], len(seen)
            self._points[draft_size(nodes)] = (sum(nodes for nodes, _ in seen) / count, median, count)
        if len(self._points) == 1 or (nodes and self._points):  # several points do not depend on skipped rounds
            self.line = self._fit()

    @property
    def skipped(self) -> float | None:
        """Seconds of a round without a draft; None before one was measured."""
        # The lower median, because the first rounds of a process are slow.
        return statistics.median_low(self._skipped) if self._skipped else None

    def of(self, nodes: int) -> float:
        """Seconds of a round with `nodes` drafted nodes."""
        start, slope = self.line
        return start + slope * nodes

    def _fit(self) -> tuple[float, float]:
        points = list(self._points.values())
        if len(points) == 1 and self.skipped is not None:  # too steep, since this point has no time of a draft
            points.append((0, self.skipped, points[0][2]))
        weight = sum(count for _, _, count in points)
        mean_nodes = sum(nodes * count for nodes, _, count in points) / weight
        mean_s = sum(seconds * count for _, seconds, count in points) / weight
        spread = sum(count * (nodes - mean_nodes) ** 2 for nodes, _, count in points)
        joint = sum(count * (nodes - mean_nodes) * (seconds - mean_s) for nodes, seconds, count in points)
        slope = max(0.0, joint / spread) if spread else 0.0
        # The line must start above 0: otherwise a measurement was disturbed.
        slope = min(slope, mean_s / (mean_nodes + 1))
        return mean_s - slope * mean_nodes, slope


class AcceptanceCalibration:
    """How often drafts of a given probability are accepted, from recent rounds.

    A node counts as accepted with its whole path. Without observations, the drafter's probability is used.
    """

    PRIOR = 4.0  # number of observations that the drafter's probability counts as
    DECAY = 0.98  # per round

    def __init__(self) -> None:
        self._accepted = [0.0] * (len(EDGES) + 1)
        self._drafted = [0.0] * (len(EDGES) + 1)

    def note(self, logprobs: Sequence[float], accepted: set[int]) -> None:
        """Records a verified tree: log-probabilities of its drafted nodes, and which of them were accepted."""
        self._accepted = [self.DECAY * count for count in self._accepted]
        self._drafted = [self.DECAY * count for count in self._drafted]
        for node, logprob in enumerate(logprobs):
            if logprob > -math.inf:
                index = bisect.bisect_right(EDGES, -logprob)
                self._drafted[index] += 1
                self._accepted[index] += node in accepted

    def probabilities(self, logprobs: Sequence[float]) -> list[float]:
        """The probabilities that nodes with these path log-probabilities are accepted. Runs in every round."""
        accepted, drafted, prior, lowest = self._accepted, self._drafted, self.PRIOR, -math.inf
        bin_of, exp = bisect.bisect_right, math.exp  # local names, because the loop is hot
        found = []
        for logprob in logprobs:
            if logprob > lowest:
                index = bin_of(EDGES, -logprob)
                stated = prior * exp(logprob) if logprob < 0.0 else prior
                found.append((accepted[index] + stated) / (drafted[index] + prior))
            else:
                found.append(0.0)
        return found


class Pauses:
    """Whether drafting pays: which of the rounds of all calls with one target draft.

    The tokens and seconds of recent drafted rounds are compared with rounds without a draft. Where those would have
    written more, drafting pauses, each time for twice as long; a longer run of drafted rounds ends the doubling. What
    drafting saves is added to a balance, in rounds without a draft. A negative balance begins a pause, and prolongs it:
    each round of it adds `MAY_LOSE`, which therefore is the share of the time that trying again costs.
    """

    FIRST_PAUSE, LONGEST_PAUSE = 4, 128  # rounds
    # Decay per drafted round, of tokens and seconds. Acceptance fluctuates over tens of rounds: with a shorter memory,
    # drafting would be disabled and enabled with each fluctuation, and always too late.
    MEMORY = 0.98
    CREDIT, CREDIT_AFTER_PAUSE, CREDITED_GAIN = 10.0, 3.0, 1.2  # assumed rounds, and their gain, before measured ones
    MAY_LOSE = 0.02
    FIRST_BALANCE, LARGEST_BALANCE = 2.0, 5.0  # the least is the largest with a minus
    RESERVE = 1.0  # below 0, so that a single rejected draft after a pause does not begin the next one

    def __init__(self) -> None:
        # Catching up: the next draft reads text that no draft has read.
        self.drafting, self.probing, self.catching_up = True, False, True
        self._balance = self.FIRST_BALANCE
        self._pause, self._rounds_left = self.FIRST_PAUSE, 0
        self._since_skipped = self._num_consecutive = 0
        self._tokens = self._seconds = 0.0
        self._credit = self.CREDIT

    def begin_call(self, is_costly: bool) -> None:
        """A new text may be of another kind: drafting is tried again at once, unless its rounds are costly."""
        self.catching_up = True
        if not is_costly:
            self._balance = max(self._balance, 0.0)
            if not self.drafting:
                self.probing = True
                self.resume()

    def note_skipped(self) -> None:
        """Records a round without a draft."""
        self._save(self.MAY_LOSE)
        self._since_skipped = 0
        self._rounds_left -= 1
        if not self.drafting and self._rounds_left <= 0 and self._balance >= 0:
            self.resume()

    def note_drafted(self, tokens: float, seconds: float, skipped: float) -> None:
        """Records a round that drafted, and decides whether the next one does.

        Rounds that were launched before a pause and read within it count for nothing.

        Args:
            tokens: that it wrote, per row.
            seconds: that it took.
            skipped: seconds of a round without a draft.
        """
        if not self.drafting:
            return
        self._save(tokens - seconds / skipped)
        self._tokens = self.MEMORY * self._tokens + tokens
        self._seconds = self.MEMORY * self._seconds + seconds
        self._credit *= self.MEMORY
        self._num_consecutive += 1
        self._since_skipped += 1
        self.probing = False
        gain = (self._tokens + self.CREDITED_GAIN * self._credit) * skipped / (self._seconds + self._credit * skipped)
        if gain < 1 or self._balance < -self.RESERVE:
            self._pause_for(self._pause)
            self._pause = min(2 * self._pause, self.LONGEST_PAUSE)
            self.probing = True
        elif self._num_consecutive >= 8:
            self._pause = self.FIRST_PAUSE
            if gain < 1.3 and self._since_skipped >= 32:
                self._pause_for(1)  # to measure a round without a draft again

    def note_first(self, rounds: Sequence[tuple[float, float]], skipped: float) -> None:
        """Records the tokens and seconds of the first drafted rounds, of which only the fastest was not disturbed."""
        fastest = min(seconds for _, seconds in rounds)
        self._save(sum(tokens - fastest / skipped for tokens, _ in rounds))
        if self._balance < -self.RESERVE:
            self._pause_for(self._pause)
            self.probing = True

    def resume(self) -> None:
        """Enables drafting for the next round."""
        self.drafting = self.catching_up = True
        if self.probing:
            # Measurements before the pause do not count any more, and a single rejected draft must not decide.
            self._tokens = self._seconds = 0.0
            self._credit, self._num_consecutive = self.CREDIT_AFTER_PAUSE, 0

    def _save(self, rounds: float) -> None:
        self._balance = max(-self.LARGEST_BALANCE, min(self.LARGEST_BALANCE, self._balance + rounds))

    def _pause_for(self, rounds: int) -> None:
        self.drafting, self._rounds_left = False, rounds


class BudgetKnowledge:
    """What calls with one target and one number of rows have measured, shared with later calls."""

    def __init__(self) -> None:
        self.times = RoundTimes()
        self.calibration = AcceptanceCalibration()
        self.pauses = Pauses()
        self.sizes_to_try = list(FIRST_SIZES)
        self._first: list[tuple[float, float]] = []  # tokens and seconds of the first drafted rounds
        # Running mean of the acceptance probability of the first, second, ... node of a row.
        self.curve: list[float] = []
        # Sizes of recent trees after the cut; doubled if the tree was not cut.
        self.recent: deque[int] = deque([FIRST_SIZES[-1]], maxlen=8)

    def begin_call(self) -> None:
        """Decides whether the first rounds of a call draft."""
        least = FIRST_SIZES[0]
        self.pauses.begin_call(is_costly=self.times.of(least) > COSTLY_TRIAL * (self.times.skipped or 0))

    @property
    def first_size(self) -> int | None:
        """Drafted nodes of the next round if it is one of the first, for measurement; None for later ones."""
        return self.sizes_to_try[0] if self.sizes_to_try else None

    def note_round(self, nodes: int, tokens: float | None, seconds: float) -> None:
        """Records a finished round, and decides whether the next one drafts.

        Args:
            nodes: drafted; 0 for a round without a draft.
            tokens: written, per row; None if no row was active.
            seconds: that it took.
        """
        if nodes and self.pauses.catching_up and not self.sizes_to_try:
            # The first draft of a call, or after a pause, also reads the text before it. If that counted, drafters that
            # read it slowly would hardly draft again: each pause makes the next trial slower.
            seconds = min(seconds, self.times.of(max(nodes, FIRST_SIZES[0])))
        else:
            self.times.note(nodes, seconds)
        self.pauses.catching_up = self.pauses.catching_up and not nodes
        skipped, tried = self.times.skipped, bool(self.sizes_to_try)
        if not nodes:
            self.pauses.note_skipped()
        del self.sizes_to_try[:1]
        if skipped is None:
            # Calls in several threads may have left it out.
            self.sizes_to_try = self.sizes_to_try or [0]
        elif not tried and nodes and tokens is not None:
            self.pauses.note_drafted(tokens, seconds, skipped)
        if not tried:
            return
        if nodes and tokens is not None and self.sizes_to_try:
            self._first.append((tokens, seconds))
        if len(self.sizes_to_try) == 1 and self._first and skipped is not None:
            self.pauses.note_first(self._first, skipped)
            if self.times.of(self.sizes_to_try[0]) > COSTLY * skipped:
                self.sizes_to_try = []

    def note_curve(self, probabilities: list[float]) -> None:
        """Records the acceptance probabilities of one row's nodes, in order."""
        self.curve += probabilities[len(self.curve) :]
        for index in range(len(self.curve)):
            new = probabilities[index] if index < len(probabilities) else 0.0
            self.curve[index] += 0.1 * (new - self.curve[index])


class DraftingPolicy(Observer):
    """Drafts in every round, and has the complete tree verified, as far as settings of the call allow.

    Args:
        most_tokens: drafted nodes of a round; None for no limit.

    Attributes:
        least_prob: as `DraftContext.least_prob`.
    """

    def __init__(self, most_tokens: int | None = None) -> None:
        self.most_tokens = most_tokens
        self.least_prob: float | None = None

    def restrict(self, most_tokens: int | None, least_prob: float | None) -> DraftingPolicy:
        """Sets `least_prob`, and lowers the limit of drafted nodes; returns the policy."""
        limits = [limit for limit in (self.most_tokens, most_tokens) if limit is not None]
        self.most_tokens, self.least_prob = min(limits, default=None), least_prob
        return self

    def draft(self, generator: TreeCandidateGenerator, context: DraftContext) -> DraftTree:
        """The tree of the next round."""
        if self.most_tokens is None and self.least_prob is None:
            return self.choose(generator, context)
        tree = self.choose(generator, replace(context, node_limit=self.most_tokens, least_prob=self.least_prob))
        if self.least_prob is not None and tree.num_nodes > 1:
            tree = self._up_to_uncertain(tree, generator, self.least_prob)
        return tree if self.most_tokens is None else tree.first_nodes(self.most_tokens)

    def choose(self, generator: TreeCandidateGenerator, context: DraftContext) -> DraftTree:
        """The tree of the next round, where settings of the call do not matter."""
        return generator.draft(context)

    def learn(self, tree: DraftTree, path: Tensor, num_accepted: list[int]) -> None:
        """Records the result of the earliest tree that has none yet, one or two rounds late where the host reads late.

        Args:
            tree: that was verified; only a root if nothing was drafted.
            path: [batch, steps] int64, accepted nodes in order, root first.
            num_accepted: accepted drafted nodes per row; -1 for inactive rows.
        """

    def rows_dropped(self) -> None:
        """Called when rows are dropped."""

    def exclude(self, seconds: float) -> None:
        """Called with a time since the latest draft that is not a part of its round."""

    def end_round(self) -> None:
        """Called when the latest round has ended, before another policy decides on the next ones."""

    def _up_to_uncertain(self, tree: DraftTree, generator: TreeCandidateGenerator, least_prob: float) -> DraftTree:
        """Whether a node is dropped depends on its ancestors only, so sampled drafts keep their distributions."""
        if tree.draft_probs is not None:
            chosen = tree.draft_probs.gather(-1, tree.token_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            probs: Tensor | None = nn.functional.pad(chosen, (1, 0), value=1.0)
        else:
            notes = generator.describe(tree)
            probs = None if notes is None else notes.probs
        if probs is None:
            warnings.warn(
                f"assistant_confidence_threshold={least_prob} was passed, but this drafter states no probability of "
                "its tokens: the setting has no effect. Leave it out.",
                stacklevel=2,
            )
            self.least_prob = None
            return tree
        uncertain = probs.to(tree.valid.device) < least_prob
        uncertain[:, 0] = False
        tree = tree.without_descendants(uncertain)
        if not abilities(tree.valid.device).host_memory:  # finding the last valid node would need a sync
            return tree
        return tree.first_nodes(int(tree.valid.nonzero()[:, 1].max()))


class AutoBudget(DraftingPolicy):
    """Chooses the size of every tree of one `generate` call.

    Rounds may be read one or two rounds late. The time between two drafts is that of the round that was read between
    them, since on a device that works ahead the host waits there for the end of that round.

    Args:
        knowledge: of earlier calls; this call adds to it.
        stats: of the call.
    """

    def __init__(self, knowledge: BudgetKnowledge, stats: SpeculationStats) -> None:
        super().__init__()
        self.knowledge, self.stats = knowledge, stats
        knowledge.begin_call()
        self._late: deque[tuple[ToHost, int, list[int]]] = deque()  # on their way to the host: see `_calibrate`
        self._fewer_rows = False
        self._began = 0.0  # of the latest draft
        self._decisions: deque[bool] = deque()  # whether the rounds drafted that are not read yet
        self._read: list[tuple[DraftTree, Tensor, list[int], bool]] = []  # rounds since the latest draft

    @property
    def drafting(self) -> bool:
        """Whether the next round drafts."""
        return self.knowledge.pauses.drafting and self.knowledge.first_size != 0

    def choose(self, generator: TreeCandidateGenerator, context: DraftContext) -> DraftTree:
        self.end_round()
        if self._fewer_rows:  # a smaller batch has other times: try drafting
            self.knowledge.pauses.resume()
        self._began, self._fewer_rows = time.perf_counter(), False
        self._decisions.append(drafting := self.drafting)
        if not drafting:
            self.stats.num_undrafted_steps += sum(context.active)
            return DraftTree.root_only(context.root_ids)
        self.stats.num_probe_steps += sum(context.active) if self.knowledge.pauses.probing else 0
        # Drafts that are drawn are coupled with the target's choice, so that a sampled text would depend on times.
        limited = replace(context, choice=GREEDY, node_limit=context.at_most(self.node_limit))
        return self.cut(generator.draft(limited), context.active)

    def on_round(self, step: Round) -> None:
        self.learn(step.tree, step.verdict.path, [len(tokens) - 1 for tokens in step.host.tokens])

    def learn(self, tree: DraftTree, path: Tensor, num_accepted: list[int]) -> None:
        self._read.append((tree, path, num_accepted, self._decisions.popleft()))

    def rows_dropped(self) -> None:
        self._fewer_rows = True

    def exclude(self, seconds: float) -> None:
        self._began += seconds

    def end_round(self) -> None:
        if len(self._read) == 1:  # of several, the time of each is unknown
            self.note(*self._read[0], time.perf_counter() - self._began)
        self._read = []

    @property
    def node_limit(self) -> int:
        """Most nodes that can be useful in the next round, for drafters in host memory."""
        return self.knowledge.first_size or min(MOST_NODES, max(8, max(self.knowledge.recent) + 2))

    def cut(self, tree: DraftTree, active: list[bool]) -> DraftTree:
        """The part of `tree` with the most tokens per second; all of it without path probabilities."""
        most = min(tree.num_nodes - 1, self.node_limit)
        if tree.path_logprobs is None or not most:
            return tree
        if self.knowledge.first_size is not None:
            return tree.first_nodes(most)
        if not abilities(tree.path_logprobs.device).host_memory:
            # Reading the tree's probabilities would need a sync: use the mean of recent rounds.
            gains = self.knowledge.curve[:most]
            sizes: Sequence[int] = [size for size in DRAFT_SIZES if 0 < size <= len(gains)] or [most]
        else:
            probabilities = self.knowledge.calibration.probabilities
            logprobs = zip(tree.path_logprobs.tolist(), active, strict=True)
            rows = [probabilities(row[1 : 1 + most]) for row, is_active in logprobs if is_active]
            gains = rows[0]
            if len(rows) > 1:
                gains = [sum(column) / len(rows) for column in itertools.zip_longest(*rows, fillvalue=0.0)]
            sizes = range(1, len(gains) + 1)
        size = self.best_size(gains, sizes)
        # If all nodes are used, a larger tree might be better.
        self.knowledge.recent.append(size if size < most else 2 * size)
        return tree.first_nodes(size)

    def best_size(self, gains: list[float], sizes: Sequence[int]) -> int:
        """The one of `sizes` with the most tokens per second; `gains` are the acceptance probabilities in order."""
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

    def note(self, tree: DraftTree, path: Tensor, num_accepted: list[int], drafted: bool, seconds: float) -> None:
        """Records a finished round, whether it was to draft, and its seconds; decides whether the next one drafts."""
        nodes = tree.num_nodes - 1
        if drafted:
            if not nodes:
                return  # a look-up without a match: neither a draft nor a skipped round
            self._calibrate(tree, path, num_accepted)
        accepted = [count for count in num_accepted if count >= 0]
        self.knowledge.note_round(nodes, 1 + sum(accepted) / len(accepted) if accepted else None, seconds)

    def _calibrate(self, tree: DraftTree, path: Tensor, num_accepted: list[int]) -> None:
        """Updates the calibration, from device tensors once their copies have arrived: nothing waits for them."""
        if tree.path_logprobs is None:
            return
        learns_curve = not abilities(tree.path_logprobs.device).host_memory
        both = torch.cat([tree.path_logprobs, path.to(tree.path_logprobs)], 1)
        self._late.append((ToHost(both), tree.num_nodes, num_accepted))
        calibration = self.knowledge.calibration
        while self._late and self._late[0][0].has_arrived:
            copy, num_nodes, counts = self._late.popleft()
            for row, count in zip(copy.tolist(), counts, strict=True):
                if count >= 0:
                    nodes = row[num_nodes:]
                    calibration.note(row[1:num_nodes], {int(node) - 1 for node in nodes[1 : 1 + count]})
                    if learns_curve:
                        self.knowledge.note_curve(calibration.probabilities(row[1:num_nodes]))
