"""How draft models draft: one forward per level over the unfinished draft, as a chain or as a tree."""

from __future__ import annotations

import logging
import math
import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.exchange import Committed, DraftContext, NodeNotes
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.noise import draw
from hf_specdec.decoding.speed import cuda_graphs
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets.support import keeps_states
from hf_specdec.decoding.tree import DraftTree, from_host, pick
from hf_specdec.drafting.draft_model import DraftModel
from hf_specdec.drafting.growth import best_tree, grow_levels

if TYPE_CHECKING:
    from hf_specdec.methods.causal_lm.network import CausalLMOptions

logger = logging.getLogger(__name__)

MAX_DEPTH = 256


def acceptance_bound(log_probs: Tensor, entropy_weight: float) -> Tensor:
    """A lower bound of a token's acceptance probability, from its draft distribution's entropy H: 1 - sqrt(weight H).

    AdaEDL (arXiv 2410.18351). The bound holds for targets that are close enough to the drafter, which the weight
    expresses.

    Args:
        log_probs: [..., vocab] float32, nats.
        entropy_weight: a larger weight assumes less agreement.

    Returns:
        [...] float32, at most 1; may be negative.

    Examples:
        >>> acceptance_bound(torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]).log(), 0.2)
        tensor([0.4734, 1.0000])
    """
    terms = (log_probs.exp() * log_probs).nan_to_num(nan=0.0)  # 0 log 0 is 0
    return 1 - (-entropy_weight * terms.sum(-1)).clamp(min=0).sqrt()


