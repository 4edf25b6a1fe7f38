"""A language model as drafter in one `generate` call: its cache, and chains or trees drafted token by token.

The draft model runs its unfinished tree with `TargetModel.verify`, one forward per level (captured, if the target's
are), and the cache holds the earlier levels. A round begins with the root, preceded by the last committed token if that
was a leaf, which was drafted but never run.
"""

from __future__ import annotations

import logging
import math
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_specdec.decoding.exchange import NodeNotes
from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.graphs import NODE_BUCKETS
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.support import keeps_states
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree, from_host, pick
from hf_specdec.drafters.causal_lm.draft_model import DraftModel
from hf_specdec.drafters.causal_lm.stopping import StoppingRule
from hf_specdec.drafters.growth import path_notes

logger = logging.getLogger(__name__)


class DraftModelGenerator(TreeCandidateGenerator):
    """Common part of chains and trees: keeps the draft model's cache in step with the committed tokens.

    Args:
        drafter: the draft model, for this call.
        target: the target of this call; its prompt's padding is also the draft model's.
        max_depth: most tokens of one path.
        stopping: when drafting ends early.
    """

    drops_rows = True

    def __init__(self, drafter: DraftModel, target: TargetModel, max_depth: int, stopping: StoppingRule) -> None:
        self.drafter = drafter
        self.target = target
        self.max_depth = max_depth
        self.stopping = stopping
        self.prefilled = False
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
        if self.prefilled:
            if self.pending is not None:  # else the nodes of the latest round would be lost
                self.keep_accepted(self.pending)
            self.drafter.keep_rows(rows, permanent=True)
        self.pending, self.has_nodes = None, False

    def close(self) -> None:
        if self.prefilled:
            self.drafter.cache.release()

    @property
    def rewinds(self) -> bool:
        """Whether a text that is not committed can be dropped again; recurrent states cannot be cut."""
        return not keeps_states(self.drafter.model)

    def draft_text(self, context: DraftContext, certain: Sequence[int]) -> DraftTree:
        """The tree for a text of which only the first tokens are committed, `certain` of each row; it is not kept.

        The tokens that it has in addition are run with the root, in one forward.
        """
        if self.prefilled:
            self.drafter.cache.rollback()
        self.pending, self.has_nodes = None, False
        tree = self.draft(context)
        if self.prefilled:
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
        if self.num_positions is not None and max(lengths) + self.max_depth > self.num_positions:
            if not self.overrun:
                self.overrun = True
                logger.warning(
                    "The draft model has %d positions and the text is longer: the rest is decoded without drafts.",
                    self.num_positions,
                )
            return None
        if not self.prefilled:
            if min(lengths) < 2:  # the prompt was passed as embeddings, which the draft model cannot read
                return None
            self._prefill(context.sequences[:, : min(lengths) - 1])
            self.prefilled = True
        elif self.pending is not None:
            self.keep_accepted(self.pending)
        self.pending, self.has_nodes = None, True

        cache = self.drafter.cache
        lags = [max(1, length - known) for length, known in zip(lengths, cache.row_lengths, strict=True)]
        if cache.keeps_states and min(lags) < max(lags):
            return self._catch_up(context, lags)
        # Rows lack different numbers of tokens; running a cached token again costs less than a mask for padding.
        steps = max(lags)
        starts = [length - steps for length in lengths]
        if starts != cache.row_lengths:
            cache.rollback(starts)
        if min(starts) == max(starts):
            token_ids = context.sequences[:, starts[0] : lengths[0]]
        else:
            columns = torch.tensor([list(range(start, start + steps)) for start in starts])
            token_ids = context.sequences.gather(1, columns.to(context.sequences.device))
        chain = DraftTree.chain(token_ids.to(self.drafter.model.device))
        # The root is the last of these nodes, and becomes node 0 of the round.
        logits = self.drafter.verify(chain, self.drafter.root_positions(), lead=steps - 1).logits[:, -1]
        cache.commit_and_continue(steps - 1)
        cache.continue_round(1)
        return logits

    def _catch_up(self, context: DraftContext, lags: Sequence[int]) -> Tensor:
        """Runs the missing tokens of each row, `lags` of them; with recurrent states no token can be run again."""
        cache, device = self.drafter.cache, self.drafter.model.device
        columns = [
            [min(length - 1, length - lag + step) for step in range(max(lags))]
            for length, lag in zip(context.lengths, lags, strict=True)
        ]
        token_ids = context.sequences.gather(1, torch.tensor(columns, device=context.sequences.device)).to(device)
        logits = self.drafter.verify(DraftTree.chain(token_ids), self.drafter.root_positions()).logits
        cache.regroup([range(lag - 1) for lag in lags], [[lag - 1] for lag in lags])
        return pick(logits, torch.tensor(lags, device=logits.device).unsqueeze(1) - 1)[:, 0]

    def _prefill(self, token_ids: Tensor) -> None:
        drafter = self.drafter
        length, device = token_ids.shape[1], drafter.model.device
        mask = self.target.prompt_mask
        if mask is not None:  # its length differs if a cache was continued with only the new tokens
            mask = mask.to(device) if mask.shape[1] == length else None
        # Drafted nodes may use all positions of the model.
        drafter.prefill_for_drafting(token_ids.to(device), mask, self.num_positions or sys.maxsize)
        room = length + 256
        if drafter.compiles:  # buffers with the target's capacity suffice for the whole call
            room = max(room, self.target.cache.capacity - NODE_BUCKETS[-1])
        drafter.begin_rounds(room)


