"""Policies that decide when to update a serving drafter, and which part of it.

Python over numbers, without tensors and clocks, so that every rule is tested with sequences computed by hand. A query
is one `generate` call. Its signal (Eq. 8) is computed in `adaptive_drafter.py`; updates are made in `learner.py`.
Source: SpecBlock, Section 3.4, Appendix A.3 and Algorithm 1; `AlwaysUpdate` is its baseline, Online Speculative
Decoding (Appendix A.4).
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Action = Literal["skip", "head", "full"]
UPDATES: tuple[Action, ...] = ("head", "full")


@dataclass(frozen=True)
class QueryResult:
    """Measurements of a query.

    Attributes:
        signal: Eq. 8, summed over the rejected positions of the query.
        num_tokens: tokens written, summed over rows.
        num_rounds: rounds, summed over rows.
        num_accepted: accepted drafted tokens, summed over rows.
        seconds: of the call.
    """

    signal: float
    num_tokens: int
    num_rounds: int
    num_accepted: int
    seconds: float


class Policy(ABC):
    """Decides after every query; its state covers all calls of an adaptation.

    Attributes:
        buffer_queries: number of queries in an action's buffer that triggers an update.
    """

    buffer_queries: int

    @abstractmethod
    def decide(self, query: QueryResult) -> Action:
        """Called after every query; returns the buffer to add it to, or `"skip"`."""

    def may_update(self) -> bool:
        """Whether a full buffer may trigger an update now."""
        return True

    def updated(self, action: Action, query: QueryResult) -> None:
        """Called when `query` has triggered an update."""

    def brought(self, waited_s: float) -> None:
        """Called when the last update's weights are in use; `waited_s`: seconds that queries had to wait for it."""

    def reset(self) -> None:
        """Called after a revert of the drafter; resets the estimates of updates."""


@dataclass
class AlwaysUpdate(Policy):
    """A full update every `buffer_queries` queries: the baseline (Online Speculative Decoding, A.4).

    Attributes:
        buffer_queries: queries between updates.
    """

    buffer_queries: int = 8

    def __post_init__(self) -> None:
        check_at_least(1, buffer_queries=self.buffer_queries)

    def decide(self, query: QueryResult) -> Action:
        return "full"


@dataclass
class _Interval:
    """An update whose reward is being measured."""

    action: Action
    signal: float
    num_tokens: int = 0
    seconds: float = 0.0
    queries: int = 0
    serves: bool = False