class DraftModelGenerator(TreeCandidateGenerator):
    """Common part of chains and trees: keeps the draft model's cache in step with the committed tokens.

    Args:
        drafter: the draft model, for this call.
        target: the target of this call; its prompt's padding is also the draft model's.
        options: of this call.
    """

    def __init__(self, drafter: DraftModel, target: TargetModel, options: CausalLMOptions) -> None:
        self.drafter, self.target, self.options = drafter, target, options
        self.num_prefilled = 0  # tokens of each row, padding included
        self.overrun = False
        self.has_nodes = False  # whether its cache holds nodes of the latest round
        self.pending: Committed | None = None  # the result of that round
        # None for models without a limit in their config.
        self.num_positions: int | None = getattr(drafter.config, "max_position_embeddings", None)

    def observe(self, committed: Committed) -> None:
        self.drafter.vocab_size = committed.target_logits.shape[-1]
        # The draft model has run nothing in skipped rounds; their tokens are run with the next root.
        if self.has_nodes and self.pending is None:
            self.pending = committed

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.end_round()
        if self.num_prefilled:
            self.drafter.keep_rows(rows, permanent=True)

    def why_apart(self) -> str | None:
        most = self.target.last_entry + 1
        if self.num_positions is None or most + self.options.depth <= self.num_positions:
            return None
        return (
            f"the draft model has {self.num_positions} positions, and this text may have {most} tokens, with up to "
            f"{self.options.depth} drafted ones"
        )

    def join(self, others: Sequence[Any], places: Sequence[int]) -> None:
        for each in (self, *others):
            each.end_round()
        self.drafter.join([other.drafter for other in others], places)
        self.num_prefilled = 1  # no row has padding

    def end_round(self) -> None:
        """Commits what the latest round has kept."""
        if self.num_prefilled and self.pending is not None:  # else the nodes of the latest round would be lost
            self.keep_accepted(self.pending)
        self.pending, self.has_nodes = None, False

    def close(self) -> None:
        if self.num_prefilled:
            self.drafter.cache.release()

    @property
    def rewinds(self) -> bool:
        """Whether a text that is not committed can be dropped again; recurrent states cannot be cut."""
        return not keeps_states(self.drafter.model)

    def draft_text(self, context: DraftContext, certain: Sequence[int]) -> DraftTree:
        """The tree for a text of which only the first tokens are committed, `certain` of each row; it is not kept.

        The tokens that it has in addition are run with the root, in one forward.
        """
        if self.num_prefilled:
            self.drafter.cache.rollback()
        self.pending, self.has_nodes = None, False
        tree = self.draft(context)
        if self.num_prefilled:
            cache = self.drafter.cache
            cache.rollback([min(own, known) for own, known in zip(cache.row_lengths, certain, strict=True)])
        self.pending, self.has_nodes = None, False
        return tree

    @abstractmethod
    def keep_accepted(self, committed: Committed) -> None:
        """Commits the accepted nodes that the draft model has run to its cache."""

    def run_root(self, context: DraftContext) -> Tensor | None:
        """Runs all tokens that the draft model's cache lacks, up to the root, which becomes node 0 of the round.

        Returns:
            [batch, vocab] float32 logits after the root; None if the draft model cannot draft here.
        """
        lengths = context.lengths
        if self.num_positions is not None and max(lengths) + self.options.depth > self.num_positions:
            if not self.overrun:
                self.overrun = True
                logger.warning(
                    "The draft model has %d positions and the text is longer: the rest is decoded without drafts.",
                    self.num_positions,
                )
            return None
        if not self.num_prefilled:
            if min(lengths) < 2:  # the prompt was passed as embeddings, which the draft model cannot read
                return None
            self._prefill(context.sequences[:, : min(lengths) - 1])
            self.num_prefilled = min(lengths) - 1
        elif self.pending is not None:
            self.keep_accepted(self.pending)
        self.pending, self.has_nodes = None, True

        cache = self.drafter.cache
        lags = [max(1, length - known) for length, known in zip(lengths, cache.row_lengths, strict=True)]
        if cache.keeps_states and min(lags) < max(lags):
            return self._catch_up(context, lags)
        # Rows lack different numbers of tokens; running a cached token again costs less than a mask for padding.
        if min(lengths) - max(lags) < self.num_prefilled:  # but a row has too few: it ended, and others went on
            self.drafter.verify(self._missing(context, lags), self.drafter.root_positions(), logits=False)
            cache.commit_first(Counts.of([lag - 1 for lag in lags], cache.device))
            lags = [1] * len(lags)
        steps = max(lags)
        starts = [length - steps for length in lengths]
        if starts != cache.row_lengths:
            cache.rollback(starts)
        if min(starts) == max(starts):
            token_ids = context.sequences[:, starts[0] : lengths[0]]
        else:
            columns = from_host([list(range(start, start + steps)) for start in starts], context.sequences.device)
            token_ids = context.sequences.gather(1, columns)
        chain = DraftTree.chain(token_ids.to(self.drafter.model.device))
        # The root is the last of these nodes, and becomes node 0 of the round.
        logits = self.drafter.verify(chain, self.drafter.root_positions(), lead=steps - 1).logits[:, -1]
        cache.commit_and_continue(steps - 1)
        cache.continue_round(1)
        return logits

    def _missing(self, context: DraftContext, lags: Sequence[int]) -> DraftTree:
        """A chain of the last `lags` tokens of each row, with its last one repeated behind them."""
        columns = [
            [min(length - 1, length - lag + step) for step in range(max(lags))]
            for length, lag in zip(context.lengths, lags, strict=True)
        ]
        token_ids = context.sequences.gather(1, from_host(columns, context.sequences.device))
        return DraftTree.chain(token_ids.to(self.drafter.model.device))

    def _catch_up(self, context: DraftContext, lags: Sequence[int]) -> Tensor:
        """Runs the missing tokens of each row, `lags` of them; with recurrent states no token can be run again."""
        logits = self.drafter.verify(self._missing(context, lags), self.drafter.root_positions()).logits
        self.drafter.cache.regroup([range(lag - 1) for lag in lags], [[lag - 1] for lag in lags])
        return pick(logits, from_host(list(lags), logits.device).unsqueeze(1) - 1)[:, 0]

    def _prefill(self, token_ids: Tensor) -> None:
        drafter = self.drafter
        length, device = token_ids.shape[1], drafter.model.device
        mask = self.target.text_mask(length)
        # Drafted nodes may use all positions of the model.
        drafter.prefill_for_drafting(
            token_ids.to(device), None if mask is None else mask.to(device), self.num_positions or sys.maxsize
        )
        room = length + 256
        if drafter.compile_mode != "none":  # buffers with the target's capacity suffice for the whole call
            room = max(room, self.target.cache.capacity - 1 - cuda_graphs.DRAFT_SIZES[-1])
        drafter.begin_rounds(room)


