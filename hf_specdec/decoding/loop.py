"""The loop: prefill, then rounds of draft, verify, accept, commit, until every row has stopped.

It knows the target, trees and the rule of acceptance, and no method by name. A round's outcome stays on the device;
what travels to the host is one small tensor: how many nodes each row kept and which tokens they are. When the host
reads it is a matter of one number, `lag`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.decoding.accept import PREFIX_FREE, Acceptor, Verdict, check_rows
from hf_specdec.decoding.devices import abilities, inference_on_cpu
from hf_specdec.decoding.generator import ChoiceRule, Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.host import pad_token_id
from hf_specdec.decoding.observers import Observer, Round
from hf_specdec.decoding.policies import Always
from hf_specdec.decoding.records import SpeculativeOutput, TokenRecords
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.state import Counts, RoundState
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.tree import DraftTree, from_host


@dataclass(frozen=True)
class Flying:
    """A round that the target has verified and the host has not read."""

    tree: DraftTree
    output: TargetOutput
    verdict: Verdict


class SpeculativeDecoding:
    """One `generate` call: what the target alone would generate, several tokens per target forward.

    Args:
        target: the target of this call.
        make_generator: builds the candidate generator of this call.
        input_ids: [batch, seq] int64 prompts, left-padded, rows already expanded for `num_return_sequences`.
        logits_processor: processors and warpers as `generate` has prepared them.
        stopping_criteria: as `generate` has prepared them.
        generation_config: of the call, with its special token tensors.
        model_kwargs: of the call; `past_key_values` is read and, at the end, brought to plain decoding's state.
        stats: filled while the call runs.
        records: what the output is to hold beside tokens.
        policy: chooses how much is drafted.
        observers: see every round.
        streamer: receives tokens in order, as soon as no later round can change them.

    Raises:
        ValueError: a processor keeps state from call to call and there are several rows.
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
        policy: Always,
        observers: Sequence[Observer] = (),
        streamer: BaseStreamer | None = None,
    ) -> None:
        check_rows(logits_processor, len(input_ids))
        self.target, self.config, self.model_kwargs, self.stats = target, generation_config, model_kwargs, stats
        self.started = time.perf_counter()
        stats.begin(input_ids)
        self.sequences = Sequences(input_ids, stopping_criteria, pad_token_id(generation_config), streamer)
        self.records, self.policy = records, policy
        self.observers = (stats, records, policy, *observers)
        do_sample = generation_config.do_sample
        self.acceptor = Acceptor(logits_processor, do_sample=do_sample, keep_scores=records.keeps_scores)
        warpers = [processor for processor in logits_processor if type(processor) in PREFIX_FREE]
        self.choice = ChoiceRule(do_sample, LogitsProcessorList(warpers))
        self.vocab_size = target.model.get_input_embeddings().num_embeddings
        self.flying: Flying | None = None
        self.kept: list[int] = []  # tokens of the last round that was read, per row of the batch
        self.nan_rows: list[bool] | None = None  # live rows for whose root the target gave NaN; None for none
        root_ids = self.sequences.ids[:, max(0, input_ids.shape[1] - 1)]  # a prompt may come as embeddings alone
        self.state = RoundState(root_ids, torch.zeros_like(root_ids))
        self.generator = make_generator(target)

    @torch.no_grad()
    def run(self) -> SpeculativeOutput | Tensor:
        """Generates; called once.

        Returns:
            [batch, length] int64 token ids, or a `SpeculativeOutput` with `return_dict_in_generate`.
        """
        # Events, streams and captures are made on the current device, which need not be the target's.
        with torch.cuda.device_of(self.sequences.ids):
            try:
                with self.target.tapping():
                    self.prefill()
                    with self.inference_where_unseen():
                        while not self.sequences.done:
                            self.round()
                    output_ids = self.sequences.finish()
                    self.stats.count_target(self.target)
                    self.target.hand_back(self.model_kwargs[self.target.cache_name], output_ids, self.sequences.lengths)
                    self.generator.count(self.stats)
                    self.stats.report_plain_steps()
            finally:
                self.generator.close()
                self.stats.total_time_s = time.perf_counter() - self.started
        if not self.config.return_dict_in_generate:
            return output_ids
        return SpeculativeOutput(
            sequences=output_ids,
            past_key_values=self.model_kwargs[self.target.cache_name],
            speculation=self.stats,
            **self.records.finish(output_ids.shape[1] - self.sequences.prompt_length),
        )

    def prefill(self) -> None:
        """Runs the prompt; the first token is chosen as the bonus of a tree that has only a root."""
        sequences, target = self.sequences, self.target
        prompt = sequences.ids[:, : sequences.prompt_length]
        output = target.prefill(prompt, self.config, self.model_kwargs)
        target.check_reach()
        tree = DraftTree.root_only(self.state.root_ids)
        tree = replace(tree, bare=tree.valid[:, 0])  # the host's own forward: what it gives is taken as it is
        verdict = self.acceptor(tree, output.logits, sequences)
        self.settle(Flying(tree, output, verdict), is_prefill=True)  # the first token goes out here
        # Room for the tokens that may come and for a round's nodes; a wider tree or a longer text grows it in steps.
        new = min(self.config.max_length - sequences.prompt_length, 4096)
        target.begin_rounds(target.cache.get_seq_length() + new + 128)
        self.state = RoundState(verdict.bonus_ids, target.root_positions())
        self.generator.observe(Committed.of_prompt(prompt, target, output))
        self.stats.lap("prefill")

    def round(self) -> None:
        """Draft, verify, accept, commit; and `lag` rounds late the host reads what came of it."""
        lag = self.lag()
        if lag == 0:
            self.settle(self.flying)
            self.drop_finished_rows()
        if self.sequences.done:
            return
        tree = self.draft()
        if lag == 1 and self.settle(self.flying):
            return
        if self.nan_rows is not None:  # bare roots, in a cache without anything that can be NaN
            self.target.cache.wipe()
            tree = tree.without_drafts(from_host(self.nan_rows, tree.token_ids.device))
        with inference_on_cpu(tree.token_ids.device):
            output = self.generator.verify(self.target, tree, self.state)
        self.stats.lap("verify")
        if lag == 2 and self.settle(self.flying):
            return
        active = self.sequences.live(self.sequences.active)
        going = None if all(active) else active
        verdict = self.acceptor(tree, output.logits, self.sequences, output.drawn, going)
        self.flying = flying = Flying(tree, output, verdict)
        if lag == 0:
            self.settle(flying)
        self.stats.lap("accept")
        self.commit(flying)
        self.stats.lap("commit")

    def lag(self) -> int:
        """When the host reads what came of a round.

        0: at once. 1: when the next draft is launched, which then needs nothing that the host knows. 2: when the next
        round is verified, too, where nobody waits for the tokens; a last round is then followed by one in vain.
        """
        device_only = self.generator.drafts_early and self.target.static is not None and self.acceptor.prefix_free
        if not device_only or self.nan_rows is not None or any(each.waits for each in self.observers):
            return 0
        if self.may_drop_rows and self.sequences.finished_places:
            return 0
        return 2 if abilities(self.sequences.ids.device).works_ahead and self.sequences.can_wait else 1

    def draft(self) -> DraftTree:
        """The tree of this round: of what the policy wants, what the target can take."""
        sequences = self.sequences
        context = DraftContext(
            root_ids=self.state.root_ids,
            root_positions=self.state.root_positions,
            sequences=sequences.live_ids,
            lengths=sequences.live(sequences.lengths),
            active=sequences.live(sequences.active),
            choice=self.choice,
            lap=self.stats.lap,
        )
        self.target.renew_at_rotary_limit(sequences.ids, sequences.lengths)
        with inference_on_cpu(sequences.ids.device):
            tree = self.policy.draft(self.generator, context)
            self.stats.lap("draft")
            tree = tree.within_vocabulary(self.vocab_size)
            tree = self.target.within_reach(tree, self.state.root_positions)
        self.stats.lap("tree")
        return tree

    def commit(self, flying: Flying) -> None:
        """Keeps root and accepted nodes in the target's cache, and tells the generator what was kept."""
        verdict, cache = flying.verdict, self.target.cache
        counts = verdict.counts
        if cache.keeps_states:  # which cannot be cut back where a text has ended within the round
            counts = Counts.of(self.sequences.live(self.sequences.lasting(self.kept)), counts.tensor.device)
            self.target.note_states(self.sequences.overrun)
        if verdict.host is not None and verdict.host.leading:  # they may lie where they belong already
            cache.commit_first(counts)
        else:
            cache.commit(verdict.path, counts)
        committed = Committed.of_round(flying.tree, flying.output, verdict, self.state)
        self.state = self.state.next(verdict.bonus_ids, verdict.counts)
        self.generator.observe(committed)

    def settle(self, flying: Flying | None, *, is_prefill: bool = False) -> bool:
        """Has the host read a round that the target has verified, if there is one, and whoever waits for it.

        Returns:
            Whether all rows have stopped.
        """
        self.flying = None
        if flying is None:
            return self.sequences.done
        host = flying.verdict.read()
        self.stats.count_target(self.target)
        self.nan_rows = host.nan if any(host.nan) else None
        self.kept = kept = self.sequences.append(host.tokens, self.records.scores_including(flying.verdict.scores))
        each = Round(
            flying.tree, flying.output, flying.verdict, host, self.sequences, kept, self.target.cache,
            self.generator.describe,
        )  # fmt: skip
        for observer in self.observers:
            observer.on_prefill(each) if is_prefill else observer.on_round(each)
        self.sequences.stream()
        self.stats.lap("prefill" if is_prefill else "accept")
        return self.sequences.done

    @property
    def may_drop_rows(self) -> bool:
        """Not where somebody looks at the batch as a whole."""
        watched = any(each.waits for each in self.observers if each is not self.policy)
        drops = self.generator.drops_rows and self.target.bound_rows is None
        return drops and self.acceptor.prefix_free and not watched

    def drop_finished_rows(self) -> None:
        """Takes rows that have finished out of the batch, so that rounds no longer cost anything for them."""
        finished, live = self.sequences.finished_places, len(self.sequences.rows)
        # Each time all caches are copied once, which a round or two of a smaller batch make up for.
        if not 0.25 * live <= len(finished) < live or not self.may_drop_rows:
            return
        kept = [place for place in range(live) if place not in finished]
        self.sequences.keep_rows(kept)
        self.target.keep_rows(kept)
        self.generator.keep_rows(kept)
        self.policy.keep_rows()
        self.state = self.state.of_rows(kept)
        self.nan_rows = None if self.nan_rows is None else [self.nan_rows[place] for place in kept]

    def inference_where_unseen(self) -> AbstractContextManager[object]:
        """Inference mode for all rounds, on a CPU, unless code of the caller's is to see their tensors."""
        seen = not self.acceptor.prefix_free or self.records.waits or self.sequences.watched
        return nullcontext() if seen else inference_on_cpu(self.sequences.ids.device)