@dataclass
class CostAwareBandit(Policy):
    """Updates the heads, the whole drafter, or nothing, by the estimated value of each kind of update.

    A warm-up measures the throughput without updates. A cold start of `cold_start_events` updates then initialises the
    two value estimates: it first takes an action without a measurement, then the better one, and with a probability
    that decreases linearly from `epsilon[0]` to `epsilon[1]` a random one. After that, the predicted gain of an action
    is signal times value (Eq. 9): the action with the larger gain is taken, or none if no gain is positive. The
    `interval` queries after an update are compared with the warm-up. The gain in tokens per second, divided by the
    signal that triggered the update, updates the value by Eq. 10; the first gain is the initial value. An update slows
    down the queries during which it runs, and queries may wait for it, so values include the costs.

    The paper does not specify the length of an interval, the size of a buffer, and whether a cold start may skip. Here
    it may not, because values start at 0 and nothing would be measured. An interval ends after its update at the
    earliest: otherwise a slow update would be rewarded before it had an effect.

    One departure from the paper. The speed of queries varies by more than an update gains, and when both values are
    negative there are no further measurements, so a few slow queries by chance would end all updates. Therefore updates
    are skipped only if the better value is negative by more than `num_sigmas` standard errors; 0 gives the paper's
    rule.

    Attributes:
        buffer_queries: queries in a buffer that trigger an update.
        warmup_queries: queries before the first update.
        cold_start_events: updates of the cold start.
        epsilon: probability of a random action at the first and the last of them.
        cooldown_queries: queries after an update that cannot trigger another one.
        interval: queries over which an update's reward is measured, N in Algorithm 1.
        alpha: weight of a new reward in Eq. 10.
        min_signal: s_min; rewards of updates with a smaller signal, or with signal 0, are ignored.
        num_sigmas: standard errors by which a value must be negative to skip updates.
        seed: of the exploration.
        values: gain in tokens per second per unit of signal, by action.
        baseline: tokens per second of the warm-up; None during the warm-up.
        num_events: updates so far.
    """

    buffer_queries: int = 2
    warmup_queries: int = 10
    cold_start_events: int = 8
    epsilon: tuple[float, float] = (0.30, 0.10)
    cooldown_queries: int = 2
    interval: int = 4
    alpha: float = 0.10
    min_signal: float = 5.0
    num_sigmas: float = 2.0
    seed: int = 0
    values: dict[Action, float] = field(default_factory=lambda: dict.fromkeys(UPDATES, 0.0), init=False)
    baseline: float | None = field(default=None, init=False)
    num_events: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_at_least(1, buffer_queries=self.buffer_queries, warmup_queries=self.warmup_queries)
        check_at_least(1, interval=self.interval)
        check_at_least(0, cold_start_events=self.cold_start_events, cooldown_queries=self.cooldown_queries)
        check_at_least(0, min_signal=self.min_signal, num_sigmas=self.num_sigmas)
        for name, value in (("alpha", self.alpha), ("epsilon", self.epsilon[0]), ("epsilon", self.epsilon[1])):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be between 0 and 1.")
        self._random = random.Random(self.seed)
        self._num_queries, self._blocked = 0, 0
        self._warm: list[QueryResult] = []
        self._baseline_error = 0.0
        self._measured: set[Action] = set()
        # Rewards with their signals; the weight of older ones is negligible.
        self._rewards: dict[Action, deque[tuple[float, float]]] = {action: deque(maxlen=64) for action in UPDATES}
        self._open: list[_Interval] = []

    def decide(self, query: QueryResult) -> Action:
        self._num_queries += 1
        if self.baseline is None:
            self._warm.append(query)
            if self._num_queries == self.warmup_queries:
                self.baseline, variance = _ratio_of_sums([(query.num_tokens, query.seconds) for query in self._warm])
                self._baseline_error = math.sqrt(variance)
            return "skip"
        self._blocked = max(0, self._blocked - 1)
        for interval in self._open:
            interval.num_tokens += query.num_tokens
            interval.seconds += query.seconds
            interval.queries += 1
        self._close_intervals()
        return self._choose(query.signal)

    def may_update(self) -> bool:
        return self._blocked == 0

    def updated(self, action: Action, query: QueryResult) -> None:
        self.num_events += 1
        self._blocked = self.cooldown_queries + 1  # `decide` decrements it before the next query
        self._open.append(_Interval(action, query.signal))

    def brought(self, waited_s: float) -> None:
        for interval in self._open:
            interval.seconds += waited_s
        if self._open:
            self._open[-1].serves = True
        self._close_intervals()

    def reset(self) -> None:
        self.values = dict.fromkeys(UPDATES, 0.0)
        self.num_events = 0  # a new cold start, because values of 0 would never trigger an update
        self._measured.clear()
        for rewards in self._rewards.values():
            rewards.clear()
        self._open.clear()

    @property
    def exploration(self) -> float:
        """The probability of a random action at the next event; 0 after the cold start."""
        if self.num_events >= self.cold_start_events:
            return 0.0
        first, last = self.epsilon
        return first + (last - first) * self.num_events / max(1, self.cold_start_events - 1)

    def _choose(self, signal: float) -> Action:
        if self.num_events < self.cold_start_events:
            if self._random.random() < self.exploration:
                return self._random.choice(UPDATES)
            tried = self._measured | {interval.action for interval in self._open}
            unmeasured = [action for action in UPDATES if action not in tried]
            return unmeasured[0] if unmeasured else self._best()
        best = self._best()
        return best if signal * (self.values[best] + self.num_sigmas * self.standard_error(best)) > 0 else "skip"

    def standard_error(self, action: Action) -> float:
        """Standard error of a value, from the variance of its rewards and of the warm-up, which they share.

        Infinite with fewer than two rewards.
        """
        if len(self._rewards[action]) < 2:
            return math.inf if self.num_sigmas else 0.0
        rewards, signals = zip(*self._rewards[action], strict=True)
        weights = [self.alpha * (1 - self.alpha) ** age for age in reversed(range(len(rewards)))]
        weights[0] /= self.alpha
        shared = sum(weight / signal for weight, signal in zip(weights, signals, strict=True))
        return math.hypot(statistics.stdev(rewards) * math.hypot(*weights), self._baseline_error * shared)

    def _best(self) -> Action:
        return max(UPDATES, key=lambda action: self.values[action])  # the cheaper one if both are equal

    def _close_intervals(self) -> None:
        still_open = []
        for interval in self._open:
            if interval.serves and interval.queries >= self.interval:
                self._reward(interval)
            else:
                still_open.append(interval)
        self._open = still_open

    def _reward(self, interval: _Interval) -> None:
        """Eq. 10."""
        self._measured.add(interval.action)
        if interval.signal == 0 or interval.signal < self.min_signal:  # a signal of 0 cannot be divided by
            return
        assert self.baseline is not None
        reward = (interval.num_tokens / interval.seconds - self.baseline) / interval.signal
        earlier = self._rewards[interval.action]
        # The first reward is the initial value; an average starting at 0 would be biased towards 0.
        share = self.alpha if earlier else 1.0
        self.values[interval.action] = (1 - share) * self.values[interval.action] + share * reward
        earlier.append((reward, interval.signal))