class DraftModelChain(DraftModelGenerator):
    """One path: the likeliest tokens, or drawn ones with their distribution if the call samples and `sample_drafts`."""

    def __init__(self, drafter: DraftModel, target: TargetModel, options: CausalLMOptions) -> None:
        super().__init__(drafter, target, options)
        self.num_run = 0  # nodes of the chain, root included, that the draft model has run
        # [batch] each, the probabilities of the latest chain's tokens; empty if nothing asked for them.
        self.own_probs: list[Tensor] = []

    def keep_accepted(self, committed: Committed) -> None:
        assert committed.path is not None
        counts = [min(count, self.num_run) for count in committed.num_committed]
        if abilities(committed.path.device).host_memory:
            own = (committed.path >= 0).sum(1).tolist()
            counts = [min(both) for both in zip(counts, own, strict=True)]
        self.drafter.cache.commit_first(Counts.of(counts, self.drafter.cache.device))

    def draft(self, context: DraftContext) -> DraftTree:
        logits = self.run_root(context)
        if logits is None:
            return DraftTree.root_only(context.root_ids)
        device = logits.device
        root_positions = self.drafter.root_positions()
        token_ids = context.root_ids.to(device).unsqueeze(1)
        top = logits.max(-1, keepdim=True)
        finite = top.values.squeeze(1).isfinite()
        valid, draft_probs, active = [torch.ones_like(finite), finite], [], finite
        log_path = torch.zeros_like(logits[:, 0])
        options, least, self.own_probs = self.options, context.least_prob, []
        most = context.at_most(options.depth)
        sampled = context.choice.do_sample and options.sample_drafts
        needs_probs = any(limit is not None for limit in (options.min_confidence, options.min_acceptance, least))
        while True:
            if sampled:
                # Rows with non-finite logits get no draft, but must have a distribution.
                scores = logits.where(top.values.isfinite(), 0.0)
                scores = context.choice.warpers(token_ids[:, -1:], scores)
                probs = scores.softmax(-1)
                chosen = draw(probs).unsqueeze(1)
                draft_probs.append(probs)
            else:
                scores, chosen = logits, top.indices
            token_ids = torch.cat([token_ids, chosen], dim=1)
            self.num_run = token_ids.shape[1] - 1
            if needs_probs:
                log_probs = scores.log_softmax(-1)
                own = log_probs.gather(1, chosen).squeeze(1)
                self.own_probs.append(own.exp())
            if self.num_run == most:
                break
            # The decision to continue must not depend on the next token: else the remaining drafts would have another
            # distribution than the recorded one.
            if needs_probs:
                log_path = log_path + own
                active = active & (log_path >= options.least_log_path) & options.certain(log_probs)
                active = active & (own.exp() >= (least or 0.0))
                if not bool(active.any()):
                    break
            chain = DraftTree.chain(token_ids)
            logits = self.drafter.verify(chain, root_positions, first=self.num_run).logits[:, -1]
            self.drafter.cache.continue_round(1)
            self.num_run += 1
            top = logits.max(-1, keepdim=True)
            active = active & top.values.squeeze(1).isfinite()
            valid.append(active)
        return DraftTree.chain(
            token_ids,
            valid=torch.stack(valid, dim=1),
            finite=finite,
            draft_probs=torch.stack(draft_probs, dim=1) if draft_probs else None,
        )

    def describe(self, tree: DraftTree) -> NodeNotes:
        probs = None
        if tree.draft_probs is not None:
            probs = tree.draft_probs.gather(-1, tree.token_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        elif self.own_probs:
            probs = torch.stack(self.own_probs, dim=1)[:, : tree.num_nodes - 1].to(tree.token_ids.device)
        if probs is not None:
            probs = pad(probs, (1, 0), value=1.0)
        return NodeNotes(probs, tree.depths)  # one forward per token


class DraftModelTree(DraftModelGenerator):
    """The likeliest `tree_budget` paths, found by expanding the best `top_k` nodes of each level.

    A path's probability is the product of its tokens', so no node is likelier than its parent. A node that is not among
    the best so far will never be, and is not expanded.
    """

    def __init__(self, drafter: DraftModel, target: TargetModel, options: CausalLMOptions) -> None:
        super().__init__(drafter, target, options)
        # [batch, nodes] of the latest tree: each node's index in the draft model's cache, -1 if it has not run it.
        self.cache_indices: Tensor

    def keep_accepted(self, committed: Committed) -> None:
        assert committed.path is not None
        path = committed.path.to(self.cache_indices.device)
        steps = torch.arange(path.shape[1], device=path.device)
        mine = (path >= 0) & (steps < committed.counts.to(path.device).tensor.unsqueeze(1))
        indices = self.cache_indices.gather(1, path.clamp(min=0)).where(mine, -1)  # only leaves have none
        counts = Counts.of((indices >= 0).sum(1).tolist(), path.device)
        self.drafter.cache.commit(indices.clamp(min=0), counts)

    def draft(self, context: DraftContext) -> DraftTree:
        logits = self.run_root(context)
        options = self.options
        budget = context.at_most(options.node_limit)
        if logits is None:
            return DraftTree.root_only(context.root_ids)
        batch, device = len(logits), logits.device
        roots = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.cache_indices = roots
        if not budget:
            return DraftTree.root_only(context.root_ids)
        ranks = min(options.top_k, budget, logits.shape[-1])
        least = -math.inf if context.least_prob is None else math.log(context.least_prob)
        # Captured levels have a fixed width.
        fixed = 0 if self.drafter.static is None else min(options.top_k, options.node_limit)
        run = DraftTree.root_only(context.root_ids.to(device))  # the nodes in the cache
        indices, root_positions = [roots[0]], self.drafter.root_positions()

        def extend(level: int, token_ids: Tensor, above: Tensor) -> Tensor:
            nonlocal run
            first, count = run.num_nodes, token_ids.shape[1]
            missing = max(0, fixed - count)
            parents = pad(indices[-1][above], (0, missing))
            own = torch.eye(count + missing, dtype=torch.bool, device=device).expand(batch, -1, -1)
            sees = run.ancestor_mask.gather(1, parents.unsqueeze(-1).expand(-1, -1, first))
            run = DraftTree(
                torch.cat([run.token_ids, pad(token_ids, (0, missing))], 1),
                torch.cat([run.parents, parents], 1),
                pad(run.depths, (0, count + missing), value=level),
                torch.cat([pad(run.ancestor_mask, (0, count + missing)), torch.cat([sees, own], -1)], 1),
                pad(run.valid, (0, count + missing), value=True),
                level,
            )
            indices.append(torch.arange(first, first + count, device=device))
            logits = self.drafter.verify(run, root_positions, first=first).logits
            self.drafter.cache.continue_round(count + missing)
            return logits[:, :count]

        def extendable(scores: Tensor, log_probs: Tensor, candidates: Tensor, best: Tensor) -> Tensor:
            """Which nodes of a level may have descendants in the tree."""
            able = candidates >= scores.topk(min(budget, scores.shape[1])).values[:, -1:]
            able &= (candidates > -torch.inf) & (candidates >= options.least_log_path)
            if least > -math.inf:
                able &= (best >= least).flatten(1)
            if options.min_acceptance is not None:
                able &= options.certain(log_probs).repeat_interleave(ranks, dim=1)
            return able

        start = roots.to(torch.float64 if abilities(device).float64 else torch.float32)
        start[from_host([not active for active in context.active], device)] = -math.inf
        scores, token_ids, parents, finite = grow_levels(
            logits, extend, options.depth, options.top_k, lambda ids: ids, ranks, start, extendable
        )
        context.lap("draft")
        # Every `ranks` candidates have one parent: these are the nodes that were run, the root first.
        where = 1 + parents[:, ::ranks]
        cached = parents.new_full((batch, 1 + parents.shape[1]), -1).scatter(
            1, where, torch.cat(indices).expand_as(where)
        )
        root_ids = context.root_ids.to(device)
        tree = best_tree(root_ids, scores, token_ids, parents, finite, depth=run.max_depth + 1, budget=budget)
        assert tree.path_logprobs is not None
        drafted = int((tree.path_logprobs > -torch.inf).sum(1).max()) - 1
        chosen = scores.argsort(dim=1, descending=True, stable=True)[:, :drafted]
        self.cache_indices = cached.gather(1, pad(1 + chosen, (1, 0)))
        tree = tree.first_nodes(drafted)
        context.lap("tree")
        return tree
