"""SharedRounds: rows of separate calls in one batch. Rows join and leave between rounds.

Each row is a `SpeculativeDecoding` of its own, with one prompt: its processors, criteria, noise, streamer and records
see this row only, and the prompt is run alone, without padding. Rounds share the target's forward over all trees and
the drafter's forwards. So a row's output is that of its own call, whoever shares the batch, and an error in code of the
user ends one row. The target and the generator of the first row serve the batch; those of the others give it their row
(`TargetModel.join`, `TreeCandidateGenerator.join`).

A row that has ended is computed no longer than until another takes its place, or the batch gets smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from hf_specdec.decoding.accept import Verdict
from hf_specdec.decoding.devices import inference_on_cpu
from hf_specdec.decoding.exchange import GREEDY, Committed, DraftContext
from hf_specdec.decoding.loop import SpeculativeDecoding
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.state import RoundState, with_rows
from hf_specdec.decoding.target import TargetOutput
from hf_specdec.decoding.tree import DraftTree, from_host

DROP_SHARE = 0.25  # of the batch: as many ended rows leave it together, because that copies all caches


class SharedRounds:
    """Rounds of rows that have begun (`SpeculativeDecoding.begin_row`).

    Args:
        first: the first rows.
        policy_of: the policy of rounds with so many rows.

    Attributes:
        rows: of the batch, those that have ended too.
        running: per row, whether it has not ended.
    """

    def __init__(self, first: Sequence[SpeculativeDecoding], policy_of: Callable[[int], DraftingPolicy]) -> None:
        own, *others = first
        self.rows, self.running, self.policy_of = [own], [True], policy_of
        self.lengths = [own.sequences.lengths[0]]  # tokens of each row, the root included
        self.target, self.generator, self.packed = own.target, own.generator, own.packed
        self.state: RoundState = own.state
        self.vocab_size, self.device = own.vocab_size, own.sequences.ids.device
        self.policy = policy_of(1)
        self.ended_at: float | None = None  # the latest round, by `time.perf_counter`
        self.contexts = ExitStack()
        self.contexts.enter_context(self.target.tapping())
        if others:
            self.join(others)

    @property
    def num_running(self) -> int:
        """Rows that have not ended."""
        return sum(self.running)

    @torch.no_grad()
    def join(self, new: Sequence[SpeculativeDecoding]) -> None:
        """Rows that have begun take the places of rows that have ended, and further ones."""
        free = [place for place, running in enumerate(self.running) if not running][: len(new)]
        places = free + [len(self.rows) + number for number in range(len(new) - len(free))]
        self.target.join([row.target for row in new], places)
        self.generator.join([row.generator for row in new], places)
        self.state = self.state.joined([row.state for row in new], places)
        order = with_rows(len(self.rows), places)
        self.rows = [[*self.rows, *new][row] for row in order]
        self.lengths = [[*self.lengths, *(row.sequences.lengths[0] for row in new)][row] for row in order]
        self.running = [[*self.running, *[True] * len(new)][row] for row in order]

    @torch.no_grad()
    def drop_ended(self) -> None:
        """Makes the batch smaller if many of its rows have ended; some must be left."""
        kept = [place for place, running in enumerate(self.running) if running]
        if len(self.rows) - len(kept) < DROP_SHARE * len(self.rows):
            return
        self.target.keep_rows(kept, permanent=True)
        self.generator.keep_rows(kept)
        self.state = self.state.of_rows(kept)
        self.rows, self.lengths = [self.rows[place] for place in kept], [self.lengths[place] for place in kept]
        self.running = [True] * len(kept)

    @torch.no_grad()
    def round(self) -> list[tuple[SpeculativeDecoding, Exception | None]]:
        """Draft, verify, accept, commit.

        Returns:
            The rows that ended in this round, each with the error that ended it, if there is one.
        """
        with torch.cuda.device_of(self.state.root_ids):
            with inference_on_cpu(self.device), self.packed:
                tree = self.draft()
                output = self.generator.verify(self.target, tree, self.state)
            verdict, ended = self.accept(tree, output)
            self.policy.learn(tree, verdict.path, [len(tokens) - 1 for tokens in verdict.read().tokens])
            self.commit(tree, output, verdict)
        self.ended_at = time.perf_counter()
        return ended

    def draft(self) -> DraftTree:
        """The tree of this round."""
        if self.ended_at is not None:  # the time of prompts, and of what the caller does between rounds
            self.policy.exclude(time.perf_counter() - self.ended_at)
        if (policy := self.policy_of(len(self.rows))) is not self.policy:
            self.policy.end_round()
            self.policy = policy
        pairs = zip(self.rows, self.running, strict=True)
        left = max(row.config.max_length - row.sequences.lengths[0] for row, running in pairs if running)
        policy.exclude(self.packed.prepare(left))
        nan = [running and row.nan_rows is not None for row, running in zip(self.rows, self.running, strict=True)]
        tree = policy.draft(self.generator, self.context())
        tree = tree.to(self.device).within_vocabulary(self.vocab_size)
        if any(nan):  # as in the loop of one call
            self.target.cache.clear_uncommitted()
            tree = tree.without_drafts(from_host(nan, self.device))
        return tree

    def context(self) -> DraftContext:
        """Where the next round starts. Drafts are not drawn: otherwise a sampled text would depend on other rows."""
        ids = [row.sequences.ids[0, :length] for row, length in zip(self.rows, self.lengths, strict=True)]
        return DraftContext(
            root_ids=self.state.root_ids,
            root_positions=self.state.root_positions,
            sequences=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            lengths=[*self.lengths],
            active=[*self.running],
            choice=GREEDY,
            read_texts=self.texts,
        )

    def texts(self) -> list[list[int]]:
        """The tokens of each row on the host."""
        return [row.sequences.texts[0][:length] for row, length in zip(self.rows, self.lengths, strict=True)]

    def accept(
        self, tree: DraftTree, output: TargetOutput
    ) -> tuple[Verdict, list[tuple[SpeculativeDecoding, Exception | None]]]:
        """The verdict of all rows, and the rows that have ended, which keep nothing of the round in the caches."""
        paths: list[list[int]] = [[] for _ in self.rows]
        tokens: list[list[int]] = [[] for _ in self.rows]
        nan, ended = [False] * len(self.rows), []
        for place, row in enumerate(self.rows):
            if not self.running[place]:
                continue
            part = slice(place, place + 1)
            states = None if output.states is None else output.states[part]
            error = None
            try:
                own = row.accept_row(tree.of_row(place), TargetOutput(output.logits[part], states=states))
            except Exception as raised:  # the result of this row
                error = raised
            if error is not None or row.sequences.done:
                self.running[place] = False
                ended.append((row, error))
                continue
            host = own.read()
            tokens[place], nan[place] = host.tokens[0], host.nan[0]
            paths[place] = own.path[0, : len(tokens[place])].tolist()
            self.lengths[place] = row.sequences.lengths[0]
        return Verdict.on_host(tree, paths, tokens, nan), ended

    def commit(self, tree: DraftTree, output: TargetOutput, verdict: Verdict) -> None:
        """Commits root and accepted nodes to the target's cache, and reports them to the generator."""
        if verdict.read().is_prefix:
            self.target.cache.commit_first(verdict.counts)
        else:
            self.target.cache.commit(verdict.path, verdict.counts)
        committed = Committed.of_round(tree, output, verdict, self.state)
        self.state = self.state.next(verdict.bonus_ids, verdict.counts)
        self.generator.observe(committed)

    def close(self) -> None:
        """Ends the rounds, also after an error."""
        self.policy.end_round()
        self.contexts.close()
        self.generator.close()
        self.target.close()
