"""A draft model in one `generate` call: its cache beside the target's, and chains or trees it drafts token by token.

The draft model is run over its own unfinished tree just as the target is over the finished one: `TargetModel.verify`,
one forward per level (captured, where the target's are), with the levels before held in the cache. A round begins with
the root, and with the token before it where the last round accepted a leaf, which was drafted but never run.
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

from hf_specdec.decoding.generator import Committed, DraftContext, TreeCandidateGenerator
from hf_specdec.decoding.graphs import NODE_BUCKETS
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import NodeNotes
from hf_specdec.decoding.tree import DraftTree, from_host, pick
from hf_specdec.drafters.base import path_notes
from hf_specdec.drafters.causal_lm.draft_model import DraftModel
from hf_specdec.drafters.causal_lm.stopping import StoppingRule

logger = logging.getLogger(__name__)


class DraftModelGenerator(TreeCandidateGenerator):
    """What drafting chains and trees with a language model have in common: keeping its cache level with the text.

    Args:
        drafter: the draft model, for this call.
        target: the target of this call; its prompt's padding is the draft model's too.
        max_depth: most tokens of one path.
        stopping: when a path is not worth another forward.
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
        self.pending: Committed | None = None  # what came of them
        # None for models that do not say how far they can count.
        self.num_positions: int | None = getattr(drafter.config, "max_position_embeddings", None)

    def observe(self, committed: Committed) -> None:
        self.drafter.vocab_size = committed.target_logits.shape[-1]
        # Of rounds that it was not asked for the draft model has run nothing; their tokens are text like any other.
        if self.has_nodes and self.pending is None:
            self.pending = committed

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.prefilled:
            if self.pending is not None:  # the nodes of the round in flight would be lost
                self.keep_accepted(self.pending)
            self.drafter.keep_rows(rows, for_good=True)
        self.pending, self.has_nodes = None, False

    def close(self) -> None:
        if self.prefilled:
            self.drafter.cache.release()

    @abstractmethod
    def keep_accepted(self, committed: Committed) -> None:
        """Commits what the draft model has run of the accepted path to its cache."""

    def run_root(self, context: DraftContext) -> Tensor | None:
        """Brings the draft model's cache level with the text, and holds the root there as node 0 of the round.

        Returns:
            [batch, vocab] float32 logits after the root; None where the draft model can say nothing there.
        """
        lengths = context.lengths
        if self.num_positions is not None and max(lengths) + self.max_depth > self.num_positions:
            if not self.overrun:
                self.overrun = True
                logger.warning(
                    "The draft model knows %d positions, and the text is now longer: the rest is decoded plainly.",
                    self.num_positions,
                )
            return None
        if not self.prefilled:
            if min(lengths) < 2:  # the prompt came as embeddings, which the draft model cannot read
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
        # Rows differ in how far they lag behind; running a known token again costs less than a mask for padding would.
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
        # The root is the last of these nodes, and that is where the round then begins.
        logits = self.drafter.verify(chain, self.drafter.root_positions(), lead=steps - 1).logits[:, -1]
        cache.commit_and_continue(steps - 1)
        cache.continue_round(1)
        return logits

    def _catch_up(self, context: DraftContext, lags: Sequence[int]) -> Tensor:
        """Runs each row's own last tokens, `lags` of them: where states are kept, no token can be run again."""
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
        if mask is not None:  # of another length where a cache was continued with the new tokens only
            mask = mask.to(device) if mask.shape[1] == length else None
        # The positions that the model knows are how far drafted nodes may reach.
        drafter.prefill_for_drafting(token_ids.to(device), mask, self.num_positions or sys.maxsize)
        room = length + 256
        if drafter.compiles:  # buffers as long as the target's serve the whole call
            room = max(room, self.target.cache.capacity - NODE_BUCKETS[-1])
        drafter.begin_rounds(room)