@dataclass
class FailSafe:
    """Monitors the acceptance length over windows of queries (Section 3.4: "monotonically across all three").

    Two departures from the paper. Texts differ in how well they can be drafted: the lengths of three windows decrease
    monotonically by chance in one of six cases, and each time all updates would be lost. Therefore the decrease must
    also exceed `num_sigmas` standard errors. And a decrease that has stopped, for example because the bandit stopped
    harmful updates, is not monotone: therefore the mean of the last windows is also compared with that of any
    consecutive earlier ones, with the same threshold.

    Attributes:
        window_queries: queries of a window.
        num_windows: number of consecutive decreasing windows that causes a revert.
        num_sigmas: smaller decreases, in standard errors, are ignored; 0 counts every decrease.
        lengths: mean acceptance length of the latest windows, at most `MEMORY` times `num_windows`.
    """

    MEMORY: ClassVar[int] = 3

    window_queries: int = 20
    num_windows: int = 3
    num_sigmas: float = 2.5
    lengths: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_at_least(1, window_queries=self.window_queries)
        check_at_least(2, num_windows=self.num_windows)
        check_at_least(0, num_sigmas=self.num_sigmas)
        self._queries: list[tuple[int, int]] = []  # accepted tokens and rounds, of the window
        self._variances: list[float] = []  # of `lengths`

    def observe(self, query: QueryResult) -> Literal["good", "bad"] | None:
        """The verdict on the weights if this query completes a window; None if it does not, or if there is no verdict.

        "bad": the last `num_windows` windows decrease monotonically, or their mean is below that of earlier ones, by
        more than `num_sigmas` standard errors. "good": this window is the best of the last `num_windows`, and not below
        the best of `lengths` by more than `num_sigmas` standard errors: after an abrupt decrease the last windows may
        be equal. Windows are dropped after `MEMORY` times `num_windows`, so that an exceptional one does not prevent
        "good" for ever.
        """
        self._queries.append((query.num_accepted, query.num_rounds))
        if len(self._queries) < self.window_queries or not any(rounds for _, rounds in self._queries):
            return None
        mean, variance = _ratio_of_sums(self._queries)
        self._queries = []
        size = self.MEMORY * self.num_windows
        self.lengths = [*self.lengths, 1 + mean][-size:]
        self._variances = [*self._variances, variance][-size:]
        if self._decreases() or self._is_below_earlier():
            self.lengths, self._variances = [], []
            return "bad"
        return "good" if self._is_good() else None

    def _is_good(self) -> bool:
        now, variance = self.lengths[-1], self._variances[-1]
        best, variance_of_best = max(zip(self.lengths, self._variances, strict=True))
        fallen = best - now > self.num_sigmas * math.sqrt(variance_of_best + variance)
        return now == max(self.lengths[-self.num_windows :]) and not fallen

    def _decreases(self) -> bool:
        last = self.lengths[-self.num_windows :]
        steps = itertools.pairwise(last)
        if len(last) < self.num_windows or not all(later < earlier for earlier, later in steps):
            return False
        return last[0] - last[-1] > self.num_sigmas * math.sqrt(self._variances[-len(last)] + self._variances[-1])

    def _is_below_earlier(self) -> bool:
        count = self.num_windows
        now, variance = statistics.fmean(self.lengths[-count:]), sum(self._variances[-count:])
        for first in range(len(self.lengths) - 2 * count + 1):
            before = slice(first, first + count)
            threshold = self.num_sigmas * math.sqrt(variance + sum(self._variances[before])) / count
            if statistics.fmean(self.lengths[before]) - now > threshold:
                return True
        return False


def _ratio_of_sums(queries: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The sum of the first numbers over that of the second ones, and its variance; 0 for one query."""
    total = sum(count for _, count in queries)
    ratio = sum(value for value, _ in queries) / total
    spread = sum((value - ratio * count) ** 2 for value, count in queries) if len(queries) > 1 else 0.0
    return ratio, spread / total**2 * len(queries) / max(1, len(queries) - 1)


def check_at_least(least: float, **values: float) -> None:
    """Raises ValueError, with its name, if one of the values is less than `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}={value!r} must be at least {least}.")