class ChainGenerator(DraftModelGenerator):
    """One path: the likeliest tokens, or sampled ones with their distribution, if the call samples and `sample_drafts`.

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """

    def __init__(
        self, drafter: DraftModel, target: TargetModel, max_depth: int, stopping: StoppingRule, sample_drafts: bool
    ) -> None:
        super().__init__(drafter, target, max_depth, stopping)
        self.sample_drafts = sample_drafts
        self.num_run = 0  # nodes of the chain, root included, that the draft model has run
        # [batch] each, the probabilities of the latest chain's tokens; empty if nothing asked for them.
        self.own_probs: list[Tensor] = []
        self.longest_chain: DraftTree | None = None

    def keep_rows(self, rows: Sequence[int]) -> None:
        super().keep_rows(rows)
        self.longest_chain = None

    def keep_accepted(self, committed: Committed) -> None:
        assert committed.path is not None
        drafted = (committed.path >= 0).sum(1).tolist()
        known = zip(committed.num_committed, drafted, strict=True)
        counts = [min(count, own, self.num_run) for count, own in known]
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
        max_depth = self.max_depth if context.node_limit is None else min(self.max_depth, context.node_limit)
        least, self.own_probs = context.least_prob, []
        sampled = context.choice.do_sample and self.sample_drafts
        while True:
            if sampled:
                # Rows with non-finite logits get no draft, but take part in the shared call of multinomial.
                scores = logits.where(top.values.isfinite(), 0.0)
                scores = context.choice.warpers(token_ids[:, -1:], scores)
                probs = scores.softmax(-1)
                chosen = torch.multinomial(probs, num_samples=1)
                draft_probs.append(probs)
            else:
                scores, chosen = logits, top.indices
            token_ids = torch.cat([token_ids, chosen], dim=1)
            self.num_run = token_ids.shape[1] - 1
            if self.stopping.in_use or least is not None:
                log_probs = scores.log_softmax(-1)
                own = log_probs.gather(1, chosen).squeeze(1)
                self.own_probs.append(own.exp())
            if self.num_run == max_depth:
                break
            # The decision to continue must not depend on the next token: else the remaining drafts would have another
            # distribution than the recorded one.
            if self.stopping.in_use or least is not None:
                log_path = log_path + own
                active = active & self.stopping.continues(log_path, log_probs) & (own.exp() >= (least or 0.0))
                if not bool(active.any()):
                    break
            chain = self._chain(token_ids)
            logits = self.drafter.verify(chain, root_positions, first=self.num_run).logits[:, -1]
            self.drafter.cache.continue_round(1)
            self.num_run += 1
            top = logits.max(-1, keepdim=True)
            active = active & top.values.squeeze(1).isfinite()
            valid.append(active)
        device = context.root_ids.device
        return DraftTree.chain(
            token_ids.to(device),
            valid=torch.stack(valid, dim=1).to(device),
            finite=finite.to(device),
            draft_probs=torch.stack(draft_probs, dim=1).to(device) if draft_probs else None,
        )

    def describe(self, tree: DraftTree) -> NodeNotes:
        probs = None
        if tree.draft_probs is not None:
            chosen = tree.draft_probs.gather(-1, tree.token_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            probs = torch.nn.functional.pad(chosen, (1, 0), value=1.0)
        elif self.own_probs:
            chosen = torch.stack(self.own_probs, dim=1)[:, : tree.num_nodes - 1].to(tree.token_ids.device)
            probs = torch.nn.functional.pad(chosen, (1, 0), value=1.0)
        return NodeNotes(probs, tree.depths)  # one forward per token

    def _chain(self, token_ids: Tensor) -> DraftTree:
        """The chain of these tokens, with slices of a structure that is built once per call."""
        batch, nodes = token_ids.shape
        if self.longest_chain is None:
            self.longest_chain = DraftTree.chain(token_ids.new_zeros(batch, self.max_depth))
        longest = self.longest_chain
        return replace(
            longest,
            token_ids=token_ids,
            depths=longest.depths[:, :nodes],
            ancestor_mask=longest.ancestor_mask[:, :nodes, :nodes],
            max_depth=nodes - 1,
        )


class TreeGenerator(DraftModelGenerator):
    """The likeliest `tree_budget` paths, found by expanding the best `width` nodes of each level.

    A path's probability is the product of its tokens', so no node is likelier than its parent. A node that is not among
    the best so far will never be, and is not expanded. Shape of EAGLE-2 (arXiv 2406.16858, Section 4), with a complete
    language model as drafter.
    """

    def __init__(
        self,
        drafter: DraftModel,
        target: TargetModel,
        max_depth: int,
        stopping: StoppingRule,
        tree_budget: int,
        width: int,
    ) -> None:
        super().__init__(drafter, target, max_depth, stopping)
        self.tree_budget = tree_budget
        self.width = width
        # Per row and node of the returned tree: its index in the draft model's cache; -1 for nodes that it has not run.
        self.cache_indices: list[list[int]] = []
        self.drafted: list[list[float]] = []  # log-probability of the path to each node of the latest tree

    def keep_rows(self, rows: Sequence[int]) -> None:
        super().keep_rows(rows)
        self.cache_indices = [self.cache_indices[row] for row in rows] if self.cache_indices else []

    def keep_accepted(self, committed: Committed) -> None:
        assert committed.path is not None
        cache = self.drafter.cache
        paths = []
        for row, path in enumerate(committed.path.tolist()):
            indices = [self.cache_indices[row][node] for node in path[: committed.num_committed[row]] if node >= 0]
            paths.append([index for index in indices if index >= 0])  # only leaves have none
        steps = max(1, *map(len, paths))
        padded = from_host([path + [0] * (steps - len(path)) for path in paths], cache.device)
        cache.commit(padded, Counts.of([len(path) for path in paths], cache.device))

    def draft(self, context: DraftContext) -> DraftTree:
        logits = self.run_root(context)
        if logits is None:
            return DraftTree.root_only(context.root_ids)
        root_positions = self.drafter.root_positions()
        budget = self.tree_budget if context.node_limit is None else min(self.tree_budget, context.node_limit)
        least = -math.inf if context.least_prob is None else math.log(context.least_prob)
        rows = [Expansion(root) for root in context.root_ids.tolist()]
        frontiers = [[0] if active else [] for active in context.active]
        # The nodes run so far, in the order of the draft model's cache. All rows have the same number, with padding.
        run_ids, run_parents = [[row.token_ids[0]] for row in rows], [[-1] for _ in rows]
        logits = logits.unsqueeze(1)
        for depth in range(1, self.max_depth + 1):
            log_probs = logits.log_softmax(-1)
            best = log_probs.topk(min(self.width, budget, logits.shape[-1]), dim=-1)
            certain = self.stopping.certain(log_probs).tolist() if self.stopping.in_use else None
            values, token_ids = best.values.tolist(), best.indices.tolist()
            for row, expansion in enumerate(rows):
                sure = None if certain is None else certain[row]
                expansion.grow(frontiers[row], token_ids[row], values[row], sure, least)
                frontiers[row] = (
                    expansion.frontier(self.width, budget, self.stopping.least_log_path)
                    if depth < self.max_depth
                    else []
                )
            width = max(map(len, frontiers))
            if not width:
                break
            if self.drafter.static is not None:  # captured levels have a fixed width
                width = min(self.width, self.tree_budget)
            first = len(run_ids[0])
            for row, expansion in enumerate(rows):
                for index, node in enumerate(frontiers[row], start=first):
                    expansion.cache_indices[node] = index
                    run_ids[row].append(expansion.token_ids[node])
                    run_parents[row].append(expansion.cache_indices[expansion.parents[node]])
                missing = width - len(frontiers[row])
                run_ids[row] += [run_ids[row][0]] * missing
                run_parents[row] += [0] * missing
            partial = DraftTree.from_lists(run_ids, run_parents, device=logits.device)
            logits = self.drafter.verify(partial, root_positions, first=first).logits
            self.drafter.cache.continue_round(width)
        context.lap("draft")
        best_nodes = [expansion.likeliest(budget) for expansion in rows]
        selected = list(zip(rows, best_nodes, strict=True))
        self.cache_indices = [[row.cache_indices[node] for node in nodes] for row, nodes in selected]
        self.drafted = [[row.scores[node] for node in nodes] for row, nodes in selected]
        device = context.root_ids.device
        tree = DraftTree.from_lists(
            [[row.token_ids[node] for node in nodes] for row, nodes in selected],
            [row.parents_among(nodes) for row, nodes in selected],
            finite=torch.tensor([row.finite for row in rows], device=device),
            path_logprobs=self.drafted,
            device=device,
        )
        context.lap("tree")
        return tree

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        if tree.num_nodes == 1:  # nothing was drafted
            return None
        scores = torch.tensor([(row + [0.0] * tree.num_nodes)[: tree.num_nodes] for row in self.drafted])
        return path_notes(tree, scores.to(tree.token_ids.device), tree.depths)  # one forward per level


class Expansion:
    """The nodes that the draft model has predicted for one row, in order; node 0 is the root."""

    def __init__(self, root_id: int) -> None:
        self.token_ids = [root_id]
        self.parents = [-1]
        self.scores = [0.0]  # log-probability of the path, nats
        self.cache_indices = [0]  # index of each node in the cache, -1 for nodes that the draft model has not run
        self.expandable = [True]
        self.level_start = 0  # first node of the newest level
        self.finite = True

    def grow(
        self,
        frontier: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        certain: Sequence[bool] | None,
        least_log_prob: float = -math.inf,
    ) -> None:
        """Adds a level: the best continuations of each node of the frontier; [frontier][ranks] each.

        `certain` says per node of the frontier whether its continuations may be expanded in turn; those less likely
        than `least_log_prob` (nats) are not.
        """
        self.level_start = len(self.token_ids)
        for index, node in enumerate(frontier):
            if not math.isfinite(log_probs[index][0]):
                # NaN or infinite logits; at the root they make the whole tree invalid.
                self.finite = self.finite and node != 0
                continue
            for token, log_prob in zip(token_ids[index], log_probs[index], strict=False):
                if log_prob == -math.inf:
                    break
                self.token_ids.append(token)
                self.parents.append(node)
                self.scores.append(self.scores[node] + log_prob)
                self.cache_indices.append(-1)
                self.expandable.append((certain is None or certain[index]) and log_prob >= least_log_prob)

    def likeliest(self, budget: int) -> list[int]:
        """The root and the `budget` likeliest other nodes in order; a tree, as no node is likelier than its parent."""
        # The sort is stable, so a parent precedes a child with the same score.
        nodes = sorted(range(1, len(self.scores)), key=self.scores.__getitem__, reverse=True)
        return [0, *nodes[:budget]]

    def frontier(self, width: int, budget: int, least_log_path: float) -> list[int]:
        """The likeliest `width` nodes of the newest level that may have descendants in a tree of `budget` nodes."""
        level = [
            node
            for node in self.likeliest(budget)
            if node >= self.level_start and self.expandable[node] and self.scores[node] >= least_log_path
        ]
        return sorted(sorted(level, key=self.scores.__getitem__, reverse=True)[:width])

    def parents_among(self, nodes: Sequence[int]) -> list[int]:
        """The parents of `nodes` as indices into `nodes`."""
        index = {node: position for position, node in enumerate(nodes)}
        return [index.get(self.parents[node], -1) for node in nodes]