class ChainGenerator(DraftModelGenerator):
    """One path: the likeliest tokens, or with `sample_drafts` in calls that sample, drawn ones that say of which law.

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """

    def __init__(
        self, drafter: DraftModel, target: TargetModel, max_depth: int, stopping: StoppingRule, sample_drafts: bool
    ) -> None:
        super().__init__(drafter, target, max_depth, stopping)
        self.sample_drafts = sample_drafts
        self.num_run = 0  # nodes of the chain, root included, that the draft model has run
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
        valid, laws, going = [torch.ones_like(finite), finite], [], finite
        log_path = torch.zeros_like(logits[:, 0])
        drawn = context.choice.do_sample and self.sample_drafts
        while True:
            if drawn:
                # A row without sensible logits is not drafted for, but the others are drawn in the same call.
                scores = logits.where(top.values.isfinite(), 0.0)
                scores = context.choice.warpers(token_ids[:, -1:], scores)
                law = scores.softmax(-1)
                chosen = torch.multinomial(law, num_samples=1)
                laws.append(law)
            else:
                scores, chosen = logits, top.indices
            token_ids = torch.cat([token_ids, chosen], dim=1)
            self.num_run = token_ids.shape[1] - 1
            if self.num_run == self.max_depth:
                break
            # Whether a path goes on is decided by what was drafted already: a decision that looked at the next token
            # would make the drafts that are left follow another law than the one they carry.
            if self.stopping.in_use:
                log_probs = scores.log_softmax(-1)
                log_path = log_path + log_probs.gather(1, chosen).squeeze(1)
                going = going & self.stopping.goes_on(log_path, log_probs)
                if not bool(going.any()):
                    break
            chain = self._chain(token_ids)
            logits = self.drafter.verify(chain, root_positions, first=self.num_run).logits[:, -1]
            self.drafter.cache.continue_round(1)
            self.num_run += 1
            top = logits.max(-1, keepdim=True)
            going = going & top.values.squeeze(1).isfinite()
            valid.append(going)
        home = context.root_ids.device
        return DraftTree.chain(
            token_ids.to(home),
            valid=torch.stack(valid, dim=1).to(home),
            finite=finite.to(home),
            draft_probs=torch.stack(laws, dim=1).to(home) if laws else None,
        )

    def describe(self, tree: DraftTree) -> NodeNotes:
        probs = None
        if tree.draft_probs is not None:
            drawn = tree.draft_probs.gather(-1, tree.token_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            probs = torch.nn.functional.pad(drawn, (1, 0), value=1.0)
        return NodeNotes(probs, tree.depths)  # a forward per token

    def _chain(self, token_ids: Tensor) -> DraftTree:
        """The chain of these tokens; its structure is cut from one that is made once per call."""
        batch, nodes = token_ids.shape
        if self.longest_chain is None:
            self.longest_chain = DraftTree.chain(token_ids.new_zeros(batch, self.max_depth))
        whole = self.longest_chain
        return replace(
            whole,
            token_ids=token_ids,
            depths=whole.depths[:, :nodes],
            ancestor_mask=whole.ancestor_mask[:, :nodes, :nodes],
            max_depth=nodes - 1,
        )


class TreeGenerator(DraftModelGenerator):
    """The likeliest `tree_budget` paths that the draft model finds when it expands the best `width` nodes per level.

    A path is as likely as its tokens together, so no node beats its parent, and a node that is not among the best so
    far never will be: such nodes are not expanded. The shape of EAGLE-2 (arXiv 2406.16858, Section 4), with a whole
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
        # Per row and node of the tree handed out, where the draft model's cache holds it; -1 for what it has not run.
        self.places: list[list[int]] = []
        self.drafted: list[list[float]] = []  # log-probability of the path to each node of the latest tree

    def keep_rows(self, rows: Sequence[int]) -> None:
        super().keep_rows(rows)
        self.places = [self.places[row] for row in rows] if self.places else []

    def keep_accepted(self, committed: Committed) -> None:
        assert committed.path is not None
        cache = self.drafter.cache
        paths = []
        for row, path in enumerate(committed.path.tolist()):
            places = [self.places[row][node] for node in path[: committed.num_committed[row]] if node >= 0]
            paths.append([place for place in places if place >= 0])  # leaves only are missing
        steps = max(1, *map(len, paths))
        padded = from_host([path + [0] * (steps - len(path)) for path in paths], cache.device)
        cache.commit(padded, Counts.of([len(path) for path in paths], cache.device))

    def draft(self, context: DraftContext) -> DraftTree:
        logits = self.run_root(context)
        if logits is None:
            return DraftTree.root_only(context.root_ids)
        root_positions = self.drafter.root_positions()
        rows = [Expansion(root) for root in context.root_ids.tolist()]
        frontiers = [[0] if active else [] for active in context.active]
        # The nodes run so far as the draft model's cache holds them: all rows have equally many, padded where needed.
        held_ids, held_parents = [[row.token_ids[0]] for row in rows], [[-1] for _ in rows]
        logits = logits.unsqueeze(1)
        for depth in range(1, self.max_depth + 1):
            log_probs = logits.log_softmax(-1)
            best = log_probs.topk(min(self.width, self.tree_budget, logits.shape[-1]), dim=-1)
            certain = self.stopping.certain(log_probs).tolist() if self.stopping.in_use else None
            values, token_ids = best.values.tolist(), best.indices.tolist()
            for row, expansion in enumerate(rows):
                expansion.grow(frontiers[row], token_ids[row], values[row], None if certain is None else certain[row])
                frontiers[row] = (
                    expansion.frontier(self.width, self.tree_budget, self.stopping.least_log_path)
                    if depth < self.max_depth
                    else []
                )
            width = max(map(len, frontiers))
            if not width:
                break
            if self.drafter.static is not None:  # levels of one width have one shape
                width = min(self.width, self.tree_budget)
            first = len(held_ids[0])
            for row, expansion in enumerate(rows):
                for place, node in enumerate(frontiers[row], start=first):
                    expansion.places[node] = place
                    held_ids[row].append(expansion.token_ids[node])
                    held_parents[row].append(expansion.places[expansion.parents[node]])
                missing = width - len(frontiers[row])
                held_ids[row] += [held_ids[row][0]] * missing
                held_parents[row] += [0] * missing
            partial = DraftTree.from_lists(held_ids, held_parents, device=logits.device)
            logits = self.drafter.verify(partial, root_positions, first=first).logits
            self.drafter.cache.continue_round(width)
        context.lap("draft")
        kept = [expansion.likeliest(self.tree_budget) for expansion in rows]
        self.places = [[row.places[node] for node in nodes] for row, nodes in zip(rows, kept, strict=True)]
        self.drafted = [[row.scores[node] for node in nodes] for row, nodes in zip(rows, kept, strict=True)]
        home = context.root_ids.device
        tree = DraftTree.from_lists(
            [[row.token_ids[node] for node in nodes] for row, nodes in zip(rows, kept, strict=True)],
            [row.parents_among(nodes) for row, nodes in zip(rows, kept, strict=True)],
            finite=torch.tensor([row.finite for row in rows], device=home),
            path_logprobs=self.drafted,
            device=home,
        )
        context.lap("tree")
        return tree

    def describe(self, tree: DraftTree) -> NodeNotes | None:
        if tree.num_nodes == 1:  # nothing was drafted
            return None
        scores = torch.tensor([(row + [0.0] * tree.num_nodes)[: tree.num_nodes] for row in self.drafted])
        return path_notes(tree, scores.to(tree.token_ids.device), tree.depths)  # a forward per level


class Expansion:
    """The nodes of one row that the draft model has thought of, in the order it did; node 0 is the root."""

    def __init__(self, root_id: int) -> None:
        self.token_ids = [root_id]
        self.parents = [-1]
        self.scores = [0.0]  # log-probability of the path, nats
        self.places = [0]  # where the cache holds the node, -1 while the draft model has not run it
        self.expandable = [True]
        self.level_start = 0  # where the newest level begins
        self.finite = True

    def grow(
        self,
        frontier: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        certain: Sequence[bool] | None,
    ) -> None:
        """Adds a level: the best continuations of each node of the frontier; [frontier][ranks] each.

        `certain` says per node of the frontier whether its continuations are worth expanding in turn.
        """
        self.level_start = len(self.token_ids)
        for index, node in enumerate(frontier):
            if not math.isfinite(log_probs[index][0]):
                # NaN or infinite logits; without any at the root, nothing at all is drafted.
                self.finite = self.finite and node != 0
                continue
            for token, log_prob in zip(token_ids[index], log_probs[index], strict=False):
                if log_prob == -math.inf:
                    break
                self.token_ids.append(token)
                self.parents.append(node)
                self.scores.append(self.scores[node] + log_prob)
                self.places.append(-1)
                self.expandable.append(certain is None or certain[index])

    def likeliest(self, budget: int) -> list[int]:
        """The root and the `budget` likeliest other nodes in order: a tree, as no node beats its parent."""
        # The sort is stable, so a parent wins a tie with its child.
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
        index = {node: place for place, node in enumerate(nodes)}
        return [index.get(self.parents[node], -1) for node in nodes]
