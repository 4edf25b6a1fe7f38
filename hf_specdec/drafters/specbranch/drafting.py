"""The draft model's side of SpecBranch: its text, its cache and its branches, as lists that can be sent to a process.

`BranchDrafting` runs during verification, in a thread or a separate process (`worker.py`). Its messages are small: the
tokens that a round emitted, and the chain to verify next. Source: SpecBranch, Section 5.2, Algorithm 1 and Figures 8
and 9 of its appendix. The target's side is in `candidates.py`.

The entries of one row's round in the draft model's cache, after the text: the root; the chain that is being verified,
whose last node is the leaf; and after the leaf the branches, k candidates of the branch point with their continuations.
They are paths of one tree, so the prefix is stored once. When the target has chosen a candidate, its branch is the next
round's chain. The same cache update that commits the accepted entries drops those of all other branches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.draft_model import DraftModel
from hf_specdec.drafters.specbranch.branches import (
    ALL_ACCEPT,
    ALL_REJECT,
    CONFIDENCE,
    Branches,
    Chains,
    Counters,
    DraftingPlan,
    Node,
    Prediction,
    Row,
    Signals,
    num_branches,
)


class BranchDrafting:
    """Drafts chains, and branches after them, for one `generate` call.

    Args:
        model: the draft model.
        plan: the settings; may be replaced before the first round.
    """

    def __init__(self, model: PreTrainedModel, plan: DraftingPlan) -> None:
        # Never captured: other threads synchronise and allocate while it drafts, which breaks a capture, and the number
        # of nodes differs in each forward.
        self.drafter = DraftModel(model)
        self.drafter.vocab_size = plan.vocab_size
        self.plan = plan
        self.rows: list[Row] = []
        self.counters = Counters()
        self.stopped = False  # set by another thread to end `draft_ahead` before its next forward
        self.num_positions: int | None = getattr(self.drafter.config, "max_position_embeddings", None)
        self.random = torch.Generator(model.device)
        self.num_entries = 0
        self.cache_update: tuple[list[list[int]], list[list[int]]] | None = (
            None  # the arguments of the next `_update_cache`
        )
        # By row and cache entry of the round: token, depth and ancestors.
        self.token_ids: np.ndarray = np.zeros((0, 0), dtype=np.int64)
        self.depths: np.ndarray = np.zeros((0, 0), dtype=np.int64)
        self.mask: np.ndarray = np.zeros((0, 0, 0), dtype=bool)

    @torch.no_grad()
    def start(self, texts: list[list[int]], prompt_mask: list[list[bool]] | None, seed: int) -> None:
        """Runs the draft model over all texts without their last token.

        Args:
            texts: per row all tokens so far, root included.
            prompt_mask: False at padding of the prompt; ignored unless its length is that of the shortest text without
                the root; None for no padding.
            seed: of all samples of this call.
        """
        self.rows = [Row(list(text)) for text in texts]
        self.random.manual_seed(seed)
        device = self.drafter.model.device
        length = min(map(len, texts)) - 1  # further tokens of longer rows are run in the first round
        token_ids = torch.tensor([text[:length] for text in texts], device=device)
        mask = None
        if prompt_mask is not None and len(prompt_mask[0]) == length:
            mask = torch.tensor(prompt_mask, device=device)
        # Drafted nodes may use all positions of the model.
        self.drafter.prefill_for_drafting(token_ids, mask, self.num_positions or sys.maxsize)
        self.drafter.begin_rounds(length + 256)
        self._grow_arrays(64)

    @torch.no_grad()
    def seconds_per_forward(self, repeats: int = 9) -> float:
        """T_q: the median time of a forward over as many nodes as a level may have branches and hedges."""
        width = self.plan.most_branches + self.plan.most_hedges
        nothing: list[list[int]] = [[] for _ in self.rows]
        random = self.random.get_state()  # so that later samples do not depend on this measurement
        seconds = []
        for _ in range(repeats + 3):  # the first ones are warm-up
            for row in self.rows:
                row.add(row.text[-1], -1)
                row.nodes += [Node(row.text[-1], 0) for _ in range(width - 1)]
            began = time.perf_counter()
            self._run([list(range(width)) for _ in self.rows])
            seconds.append(time.perf_counter() - began)
            for row in self.rows:
                row.clear()
            self.cache_update = nothing, nothing
        self._update_cache()
        self.counters = Counters()
        self.random.set_state(random)
        return sorted(seconds[3:])[repeats // 2]

    def bound_tokens(self, speed_ratio: float) -> None:
        """Limits draft lengths to c = T_p / T_q, rounded down, so that drafting takes no longer than verification."""
        self.plan = replace(self.plan, most_tokens=max(1, min(self.plan.most_tokens, int(speed_ratio))))

    @torch.no_grad()
    def draft(self, emitted: Sequence[list[int]], active: Sequence[bool], signals: Sequence[Signals]) -> Chains:
        """Updates the rows with the target's result for the last chains, and returns the chains to verify next.

        Args:
            emitted: per row the tokens that the round added to its text; [] before the first round.
            active: per row, whether it is unfinished.
            signals: per row.
        """
        self._update_rows(emitted, active, signals)
        if self._has_positions():
            self._draft_fresh([row if row.active and not row.nodes else None for row in self.rows], signals)
        tokens = [[row.nodes[node].token for node in row.chain] for row in self.rows]
        draft_probs = None
        if self.plan.choice.do_sample and any(tokens):
            above = [[row.nodes[row.nodes[node].parent].prediction for node in row.chain] for row in self.rows]
            draft_probs = _padded([[each.draft_probs for each in row if each is not None] for row in above])
        return Chains(tokens, draft_probs, [row.finite for row in self.rows])

    @torch.no_grad()
    def draft_ahead(self, signals: Sequence[Signals]) -> Branches:
        """Drafts branches after the chains returned by `draft`, while the target verifies these."""
        clock = time.thread_time if abilities(self.drafter.model.device).host_memory else time.perf_counter
        began = clock()
        forwards = 0
        if not self._has_positions():
            return Branches(0.0, [set() for _ in self.rows], [[] for _ in self.rows], None)
        unrun = [
            [node for node in [*range(row.root + 1), *row.chain] if row.nodes[node].cache_index < 0]
            if row.nodes
            else []
            for row in self.rows
        ]
        for row in self.rows:
            if row.nodes:
                self._add_hedges(row)
        if any(unrun):  # candidates need the leaf's output, but hedges do not
            self._run_branches(signals, unrun)
            forwards += 1
        draft_probs = [self._add_candidates(row) if row.nodes else [] for row in self.rows]
        while forwards < self.plan.most_tokens and not self.stopped and self._run_branches(signals):
            forwards += 1
        candidates = [[row.nodes[node].token for node in row.branches] for row in self.rows]
        prepared = [set(row.prepared()) for row in self.rows]
        return Branches(clock() - began, prepared, candidates, _padded(draft_probs) if any(draft_probs) else None)

    def final_counters(self, emitted: Sequence[list[int]]) -> Counters:
        """The totals of the call; `emitted` is as for `draft`, from the last round."""
        for row, tokens in zip(self.rows, emitted, strict=True):
            self._count(row, tokens)
        return self.counters

    def _count(self, row: Row, tokens: list[int]) -> int | None:
        """Counts a row's drafts by their result; returns the branch that the target chose."""
        if not row.nodes or not tokens:
            return None
        chosen = row.chosen_branch(tokens)
        self.counters.path_drafts += row.count_drafts(chosen)
        self.counters.path_kept += len(tokens) - 1 + (chosen is not None)
        return chosen

    # Updates after a round.

    def _update_rows(self, emitted: Sequence[list[int]], active: Sequence[bool], signals: Sequence[Signals]) -> None:
        accepted: list[list[int]] = [[] for _ in self.rows]
        branches: list[list[int]] = [[] for _ in self.rows]
        for index, (row, tokens) in enumerate(zip(self.rows, emitted, strict=True)):
            row.finite, row.active = True, active[index]
            row.text += tokens
            chosen = self._count(row, tokens)
            if not row.nodes or not tokens:
                row.clear()
                continue
            path = [*range(row.root + 1), *row.chain[: len(tokens) - 1]]
            accepted[index] = [row.nodes[node].cache_index for node in path if row.nodes[node].cache_index >= 0]
            branches[index] = self._select_branch(row, chosen if row.active else None, signals[index].kept_branch)
        self.cache_update = accepted, branches

    def _update_cache(self) -> None:
        """Applies the changes of the rows to the cache. Deferred to the next forward, which mostly runs in parallel."""
        if self.cache_update is None:
            return
        (accepted, branches), self.cache_update = self.cache_update, None
        self.drafter.cache.regroup(accepted, branches)
        self.num_entries = max(map(len, branches))
        for index, row in enumerate(self.rows):
            for node in row.nodes[: len(branches[index])]:
                self._write_entry(index, row, node, node.cache_index)

    def _select_branch(self, row: Row, branch: int | None, signal: int) -> list[int]:
        """Makes a branch the row's tree, with its candidate as root; returns the old cache entries of the branch."""
        nodes = [row.nodes[node] for node in row.branch_nodes(branch)]
        indices = [node.cache_index for node in nodes if node.cache_index >= 0]
        row.clear()
        row.nodes = nodes
        for index, node in enumerate(nodes):
            node.parent = index - 1
            node.cache_index = index if index < len(indices) else -1
            node.next = index + 1 if index + 1 < len(nodes) else -1
        for index in range(1, min(len(nodes), self.plan.most_tokens + 1)):
            if signal == ALL_REJECT or (signal == CONFIDENCE and not self._is_confident(row, index - 1)):
                break
            row.chain.append(index)
        return indices

    # Drafting.

    def _draft_fresh(self, rows: Sequence[Row | None], signals: Sequence[Signals]) -> None:
        """The draft stage: new chains for rows without a chosen branch; None for other rows."""
        frontiers: list[list[int]] = [[] for _ in rows]
        for index, row in enumerate(rows):
            if row is None:
                continue
            committed = self.drafter.cache.row_lengths[index]
            if self.cache_update is not None:
                committed += len(self.cache_update[0][index])
            missing = row.text[committed:]
            for token in missing:
                row.root = row.add(token, len(row.nodes) - 1)
            if signals[index].fresh != ALL_REJECT:  # else the root is run during verification
                frontiers[index] = list(range(len(missing)))
        while any(frontiers):
            self._run(frontiers)
            for index, row in enumerate(rows):
                tip = frontiers[index][-1] if frontiers[index] else -1
                frontiers[index] = []
                if row is None or tip < 0:
                    continue
                if tip == row.root:
                    row.finite = row.nodes[tip].prediction is not None
                if signals[index].fresh == CONFIDENCE and not self._is_confident(row, tip):
                    continue
                drafted = row.extend(tip)
                if drafted is not None:
                    row.chain.append(drafted)
                    if len(row.chain) < self.plan.most_tokens:
                        frontiers[index] = [drafted]
        self.counters.path_drafts += sum(row.count_drafts(None) for row in rows if row is not None)

    def _is_confident(self, row: Row, node: int) -> bool:
        """Whether the token after a node is not a branch point.

        It depends on the node's distribution, never on the token sampled from it: else the remaining drafts would have
        another distribution than the recorded one.
        """
        prediction = row.nodes[node].prediction
        return prediction is not None and prediction.confidence >= self.plan.min_confidence

    def _add_candidates(self, row: Row) -> list[Tensor]:
        """Adds the candidates after the leaf; returns the distribution of each sampled one, [] if none were sampled."""
        row.branches = []
        leaf = row.nodes[row.leaf]
        prediction = leaf.prediction
        if prediction is None:
            return []
        count = num_branches(self.plan.most_branches, prediction.confidence)
        draft_probs: list[Tensor] = []
        tokens = prediction.token_ids[:count]
        if prediction.draft_probs is not None and self.plan.draw_candidates:
            # The token sampled at the leaf comes first: its branch may exist already.
            tokens, draft_probs, remaining = [prediction.chosen], [prediction.draft_probs], prediction.draft_probs
            while len(tokens) < count:
                remaining = remaining.clone()
                remaining[tokens[-1]] = 0
                total = remaining.sum()
                if not float(total) > 0:
                    break
                remaining = remaining / total
                tokens.append(int(torch.multinomial(remaining, 1, generator=self.random)))
                draft_probs.append(remaining)
        for token in tokens:
            known = leaf.next if leaf.next >= 0 and row.nodes[leaf.next].token == token else None
            row.branches.append(row.add(token, row.leaf) if known is None else known)
        return draft_probs

    def _add_hedges(self, row: Row) -> None:
        """Adds branches from nodes of the chain: the tokens that the target is likeliest to choose instead.

        The paper branches only after the chain, so a rejection within it wastes all parallel drafts. On a CPU further
        branches cost almost no time. The target's choice does not depend on them, so the acceptance rule is the same.
        """
        row.hedges = []
        if not self.plan.most_hedges:
            return
        likely: list[tuple[float, int, int]] = []
        reached = 1.0
        for above, node in zip([row.root, *row.chain], row.chain, strict=False):
            prediction, drafted = row.nodes[above].prediction, row.nodes[node].token
            if prediction is None:  # the last token of an unfinished branch of the previous round has not been run
                break
            known = dict(zip(prediction.token_ids, prediction.probs, strict=True))
            likely += [(reached * prob, above, token) for token, prob in known.items() if token != drafted]
            reached *= known.get(drafted, 0.0)
        likely.sort(key=lambda hedge: -hedge[0])
        row.hedges = [row.add(token, above) for _, above, token in likely[: self.plan.most_hedges]]

    def _run_branches(self, signals: Sequence[Signals], first: Sequence[list[int]] | None = None) -> bool:
        """One forward over the last nodes of all branches, which are then extended; returns whether there were any.

        Args:
            signals: per row.
            first: per row further nodes to run.
        """
        tips = [
            self._tips(row) if signal.branches != ALL_REJECT else []
            for row, signal in zip(self.rows, signals, strict=True)
        ]
        frontiers = tips if first is None else [[*nodes, *more] for nodes, more in zip(first, tips, strict=True)]
        if not any(frontiers):
            return False
        self._run(frontiers)
        for row, signal, own in zip(self.rows, signals, tips, strict=True):
            for tip in own:
                if signal.branches == ALL_ACCEPT or self._is_confident(row, tip):
                    row.extend(tip)
        return True

    def _tips(self, row: Row) -> list[int]:
        """The last nodes of branches that may be extended."""
        tips = []
        for branch in [*row.branches, *row.hedges]:
            length, tip = 0, branch
            while row.nodes[tip].next >= 0:
                length, tip = length + 1, row.nodes[tip].next
            if row.nodes[tip].cache_index < 0 and length < self.plan.most_tokens:
                tips.append(tip)
        return tips

    # Running the draft model.

    def _has_positions(self) -> bool:
        """Whether the draft model has enough positions for a round; if not, the target decodes without drafts."""
        longest = max(len(row.text) for row in self.rows)
        return self.num_positions is None or longest + 2 * self.plan.most_tokens + 2 <= self.num_positions

    def _run(self, frontiers: Sequence[Sequence[int]]) -> None:
        """One forward over nodes of every row, parents before children; sets their outputs."""
        self._update_cache()
        first, width = self.num_entries, max(map(len, frontiers))
        self.num_entries = stop = first + width
        self._grow_arrays(stop)
        self.token_ids[:, first:stop] = 0
        self.depths[:, first:stop] = 0
        self.mask[:, first:stop] = False
        self.mask[:, np.arange(first, stop), np.arange(first, stop)] = True
        for index, (row, frontier) in enumerate(zip(self.rows, frontiers, strict=True)):
            for entry, node in enumerate(frontier, start=first):
                row.nodes[node].cache_index = entry
                self._write_entry(index, row, row.nodes[node], entry)
        device = self.drafter.model.device
        arrays = (self.token_ids[:, :stop], self.depths[:, :stop], self.mask[:, :stop, :stop])
        token_ids, depths, mask = (torch.from_numpy(array).to(device) for array in arrays)
        tree = DraftTree(token_ids, depths - 1, depths, mask, token_ids >= 0, int(self.depths[:, :stop].max()))
        cache = self.drafter.cache
        logits = self.drafter.verify(tree, self.drafter.root_positions(), first=first).logits
        cache.continue_round(width)
        self.counters.peak_entries = max(self.counters.peak_entries, cache.longest + stop)
        predictions = self._predictions(logits, drawn=self.plan.choice.do_sample)
        for row, frontier, row_predictions in zip(self.rows, frontiers, predictions, strict=True):
            for node, prediction in zip(frontier, row_predictions, strict=False):
                row.nodes[node].prediction = prediction

    def _predictions(self, logits: Tensor, *, drawn: bool) -> list[list[Prediction | None]]:
        """[batch, nodes, vocab] logits -> outputs per row and node; None if the logits are NaN or infinite."""
        top = logits.softmax(-1).topk(min(self.plan.most_branches, logits.shape[-1]), dim=-1)
        ids, sure = top.indices.tolist(), top.values.tolist()
        finite = [[values[0] == values[0] for values in row] for row in sure]
        draft_probs: list[list[Tensor | None]] = [[None] * len(row) for row in ids]
        chosen = [[tokens[0] for tokens in row] for row in ids]
        if drawn:
            batch, nodes, vocab = logits.shape
            scores = logits.where(top.values[..., :1].isfinite(), 0.0).view(-1, vocab)
            scores = self.plan.choice.warpers(logits.new_zeros((batch * nodes, 1), dtype=torch.int64), scores)
            probs = scores.softmax(-1)
            draws = torch.multinomial(probs, 1, generator=self.random).view(batch, nodes)
            chosen = draws.tolist()
            draft_probs = [list(row.unbind(0)) for row in probs.view(batch, nodes, vocab).unbind(0)]
        return [
            [
                Prediction(ids[row][node], sure[row][node], chosen[row][node], draft_probs[row][node])
                if finite[row][node]
                else None
                for node in range(len(ids[row]))
            ]
            for row in range(len(ids))
        ]

    def _write_entry(self, index: int, row: Row, node: Node, entry: int) -> None:
        """Writes token, depth and ancestors of a cache entry to the arrays."""
        self.token_ids[index, entry] = node.token
        self.mask[index, entry] = False
        if node.parent >= 0:
            above = row.nodes[node.parent].cache_index
            self.mask[index, entry] = self.mask[index, above]
            self.depths[index, entry] = self.depths[index, above] + 1
        else:
            self.depths[index, entry] = 0
        self.mask[index, entry, entry] = True

    def _grow_arrays(self, entries: int) -> None:
        have = self.token_ids.shape[1]
        if entries <= have:
            return
        batch, room = len(self.rows), 2 * entries
        token_ids = np.zeros((batch, room), dtype=np.int64)
        depths = np.zeros((batch, room), dtype=np.int64)
        mask = np.zeros((batch, room, room), dtype=bool)
        if have:
            token_ids[:, :have], depths[:, :have], mask[:, :have, :have] = self.token_ids, self.depths, self.mask
        self.token_ids, self.depths, self.mask = token_ids, depths, mask


def _padded(probs: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """[rows, longest, vocab] from lists of distributions [vocab] of different lengths; zeros for missing ones."""
    known = [[each for each in row if each is not None] for row in probs]
    some = next(each for row in known for each in row)
    padded = some.new_zeros((len(known), max(map(len, known)), some.shape[-1]))
    for row, own in enumerate(known):
        if own:
            padded[row, : len(own)] = torch.stack(own)
    return padded
