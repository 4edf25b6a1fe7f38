"""The loop: prefill, then rounds of draft, verify, accept, commit, until every row has stopped.

It knows the target, trees and the rule of acceptance, and no method by name. Only one small tensor per round travels
to the host: how many nodes each row kept and which tokens they are. Where everything else stays on the device, the
host reads it when the next draft, or all of the next round, has been launched.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from hf_specdec.decoding.acceptance import PREFIX_FREE, STATEFUL, Acceptance, FollowTarget, Walk
from hf_specdec.decoding.budget import AutoBudget
from hf_specdec.decoding.candidates import (
    ChoiceRule,
    DraftContext,
    DraftsAhead,
    RoundOutcome,
    TreeCandidateGenerator,
)
from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.modes import inference_on_cpu
from hf_specdec.decoding.records import TokenRecords
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.stopwatch import Stopwatch
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.trace import Trace
from hf_specdec.decoding.transfer import works_ahead
from hf_specdec.decoding.tree import DraftTree, count_up, from_host, pick

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What plain `generate` returns with `return_dict_in_generate=True`, and the statistics of the speculation."""

    speculation: SpeculationStats | None = None


@dataclass(frozen=True)
class Launched:
    """A round that the device has been given, to the draft of the next one, and of which the host knows nothing yet.

    Attributes:
        walk: what will come of it.
        outcome: as the generator has seen it; its lists are filled when the walk is read.
        active: per row, whether it takes part.
    """

    walk: Walk
    outcome: RoundOutcome
    active: list[bool]


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
        streamer: receives tokens in order, as soon as no later round can change them.
        trace: records the rounds, where wanted.
        budget: chooses how much of each tree is verified; all of it where None.

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
        streamer: BaseStreamer | None = None,
        trace: Trace | None = None,
        budget: AutoBudget | None = None,
    ) -> None:
        batch = len(input_ids)
        stateful = [type(processor).__name__ for processor in logits_processor if isinstance(processor, STATEFUL)]
        if stateful and batch > 1:
            raise ValueError(
                f"{stateful[0]} keeps state from call to call, for rows that grow together, but in a batch of {batch} "
                "rows accept different numbers of drafted tokens. Generate one row at a time, or without "
                "assistant_model."
            )
        self.target = target
        self.make_generator = make_generator
        self.config = generation_config
        self.model_kwargs = model_kwargs
        self.stats = stats
        self.trace = trace
        self.budget = budget
        self.rows: list[int] | None = None  # those that rounds are made for, once some have been dropped
        self.row_ids: Tensor  # the same on the device: a list would be sent there, and waited for, at every use
        self.outcomes: list[RoundOutcome] = []  # not yet reported to the generator
        self.early_tree: DraftTree | None = None  # of the next round, if it has been drafted
        self.launched: Launched | None = None  # the latest round, if the host has yet to read what came of it
        self.nan_rows: Tensor | None = None  # [batch] bool: for whose roots alone the target gives NaN; None for none
        self.num_nan_rounds = 0  # of such rows
        pad_token = generation_config._pad_token_tensor
        pad_token_id = None if pad_token is None else int(pad_token)
        self.sequences = Sequences(input_ids, stopping_criteria, pad_token_id, streamer)
        self.records = TokenRecords(generation_config, input_ids.shape[0], model_kwargs.get("past_key_values"))
        self.accept = FollowTarget(
            logits_processor, do_sample=generation_config.do_sample, keep_scores=self.records.keeps_scores
        )
        warpers = [processor for processor in logits_processor if type(processor) in PREFIX_FREE]
        self.choice = ChoiceRule(generation_config.do_sample, LogitsProcessorList(warpers))
        self.vocab_size = target.model.get_input_embeddings().num_embeddings
        # What the target keeps this thread busy: on a CPU the drafter's share of the core is not its own.
        self.clock = time.thread_time if abilities(input_ids.device).host_memory else time.perf_counter
        self.lap: Callable[[str], None]
        self.root_ids: Tensor
        self.root_positions: Tensor

    @torch.no_grad()
    def run(self) -> SpeculativeOutput | Tensor:
        """Generates; called once.

        Returns:
            [batch, length] int64 token ids, or a `SpeculativeOutput` with `return_dict_in_generate`.
        """
        # Events, streams and captures are made on the current device, which need not be the target's.
        with torch.cuda.device_of(self.sequences.ids):
            return self._run()

    def _run(self) -> SpeculativeOutput | Tensor:
        started = time.perf_counter()
        self.stats.stopwatch = Stopwatch(self.sequences.ids.device)
        self.lap = self.stats.stopwatch.lap
        self.stats.per_step_accepted += [[] for _ in range(self.sequences.batch)]
        generator = self.make_generator(self.target)
        try:
            with self.target.tapping():
                self.prefill(generator)
                with self.inference_where_unseen():
                    while not self.sequences.done:
                        self.round(generator)
                if self.launched is not None:  # in vain: the text had ended before
                    self.read(self.launched)
                output_ids = self.sequences.finish()
                self.hand_back_cache(output_ids)
                generator.count(self.stats)
                self.report_fallbacks()
        finally:
            generator.close()
            self.stats.total_time_s = time.perf_counter() - started
        if not self.config.return_dict_in_generate:
            return output_ids
        return SpeculativeOutput(
            sequences=output_ids,
            past_key_values=self.model_kwargs["past_key_values"],
            speculation=self.stats,
            **self.records.finish(output_ids.shape[1] - self.sequences.prompt_length),
        )

    def inference_where_unseen(self) -> AbstractContextManager[object]:
        """Inference mode for all rounds, on a CPU, unless code of the caller's is to see their tensors."""
        seen = bool(self.accept.processors) or self.records.keeps_any or self.sequences.watched
        return nullcontext() if seen else inference_on_cpu(self.sequences.ids.device)

    def prefill(self, generator: TreeCandidateGenerator) -> None:
        """Runs the prompt; the first token is chosen as the bonus of a tree that has only a root."""
        batch, prompt_length = self.sequences.batch, self.sequences.prompt_length
        prompt = self.sequences.ids[:, :prompt_length]
        output = self.target.prefill(prompt, self.config, self.model_kwargs)
        self.target.check_reach()
        entries = self.target.cache.get_seq_length()
        # Cache entry e holds token e - entry_offset of a row; not 0 where a cache came with only the new tokens.
        self.entry_offset = entries - prompt_length
        positions, valid = self.target.prompt_positions()
        new = positions.shape[1]  # fewer than the prompt where a cache was continued
        token_ids = prompt[:, -new:]
        if prompt_length < new:  # the prompt came as embeddings, so what its tokens were is not known
            token_ids = torch.nn.functional.pad(token_ids, (new - prompt_length, 0))
        tree = DraftTree.root_only(token_ids[:, -1])
        tree = replace(tree, bare=tree.valid[:, 0])  # the host's own forward: what it gives is taken as it is
        _, _, acceptance = self.judge(tree, output, [False] * batch)  # the first token goes out here
        # Room for the tokens that may come and for a round's nodes; a wider tree or a longer text grows it in steps.
        self.target.begin_rounds(entries + min(self.config.max_length - prompt_length, 4096) + 128)
        generator.observe(
            RoundOutcome(
                token_ids=token_ids,
                features=output.features,
                position_ids=positions,
                valid=valid,
                num_committed=[new] * batch if valid is None else valid.sum(1).tolist(),
                num_accepted=[0] * batch,
                target_logits=output.logits,
            )
        )
        self.lap("prefill")
        if self.trace is not None:
            self.trace.begin(prompt, acceptance)

    def round(self, generator: TreeCandidateGenerator) -> None:
        """Draft, verify while the drafter may go on, accept, commit."""
        active = self.live(self.sequences.active)
        began = time.perf_counter()
        layers_run = self.target.num_layers_run
        if self.target.at_rotary_limit and not self.entry_offset:
            self.target.renew(self.sequences.ids[:, : self.sequences.lengths[0]])
        with inference_on_cpu(self.sequences.ids.device):  # for drafting and verifying together
            self.root_positions = self.target.root_positions()
            tree, self.early_tree = self.early_tree or self.draft(generator, active), None
            self.lap("tree")
            launched = time.perf_counter()
            drafts = self.budget is None or self.budget.drafting
            pending = generator.draft_ahead(tree) if drafts else None
            busy_from = self.clock() if pending is not None else 0.0
            output = self.verify(tree)
        ahead = None
        if pending is not None:
            if works_ahead(tree.token_ids.device):  # else the target's own time would be that of its launch
                torch.cuda.current_stream(tree.token_ids.device).synchronize()
            busy_s = self.clock() - busy_from
            ahead = pending.result()
            self.stats.count_ahead(ahead.busy_s, busy_s, time.perf_counter() - launched)
        self.lap("verify")
        self.stats.num_layers_run += self.target.num_layers_run - layers_run
        if self.may_draft_early(generator, tree):
            self.draft_before_reading(generator, tree, output, active)
            return
        roots = self.root_ids
        tree, output, acceptance = self.judge(tree, output, active, ahead)
        self.lap("accept")
        if not all(active):  # a row that waits for the others goes on from the root it has
            self.root_ids = self.root_ids.where(from_host(active, roots.device), roots)
        if self.trace is not None:
            notes = generator.describe(tree) if tree.num_nodes > 1 else None
            self.trace.add(tree, acceptance, active, self.sequences.lengths, notes)
        self.outcomes.append(self.commit(acceptance, active, tree, output))
        self.lap("commit")
        if self.budget is not None:
            seconds = time.perf_counter() - began
            self.budget.note(tree, acceptance.path, acceptance.num_accepted, active, seconds)
        if self.budget is None or self.budget.drafting:
            generator.observe(self.outcomes[0].followed_by(self.outcomes[1:]))
            self.outcomes = []
        elif self.target.static is not None:
            self.outcomes[-1] = self.outcomes[-1].lasting()
        self.drop_finished_rows(generator)

    def verify(self, tree: DraftTree) -> TargetOutput:
        """One forward of the target over a tree."""
        self.stats.num_target_forwards += 1
        return self.target.verify(
            tree,
            self.root_positions,
            output_attentions=self.records.keeps_attentions,
            output_hidden_states=self.records.keeps_hidden_states,
        )

    def verify_anew(self, root: DraftTree) -> TargetOutput:
        """A round without its drafts, because of one of which the target has given NaN for the root too."""
        self.target.cache.wipe()
        layers_run = self.target.num_layers_run
        with inference_on_cpu(root.token_ids.device):
            output = self.verify(root)
        self.stats.num_layers_run += self.target.num_layers_run - layers_run
        return output

    def leave_drafts_out(self) -> None:
        """The same where the host has learned it late: the next round, drafted meanwhile, is made one of its roots."""
        assert self.early_tree is not None
        self.target.cache.wipe()
        self.early_tree = self.bare_roots(self.early_tree)

    def may_draft_early(self, generator: TreeCandidateGenerator, tree: DraftTree) -> bool:
        """Whether nothing that the host must know stands between this round and the next draft."""
        on_device = self.target.static is not None and tree.children is None and tree.draft_probs is None
        watched = self.trace is not None or self.records.keeps_any or self.budget is not None
        watched |= self.nan_rows is not None
        return generator.drafts_early and on_device and self.accept.prefix_free and not watched

    def draft_before_reading(
        self, generator: TreeCandidateGenerator, tree: DraftTree, output: TargetOutput, active: list[bool]
    ) -> None:
        """The rest of a round, with the next draft launched before the host waits for what came of this one.

        All that it reads, counts and streams then happens beside the device, which has a draft to make. A last round
        drafts in vain. Where nobody waits for the tokens, it reads them even later: when the next round, too, is under
        way. A last round is then followed by one that is thrown away.
        """
        walk = self.accept.begin(tree, output.logits)
        self.lap("accept")
        going = from_host(active, self.root_ids.device)
        counts = (walk.num_accepted + 1) * going
        order = count_up(walk.path.shape[1], walk.path.device)
        features = output.features
        if features is not None:
            features = pick(features, walk.path.to(features.device))
        outcome = RoundOutcome(
            token_ids=walk.path_ids,
            features=features,
            position_ids=self.root_positions.unsqueeze(1) + order,
            valid=order < counts.unsqueeze(1),
            num_committed=[],
            num_accepted=[],
            target_logits=output.logits,
            tree=tree,
            path=walk.path,
            counts=counts,
        )
        self.target.cache.commit_unread(walk.path, counts, lambda: outcome.num_committed)
        generator.observe(outcome)
        self.lap("commit")
        self.root_ids = walk.bonus_ids.where(counts > 0, self.root_ids)
        self.root_positions = self.target.root_positions()
        with inference_on_cpu(self.root_ids.device):
            self.early_tree = self.draft(generator, active)
        self.lap("tree")
        before, self.launched = self.launched, Launched(walk, outcome, active)
        spoilt = before is not None and self.read(before)
        may_wait = works_ahead(self.root_ids.device) and self.sequences.can_wait and not spoilt
        if self.sequences.done or may_wait:
            return
        spoilt |= self.read(self.launched)
        self.launched = None
        if spoilt:
            self.leave_drafts_out()
        self.drop_finished_rows(generator)

    def read(self, launched: Launched) -> bool:
        """Waits for what came of a round. Rows that the round before has ended get nothing of it.

        Returns:
            Whether it came to nothing for some row, because the target gave NaN for its root (`FollowTarget`).
        """
        outcome, acceptance = launched.outcome, launched.walk.read()
        outcome.num_accepted += acceptance.num_accepted
        counts = [len(tokens) if on else 0 for tokens, on in zip(acceptance.tokens, launched.active, strict=True)]
        outcome.num_committed += counts
        outcome.tokens += acceptance.tokens
        active = self.live(self.sequences.active)
        self.count(acceptance, [on and bool(new) for on, new in zip(active, acceptance.tokens, strict=True)])
        self.append(acceptance, None)
        self.lap("accept")
        return _is_spoilt(acceptance, active)

    def draft(self, generator: TreeCandidateGenerator, active: list[bool]) -> DraftTree:
        """The tree of this round, or a root alone where drafting does not pay."""
        if self.nan_rows is not None:
            self.target.cache.wipe()  # else a row could not recover where the host drops what has been NaN
        if self.budget is not None and not self.budget.drafting:
            self.stats.num_undrafted_steps += sum(active)
            tree = DraftTree.root_only(self.root_ids)
            return tree if self.nan_rows is None else tree.without_drafts(self.nan_rows)
        context = DraftContext(
            root_ids=self.root_ids,
            root_positions=self.root_positions,
            sequences=self.sequences.ids if self.rows is None else self.sequences.ids[self.row_ids],
            lengths=self.live(self.sequences.lengths),
            active=active,
            choice=self.choice,
            node_limit=None if self.budget is None else self.budget.node_limit,
            lap=self.lap,
        )
        tree = generator.draft(context)
        self.lap("draft")
        if self.budget is not None:
            self.stats.num_probe_steps += sum(active) if self.budget.probing else 0
            tree = self.budget.cut(tree, active)
        if self.nan_rows is not None:
            tree = tree.without_drafts(self.nan_rows)
        return self.target.within_reach(tree.within_vocabulary(self.vocab_size), self.root_positions)

    def live(self, values: Sequence[T]) -> list[T]:
        """Of one value per row of the batch those of rows that rounds are still made for."""
        return list(values) if self.rows is None else [values[row] for row in self.rows]

    def drop_finished_rows(self, generator: TreeCandidateGenerator) -> None:
        """Takes rows that have finished out of the batch, so that rounds no longer cost anything for them.

        Not where somebody looks at the batch as a whole: processors with a prefix, criteria of the caller's, records.
        """
        if not any(self.sequences.finished):
            return
        going = [not finished for finished in self.live(self.sequences.finished)]
        # Each time all caches are copied once, which a round or two of a smaller batch make up for.
        if sum(going) > 0.75 * len(going) or not any(going) or self.sequences.done:
            return
        if not (generator.drops_rows and self.accept.prefix_free and self.trace is None) or self.records.keeps_any:
            return
        if self.target.bound_rows is not None:
            return
        if self.outcomes and self.budget is not None:
            # A smaller batch is another matter: see whether drafting pays there.
            self.budget.resume()
            generator.observe(self.outcomes[0].followed_by(self.outcomes[1:]))
            self.outcomes = []
        kept = [place for place, on in enumerate(going) if on]
        self.rows = [self.live(range(self.sequences.batch))[place] for place in kept]
        self.row_ids = from_host(self.rows, self.sequences.ids.device)
        self.target.keep_rows(kept)
        generator.keep_rows(kept)
        self.root_ids = self.root_ids[from_host(kept, self.root_ids.device)]
        self.early_tree = None if self.early_tree is None else self.early_tree.of_rows(kept)
        self.nan_rows = None if self.nan_rows is None else self.nan_rows[kept]

    def judge(
        self, tree: DraftTree, output: TargetOutput, active: list[bool], ahead: DraftsAhead | None = None
    ) -> tuple[DraftTree, TargetOutput, Acceptance]:
        """Lets the target choose, and appends what it chose to the sequences; the round's only host sync is here.

        Args:
            tree: that was verified.
            output: of the target.
            active: per row, whether this is a round of it; of none in the prefill.
            ahead: see `FollowTarget`.

        Returns:
            What was accepted, behind the tree and the output that it was accepted of: those given, or their roots alone
            where the target gave NaN for one of these (`FollowTarget`).
        """
        if self.nan_rows is not None:
            nan_rows = self.nan_rows & output.logits[:, 0, 0].isnan()
            self.nan_rows = nan_rows if bool(nan_rows.any()) else None
        raw_logits = output.logits.clone() if self.records.keeps_logits and self.accept.processors else output.logits
        acceptance = self.accept(tree, output.logits, self.sequences, ahead)
        if _is_spoilt(acceptance, active):
            roots = self.bare_roots(tree)
            return self.judge(roots, self.verify_anew(roots), active)
        self.root_ids = acceptance.bonus_ids
        self.count(acceptance, active)  # before its tokens are streamed: who reads along may ask what was drafted
        kept = self.append(acceptance, acceptance.scores)
        if self.rows is None:
            self.records.append(kept, acceptance, raw_logits, output, tree, self.target.cache)
        return tree, output, acceptance

    def bare_roots(self, tree: DraftTree) -> DraftTree:
        """The roots of a tree; for which of them alone the target gives NaN, `judge` sees in their logits."""
        self.nan_rows = torch.ones_like(tree.valid[:, 0])
        return tree.first_nodes(0).without_drafts(self.nan_rows)

    def append(self, acceptance: Acceptance, scores: Tensor | None) -> list[int]:
        """Appends what the target chose to the sequences; returns how many tokens of each row were kept."""
        tokens = acceptance.tokens
        if self.rows is not None:
            tokens = [[] for _ in range(self.sequences.batch)]
            for row, new in zip(self.rows, acceptance.tokens, strict=True):
                tokens[row] = new
        return self.sequences.append(tokens, self.records.scores_including(scores))

    def commit(self, acceptance: Acceptance, active: list[bool], tree: DraftTree, output: TargetOutput) -> RoundOutcome:
        """Keeps root and accepted nodes in the target's cache, and tells what was kept."""
        num_accepted = acceptance.num_accepted
        counts = [len(tokens) if going else 0 for tokens, going in zip(acceptance.tokens, active, strict=True)]
        steps = max(counts)
        path = acceptance.path[:, :steps]
        order = count_up(steps, path.device)
        valid = None
        if min(counts) < steps:
            valid = order < from_host(counts, path.device).unsqueeze(1)
        features = output.features
        if acceptance.leading:
            features = None if features is None else features[:, :steps]
            self.target.cache.commit_first(counts)
        else:
            features = None if features is None else pick(features, path.to(features.device))
            self.target.cache.commit(path, counts)
        return RoundOutcome(
            token_ids=acceptance.path_ids[:, :steps],
            features=features,
            position_ids=self.root_positions.unsqueeze(1) + order,
            valid=valid,
            num_committed=counts,
            num_accepted=num_accepted,
            target_logits=output.logits,
            tree=tree,
            path=path,
            tokens=acceptance.tokens,
        )

    def count(self, acceptance: Acceptance, active: list[bool]) -> None:
        """Adds a round to the statistics."""
        everyone = range(self.sequences.batch)
        for row in (row for row, going in enumerate(active) if going):
            self.stats.per_step_accepted[self.live(everyone)[row]].append(len(acceptance.tokens[row]) - 1)
            self.stats.num_draft_tokens += acceptance.num_drafted[row]
            if not acceptance.finite[row]:
                self.stats.num_plain_steps += 1
                self.num_nan_rounds += int(self.nan_rows is not None and bool(self.nan_rows[row]))

    def report_fallbacks(self) -> None:
        """Says of a call whose rounds fell back to plain decoding how many did, and why; as a warning if most did."""
        plain, of_target = self.stats.num_plain_steps, self.num_nan_rounds
        if not plain:
            return
        reasons = []
        if plain > of_target:
            by = f"the drafter ({self.stats.method}) gave NaN or infinite logits"
            reasons.append(f"{by}, or a token that the target gives NaN for")
        if of_target:
            reasons.append(f"in {of_target} of them the target itself gives NaN for the row, as in plain decoding")
        message = (
            f"{plain} of {self.stats.num_spec_steps} rounds were decoded plainly (stats.num_plain_steps): "
            f"{'; '.join(reasons)}. The output is not affected."
        )
        if 2 * plain <= self.stats.num_spec_steps:
            logger.warning(message)
            return
        way_out = "Check the drafter's weights and dtype, or generate without assistant_model."
        if 2 * of_target > plain:
            way_out = (
                "Left padding with attn_implementation='eager' in float64 does this: load the target with 'sdpa', "
                "or in float32."
            )
        warnings.warn(f"{message} {way_out}", stacklevel=2)

    def hand_back_cache(self, output_ids: Tensor) -> None:
        """Leaves `past_key_values` as plain decoding would: all output tokens of every row but the last."""
        self.target.restore_rows()
        cache = self.target.cache
        entries = output_ids.shape[1] - 1 + self.entry_offset
        known = [min(length - 1 + self.entry_offset, entries) for length in self.sequences.lengths]
        cache.rollback([min(have, length) for have, length in zip(known, cache.row_lengths, strict=True)])
        missing = [entries - length for length in cache.row_lengths]
        if any(missing):
            # Rows that ended early: plain decoding has run their padding through the target as well.
            longest = max(missing)
            columns = torch.arange(longest, device=output_ids.device)
            starts = torch.tensor(cache.row_lengths, device=output_ids.device).unsqueeze(1) - self.entry_offset
            token_ids = output_ids.gather(1, (starts + columns).clamp(max=output_ids.shape[1] - 1))
            self.target.verify(DraftTree.chain(token_ids), self.target.root_positions())
            cache.commit_first(missing)
        cache.to_dynamic(self.model_kwargs["past_key_values"], entries)


def _is_spoilt(acceptance: Acceptance, active: list[bool]) -> bool:
    """Whether the target gave NaN for the root of a row that goes on."""
    return any(on and not tokens for on, tokens in zip(active, acceptance.tokens, strict=True))
