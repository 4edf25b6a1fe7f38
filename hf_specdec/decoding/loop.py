"""The loop: prefill, then rounds of draft, verify, accept, commit, until every row has stopped.

The loop knows the target, trees and the acceptance rule, but no method by name. The verdict of a round stays on the
device; one small tensor is copied to the host: the number of accepted nodes of each row, and their tokens. `lag`
decides when the host reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.decoding import upstream
from hf_specdec.decoding.accept import Acceptor, Verdict
from hf_specdec.decoding.devices import abilities, inference_on_cpu
from hf_specdec.decoding.exchange import GREEDY, ChoiceRule, Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.noise import PositionNoise
from hf_specdec.decoding.observers import Observer, Round
from hf_specdec.decoding.policies import DraftingPolicy
from hf_specdec.decoding.records import SpeculativeOutput, TokenRecords
from hf_specdec.decoding.relaxed import Relaxed
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.speed.packed import PackedLinears
from hf_specdec.decoding.state import Counts, RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.targets.modules import num_tokens
from hf_specdec.decoding.targets.support import TreesRefusedError, keeps_states
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.decoding.user_code import user_code


@dataclass(frozen=True)
class VerifiedRound:
    """A round that the target has verified; the host has not read its verdict yet."""

    tree: DraftTree
    output: TargetOutput
    verdict: Verdict


class SpeculativeDecoding:
    """One `generate` call: the output of the target alone, with several tokens per target forward.

    Args:
        target: the target of this call.
        make_generator: builds the candidate generator of this call.
        input_ids: [batch, seq] int64 prompts, left-padded, rows already expanded for `num_return_sequences`.
        logits_processor: processors and warpers, as `generate` has prepared them.
        stopping_criteria: as `generate` has prepared them.
        generation_config: of the call, with its special token tensors.
        model_kwargs: of the call. Its cache is read; at the end it holds what plain decoding would have left.
        stats: filled while the call runs.
        records: what the output contains besides tokens.
        policy: decides how much is drafted.
        observers: called after every round.
        streamer: receives tokens in order, as soon as no later round can change them.
        networks: that draft with fixed weights.
        relaxed: an acceptance rule that is not lossless, see `relaxed.py`; None for the lossless one.
    """

    def __init__(
        self,
        target: TargetModel,
        make_generator: Callable[[TargetModel], TreeCandidateGenerator],
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        stats: SpeculationStats,
        records: TokenRecords,
        policy: DraftingPolicy,
        observers: Sequence[Observer] = (),
        streamer: BaseStreamer | None = None,
        networks: Sequence[nn.Module] = (),
        relaxed: Relaxed | None = None,
    ) -> None:
        self.target, self.config, self.model_kwargs, self.stats = target, generation_config, model_kwargs, stats
        self.started = time.perf_counter()
        stats.begin(input_ids)
        cache = model_kwargs.get(target.cache_name)
        self.returns_cache = generation_config.return_dict_in_generate or (
            cache is not None and upstream.is_callers(cache)
        )
        lockstep = bool(user_code(logits_processor, stopping_criteria))
        if self.returns_cache and keeps_states(target.model) and len(input_ids) > 1:
            # States cannot be cut back, and without an end of text, rows that have stopped continue.
            lockstep = lockstep or not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.sequences = Sequences(
            input_ids, stopping_criteria, upstream.pad_token_id(generation_config), streamer, lockstep=lockstep
        )
        self.records, self.policy = records, policy
        self.observers = (stats, records, policy, *observers)
        do_sample = generation_config.do_sample
        self.acceptor = Acceptor(
            logits_processor,
            do_sample=do_sample,
            keep_scores=records.keeps_scores,
            lockstep=lockstep,
            relaxed=relaxed,
            device=input_ids.device,
        )
        stats.lossless = relaxed is None
        self.choice = ChoiceRule.of(do_sample, logits_processor)
        self.vocab_size = num_tokens(target.model)
        self.joins_others = False  # whether it is a row among those of other calls
        self.unread: VerifiedRound | None = None
        self.kept: list[int] = []  # tokens that each row of the batch kept in the last round that was read
        self.nan_rows: list[bool] | None = None  # remaining rows with NaN logits at the root; None if there are none
        root_ids = self.sequences.ids[:, max(0, input_ids.shape[1] - 1)]  # a prompt may consist of embeddings only
        self.state = RoundState(root_ids, torch.zeros_like(root_ids))
        self.generator = make_generator(target)
        self.packed = PackedLinears(networks if target.is_compiled or target.same_bits else (target.model, *networks))

    @torch.no_grad()
    def run(self) -> SpeculativeOutput | Tensor:
        """Generates; may be called once.

        Returns:
            [batch, length] int64 token ids, or a `SpeculativeOutput` with `return_dict_in_generate`.
        """
        # Events, streams and graphs belong to the current device, which may differ from the target's.
        with torch.cuda.device_of(self.sequences.ids):
            try:
                with self.target.tapping():
                    self.prefill()
                    with self.inference_mode_if_unobserved():
                        while not self.sequences.done:
                            self.round()
                    output_ids = self.sequences.finish()
                    self.stats.count_target(self.target)
                    if self.returns_cache:  # takes a forward where rows ended early
                        cache = self.model_kwargs[self.target.cache_name]
                        self.target.hand_back(cache, output_ids, self.sequences.lengths)
                    else:
                        self.target.cache.release()
                    self.generator.count(self.stats)
                    self.stats.report_fallback_rounds()
            finally:
                self.close()
                self.stats.total_time_s = time.perf_counter() - self.started
        if not self.config.return_dict_in_generate:
            return output_ids
        return SpeculativeOutput(
            sequences=output_ids,
            speculation=self.stats,
            **{upstream.CACHE: self.model_kwargs[self.target.cache_name]},
            **self.records.finish(output_ids.shape[1] - self.sequences.prompt_length),
        )

    @torch.no_grad()
    def begin_row(self, seed: int | None) -> None:
        """Runs the prompt of one row, so that it can join the rounds of others (`shared.py`) if it has not ended.

        Args:
            seed: of its noise if it samples; None for torch's default generator.

        Raises:
            TreesRefusedError: the row cannot share rounds.
        """
        self.joins_others = True
        if seed is not None and self.config.do_sample:
            self.acceptor.noise = PositionNoise(1, self.sequences.ids.device, seed)
        with torch.cuda.device_of(self.sequences.ids):
            with self.target.tapping():
                prompt = self.prefill()
            if not self.sequences.done:  # the drafter reads the prompt, and this draft is dropped
                self.generator.draft(replace(self.context(), choice=GREEDY))
                self.generator.observe(Committed.of_nothing(prompt, self.state))

    def accept_row(self, tree: DraftTree, output: TargetOutput) -> Verdict:
        """Accepts and reads a round of one row, which was verified with rows of other calls."""
        verdict = self.acceptor(tree, output.logits, self.sequences, states=output.states)
        self.read(VerifiedRound(tree, output, verdict))
        return verdict

    def close(self) -> None:
        """Ends the call, also after an error."""
        self.generator.close()
        self.target.close()

    def prefill(self) -> Committed:
        """Runs the prompt and chooses the first token, as the bonus token of a tree that consists of the root.

        Returns:
            What the generator observed.
        """
        sequences, target = self.sequences, self.target
        prompt = sequences.ids[:, : sequences.prompt_length]
        output = target.prefill(prompt, self.config, self.model_kwargs)
        target.check_reach()
        if self.joins_others and (reason := target.why_apart() or self.generator.why_apart()):
            raise TreesRefusedError(reason)
        self.stats.has_begun = True
        tree = DraftTree.root_only(self.state.root_ids)
        tree = replace(tree, no_drafts=tree.valid[:, 0])  # accepts NaN logits too: they are those of plain decoding
        verdict = self.acceptor(tree, output.logits, sequences)
        self.read(VerifiedRound(tree, output, verdict), is_prefill=True)  # streams the first token
        # Room for new tokens and the nodes of a round; only captured forwards use all of it. Buffers grow in steps.
        new = min(self.config.max_length - sequences.prompt_length, 4096)
        target.begin_rounds(target.cache.get_seq_length() + new + 128)
        self.state = RoundState(verdict.bonus_ids, target.root_positions())
        committed = Committed.of_prompt(prompt, target, output)
        self.generator.observe(committed)
        self.stats.lap("prefill")
        return committed

    def round(self) -> None:
        """Draft, verify, accept, commit. The host reads the verdict at once or up to a round later (`lag`)."""
        lag = self.lag()
        if lag == 0:
            self.read(self.unread)
            self.drop_finished_rows()
        if self.sequences.done:
            return
        self.prepare()
        tree = self.draft()
        if lag == 1 and self.read(self.unread):
            return
        if self.nan_rows is not None:  # verify these roots again, without drafts and without NaN in the cache
            self.target.cache.clear_uncommitted()
            tree = tree.without_drafts(from_host(self.nan_rows, tree.token_ids.device))
        with inference_on_cpu(tree.token_ids.device), self.packed:
            output = self.generator.verify(self.target, tree, self.state)
        self.stats.lap("verify")
        if lag == 2 and self.read(self.unread):
            return
        active = self.sequences.of_remaining(self.sequences.active)
        verdict = self.acceptor(
            tree, output.logits, self.sequences, output.drawn, None if all(active) else active, output.states
        )
        self.unread = verified = VerifiedRound(tree, output, verdict)
        if lag == 0:
            self.read(verified)
        self.stats.lap("accept")
        self.commit(verified)
        self.stats.lap("commit")

    def prepare(self) -> None:
        """Chooses which weights this round multiplies with; the time is counted as prefill."""
        seconds = self.packed.prepare(self.config.max_length - max(self.sequences.lengths))
        if seconds:
            self.policy.exclude(seconds)
            self.stats.lap("prefill")

    def lag(self) -> int:
        """When the host reads the verdict of a round.

        0: at once. 1: after the next draft is launched, which then must not depend on values on the host. 2: after the
        next verify is launched too, if the tokens are not needed earlier; the round after the last one is discarded.
        """
        host_decides = (
            not self.generator.drafts_early or self.target.static is None,  # the next draft depends on the verdict
            not self.acceptor.at_once or self.sequences.lockstep,  # processors and criteria read the text
            self.nan_rows is not None,  # the next tree has no drafts
            any(observer.waits for observer in self.observers),
            self.may_drop_rows and bool(self.sequences.finished_indices),  # they leave once all verdicts are read
        )
        if any(host_decides):
            return 0
        return 2 if abilities(self.sequences.ids.device).works_ahead and self.sequences.can_defer_read else 1

    def draft(self) -> DraftTree:
        """The tree of this round: drafted as the policy decides, and cut to the nodes that the target can verify."""
        sequences, context = self.sequences, self.context()
        self.target.renew_at_rotary_limit(sequences.ids, sequences.lengths)
        with inference_on_cpu(sequences.ids.device), self.packed:
            tree = self.policy.draft(self.generator, context)
            self.stats.lap("draft")
            tree = tree.to(sequences.ids.device).within_vocabulary(self.vocab_size)  # a drafter may have its own device
            tree = self.target.verifiable_part(tree, self.state.root_positions)
        self.stats.lap("tree")
        return tree

    def context(self) -> DraftContext:
        """Where the next round starts."""
        sequences = self.sequences
        return DraftContext(
            root_ids=self.state.root_ids,
            root_positions=self.state.root_positions,
            sequences=sequences.remaining_ids,
            lengths=sequences.of_remaining(sequences.lengths),
            active=sequences.of_remaining(sequences.active),
            choice=self.choice,
            read_texts=lambda: sequences.of_remaining(sequences.texts),
            lap=self.stats.lap,
        )

    def commit(self, verified: VerifiedRound) -> None:
        """Commits root and accepted nodes to the target's cache, and reports them to the generator."""
        verdict, cache = verified.verdict, self.target.cache
        counts = verdict.counts
        if cache.keeps_states:  # states cannot be cropped, so tokens after the end of the text must not be committed
            # Of this round, which has been read: such targets are not captured. As many nodes, with root, as tokens.
            counts = Counts.of(self.sequences.of_remaining(self.sequences.in_output(self.kept)), counts.tensor.device)
        if verdict.host is not None and verdict.host.is_prefix:  # without copies if rows have one length
            cache.commit_first(counts)
        else:
            cache.commit(verdict.path, counts)
        committed = Committed.of_round(verified.tree, verified.output, verdict, self.state)
        for observer in self.observers:
            observer.on_commit(committed)
        self.state = self.state.next(verdict.bonus_ids, verdict.counts)
        self.generator.observe(committed)

    def read(self, verified: VerifiedRound | None, *, is_prefill: bool = False) -> bool:
        """Reads the verdict on the host, if there is one: appends the tokens, calls the observers, streams.

        Returns:
            Whether all rows have stopped.
        """
        self.unread = None
        if verified is None:
            return self.sequences.done
        host = verified.verdict.read()
        self.stats.count_target(self.target)
        self.nan_rows = host.nan if any(host.nan) else None
        if self.sequences.lockstep:  # acceptance has appended them
            self.kept = kept = self.sequences.of_batch([len(tokens) for tokens in host.tokens])
        else:
            scores = self.records.scores_including(verified.verdict.scores)
            self.kept = kept = self.sequences.append(host.tokens, scores)
        each = Round(
            verified.tree, verified.output, verified.verdict, host, self.sequences, kept, self.target.cache,
            self.generator.describe,
        )  # fmt: skip
        for observer in self.observers:
            observer.on_prefill(each) if is_prefill else observer.on_round(each)
        self.sequences.stream()
        self.stats.lap("prefill" if is_prefill else "accept")
        return self.sequences.done

    @property
    def may_drop_rows(self) -> bool:
        """Whether finished rows may leave the batch: not if an observer or a processor needs the whole batch."""
        observed = any(each.waits for each in self.observers if each is not self.policy)
        drops = self.generator.drops_rows and self.target.bound_rows is None
        return drops and self.acceptor.at_once and not observed

    def drop_finished_rows(self) -> None:
        """Removes finished rows from the batch, so that rounds no longer compute them."""
        finished, remaining = self.sequences.finished_indices, len(self.sequences.rows)
        # This copies all caches once. One or two rounds of the smaller batch save that time again.
        if not 0.25 * remaining <= len(finished) < remaining or not self.may_drop_rows:
            return
        kept = [index for index in range(remaining) if index not in finished]
        self.sequences.keep_rows(kept)
        self.target.keep_rows(kept, permanent=not self.returns_cache)
        self.generator.keep_rows(kept)
        self.acceptor.keep_rows(kept)
        self.policy.rows_dropped()
        self.state = self.state.of_rows(kept)
        self.nan_rows = None if self.nan_rows is None else [self.nan_rows[index] for index in kept]

    def inference_mode_if_unobserved(self) -> AbstractContextManager[object]:
        """Inference mode for all rounds, on a CPU, unless the caller's code can see their tensors."""
        observed = not self.acceptor.at_once or self.records.waits or self.sequences.is_observed
        return nullcontext() if observed else inference_on_cpu(self.sequences.ids.device)
