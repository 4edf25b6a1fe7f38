"""The draft model's side of SpecBranch: its text, its cache and its branches, in lists that can cross to a process.

`BranchDrafting` runs beside the target, in a thread or a process of its own (`worker.py`); what it is told and what it
answers is small: the tokens that a round emitted, and the chain to verify next. Source: SpecBranch, Section 5.2,
Algorithm 1 and Figures 8 and 9 of its appendix. The target's side is in `candidates.py`.

A round of one row, in the draft model's cache: behind the text lie the root, the chain that is being verified, whose
last node is the leaf, and below the leaf the branches, k candidates for the branch point and what the draft model says
after each. They are paths of one tree, so the prefix is stored once. When the target has chosen a candidate, that
branch is the next round's chain; the entries of all others are forgotten in the same step that commits the accepted
ones.
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
from hf_specdec.drafters.causal_lm.draft_model import DraftModel
from hf_specdec.drafters.specbranch.branches import (
    ALL_ACCEPT,
    ALL_REJECT,
    CONFIDENCE,
    Branches,
    Chains,
    Counters,
    DraftingPlan,
    Law,
    Node,
    Row,
    Signals,
    num_branches,
)


class BranchDrafting:
    """Drafts chains, and branches behind them, for one `generate` call.

    Args:
        model: the draft model.
        plan: how to draft; may be replaced before the first round.
    """

    def __init__(self, model: PreTrainedModel, plan: DraftingPlan) -> None:
        # Never captured: it drafts while other threads have the device wait and allocate, which ends a capture, and the
        # nodes it holds are other ones, and more or fewer, in each forward.
        self.drafter = DraftModel(model)
        self.drafter.vocab_size = plan.vocab_size
        self.plan = plan
        self.rows: list[Row] = []
        self.counters = Counters()
        self.stopped = False  # set from outside; drafting beside the target then ends at its next forward
        self.num_positions: int | None = getattr(self.drafter.config, "max_position_embeddings", None)
        self.random = torch.Generator(model.device)
        self.num_places = 0
        self.unsettled: tuple[list[list[int]], list[list[int]]] | None = None  # what `_settle` has yet to do
        # By row and place in the cache: token, depth and ancestors of what is held there.
        self.token_ids: np.ndarray = np.zeros((0, 0), dtype=np.int64)
        self.depths: np.ndarray = np.zeros((0, 0), dtype=np.int64)
        self.mask: np.ndarray = np.zeros((0, 0, 0), dtype=bool)

    @torch.no_grad()
    def start(self, texts: list[list[int]], prompt_mask: list[list[bool]] | None, seed: int) -> None:
        """Runs the draft model over all of the texts but their last token.

        Args:
            texts: per row all tokens so far, root included.
            prompt_mask: which tokens of the prompt are no padding, where its length is known to be the shortest text's
                less the root; None for all.
            seed: of everything drawn in this call.
        """
        self.rows = [Row(list(text)) for text in texts]
        self.random.manual_seed(seed)
        device = self.drafter.model.device
        length = min(map(len, texts)) - 1  # what longer rows have more is run in the first round
        token_ids = torch.tensor([text[:length] for text in texts], device=device)
        mask = None
        if prompt_mask is not None and len(prompt_mask[0]) == length:
            mask = torch.tensor(prompt_mask, device=device)
        # The positions that the model knows are how far drafted nodes may reach.
        self.drafter.prefill_for_drafting(token_ids, mask, self.num_positions or sys.maxsize)
        self.drafter.begin_rounds(length + 256)
        self._make_room(64)

    @torch.no_grad()
    def seconds_per_forward(self, repeats: int = 9) -> float:
        """T_q: the median time of a forward over as many nodes as there may be branches and hedges at a level."""
        width = self.plan.most_branches + self.plan.most_hedges
        nothing: list[list[int]] = [[] for _ in self.rows]
        random = self.random.get_state()  # what is drawn must not depend on whether this was measured
        seconds = []
        for _ in range(repeats + 3):  # the first ones warm up
            for row in self.rows:
                row.add(row.text[-1], -1)
                row.nodes += [Node(row.text[-1], 0) for _ in range(width - 1)]
            began = time.perf_counter()
            self._run([list(range(width)) for _ in self.rows])
            seconds.append(time.perf_counter() - began)
            for row in self.rows:
                row.clear()
            self.unsettled = nothing, nothing
        self._settle()
        self.counters = Counters()
        self.random.set_state(random)
        return sorted(seconds[3:])[repeats // 2]

    def bound_tokens(self, speed_ratio: float) -> None:
        """Bounds draft lengths by c = T_p / T_q, rounded down: drafting then takes no longer than verification."""
        self.plan = replace(self.plan, most_tokens=max(1, min(self.plan.most_tokens, int(speed_ratio))))

    @torch.no_grad()
    def draft(self, emitted: Sequence[list[int]], active: Sequence[bool], signals: Sequence[Signals]) -> Chains:
        """Takes in what the target made of the last chains, and gives those to verify next.

        Args:
            emitted: per row the tokens that the round added to its text; [] before the first round.
            active: per row, whether its tokens still matter.
            signals: per row.
        """
        self._take_in(emitted, active, signals)
        if self._within_reach():
            self._draft_fresh([row if row.active and not row.nodes else None for row in self.rows], signals)
        tokens = [[row.nodes[node].token for node in row.chain] for row in self.rows]
        laws = None
        if self.plan.choice.do_sample and any(tokens):
            above = [[row.nodes[row.nodes[node].parent].law for node in row.chain] for row in self.rows]
            laws = _padded([[law.drawn_from for law in row if law is not None] for row in above])
        return Chains(tokens, laws, [row.finite for row in self.rows])

    @torch.no_grad()
    def draft_ahead(self, signals: Sequence[Signals]) -> Branches:
        """Drafts branches behind the chains that `draft` gave, while the target verifies those."""
        clock = time.thread_time if abilities(self.drafter.model.device).host_memory else time.perf_counter
        began = clock()
        forwards = 0
        if not self._within_reach():
            return Branches(0.0, [set() for _ in self.rows], [[] for _ in self.rows], None)
        unrun = [
            [node for node in [*range(row.root + 1), *row.chain] if row.nodes[node].place < 0] if row.nodes else []
            for row in self.rows
        ]
        for row in self.rows:
            if row.nodes:
                self._hedge(row)
        if any(unrun):  # hedges need not wait until the leaf says what may follow it
            self._run_branches(signals, unrun)
            forwards += 1
        laws = [self._branch(row) if row.nodes else [] for row in self.rows]
        while forwards < self.plan.most_tokens and not self.stopped and self._run_branches(signals):
            forwards += 1
        candidates = [[row.nodes[node].token for node in row.branches] for row in self.rows]
        prepared = [set(row.prepared()) for row in self.rows]
        return Branches(clock() - began, prepared, candidates, _padded(laws) if any(laws) else None)

    def final_counters(self, emitted: Sequence[list[int]]) -> Counters:
        """What drafting came to; `emitted` is what the last round added, as for `draft`."""
        for row, tokens in zip(self.rows, emitted, strict=True):
            self._count(row, tokens)
        return self.counters

    def _count(self, row: Row, tokens: list[int]) -> int | None:
        """Counts what became of a row's drafts; returns the branch that the target chose."""
        if not row.nodes or not tokens:
            return None
        hit = row.hit(tokens)
        self.counters.path_drafts += row.count_drafts(hit)
        self.counters.path_kept += len(tokens) - 1 + (hit is not None)
        return hit

    # What a round made of the tree.

    def _take_in(self, emitted: Sequence[list[int]], active: Sequence[bool], signals: Sequence[Signals]) -> None:
        kept: list[list[int]] = [[] for _ in self.rows]
        held: list[list[int]] = [[] for _ in self.rows]
        for index, (row, tokens) in enumerate(zip(self.rows, emitted, strict=True)):
            row.finite, row.active = True, active[index]
            row.text += tokens
            hit = self._count(row, tokens)
            if not row.nodes or not tokens:
                row.clear()
                continue
            path = [*range(row.root + 1), *row.chain[: len(tokens) - 1]]
            kept[index] = [row.nodes[node].place for node in path if row.nodes[node].place >= 0]
            held[index] = self._keep_branch(row, hit if row.active else None, signals[index].kept_branch)
        self.unsettled = kept, held

    def _settle(self) -> None:
        """Brings the cache to the state of the lists: not before it is needed, mostly beside the target."""
        if self.unsettled is None:
            return
        (kept, held), self.unsettled = self.unsettled, None
        self.drafter.cache.regroup(kept, held)
        self.num_places = max(map(len, held))
        for index, row in enumerate(self.rows):
            for node in row.nodes[: len(held[index])]:
                self._place(index, row, node, node.place)

    def _keep_branch(self, row: Row, branch: int | None, signal: int) -> list[int]:
        """Makes a branch the row's tree, its candidate the root; returns the places of what the cache holds of it."""
        nodes = [row.nodes[node] for node in row.line(branch)]
        places = [node.place for node in nodes if node.place >= 0]
        row.clear()
        row.nodes = nodes
        for index, node in enumerate(nodes):
            node.parent = index - 1
            node.place = index if index < len(places) else -1
            node.next = index + 1 if index + 1 < len(nodes) else -1
        for place in range(1, min(len(nodes), self.plan.most_tokens + 1)):
            if signal == ALL_REJECT or (signal == CONFIDENCE and not self._is_confident(row, place - 1)):
                break
            row.chain.append(place)
        return places

    # Drafting.

    def _draft_fresh(self, rows: Sequence[Row | None], signals: Sequence[Signals]) -> None:
        """The draft stage: chains for rows whose last branches were all wrong. Other rows wait."""
        frontiers: list[list[int]] = [[] for _ in rows]
        for index, row in enumerate(rows):
            if row is None:
                continue
            committed = self.drafter.cache.row_lengths[index]
            if self.unsettled is not None:
                committed += len(self.unsettled[0][index])
            missing = row.text[committed:]
            for token in missing:
                row.root = row.add(token, len(row.nodes) - 1)
            if signals[index].fresh != ALL_REJECT:  # else the root is run beside the target
                frontiers[index] = list(range(len(missing)))
        while any(frontiers):
            self._run(frontiers)
            for index, row in enumerate(rows):
                tip = frontiers[index][-1] if frontiers[index] else -1
                frontiers[index] = []
                if row is None or tip < 0:
                    continue
                if tip == row.root:
                    row.finite = row.nodes[tip].law is not None
                if signals[index].fresh == CONFIDENCE and not self._is_confident(row, tip):
                    continue
                drafted = row.go_on(tip)
                if drafted is not None:
                    row.chain.append(drafted)
                    if len(row.chain) < self.plan.most_tokens:
                        frontiers[index] = [drafted]
        self.counters.path_drafts += sum(row.count_drafts(None) for row in rows if row is not None)

    def _is_confident(self, row: Row, node: int) -> bool:
        """Whether the token after a node is no branch point.

        Decided by the law after the node and never by the token drawn from it: a decision that looked at the token
        would make the drafts that are left follow another law than the one they carry.
        """
        law = row.nodes[node].law
        return law is not None and law.confidence >= self.plan.min_confidence

    def _branch(self, row: Row) -> list[Tensor]:
        """Spawns the candidates behind the leaf; returns the law each was drawn from, nothing where none was drawn."""
        row.branches = []
        leaf = row.nodes[row.leaf]
        law = leaf.law
        if law is None:
            return []
        count = num_branches(self.plan.most_branches, law.confidence)
        laws: list[Tensor] = []
        tokens = law.token_ids[:count]
        if law.drawn_from is not None and self.plan.draw_candidates:
            # The token that was drawn with the law comes first: branches that hold it may have been drafted already.
            tokens, laws, left = [law.chosen], [law.drawn_from], law.drawn_from
            while len(tokens) < count:
                left = left.clone()
                left[tokens[-1]] = 0
                total = left.sum()
                if not float(total) > 0:
                    break
                left = left / total
                tokens.append(int(torch.multinomial(left, 1, generator=self.random)))
                laws.append(left)
        for token in tokens:
            known = leaf.next if leaf.next >= 0 and row.nodes[leaf.next].token == token else None
            row.branches.append(row.add(token, row.leaf) if known is None else known)
        return laws

    def _hedge(self, row: Row) -> None:
        """Spawns branches at places of the chain: the tokens that the target is likeliest to choose instead.

        The paper branches behind the chain only. A token that the target rejects within it then costs everything that
        was drafted meanwhile, which on a CPU, where more branches cost next to no time, can be hedged against just as
        well. What the target chooses there does not depend on what was prepared, so no rule of acceptance changes.
        """
        row.hedges = []
        if not self.plan.most_hedges:
            return
        likely: list[tuple[float, int, int]] = []
        reached = 1.0
        for above, node in zip([row.root, *row.chain], row.chain, strict=False):
            law, drafted = row.nodes[above].law, row.nodes[node].token
            if law is None:  # an unfinished branch of the round before, whose last token is yet to be run
                break
            known = dict(zip(law.token_ids, law.probs, strict=True))
            likely += [(reached * prob, above, token) for token, prob in known.items() if token != drafted]
            reached *= known.get(drafted, 0.0)
        likely.sort(key=lambda place: -place[0])
        row.hedges = [row.add(token, above) for _, above, token in likely[: self.plan.most_hedges]]

    def _run_branches(self, signals: Sequence[Signals], first: Sequence[list[int]] | None = None) -> bool:
        """One forward over the tips of all branches, which then go on; whether there was any to run.

        Args:
            signals: per row.
            first: per row nodes to run as well.
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
                    row.go_on(tip)
        return True

    def _tips(self, row: Row) -> list[int]:
        """The last nodes of branches that may be drafted further."""
        tips = []
        for branch in [*row.branches, *row.hedges]:
            length, tip = 0, branch
            while row.nodes[tip].next >= 0:
                length, tip = length + 1, row.nodes[tip].next
            if row.nodes[tip].place < 0 and length < self.plan.most_tokens:
                tips.append(tip)
        return tips

    # Running the draft model.

    def _within_reach(self) -> bool:
        """Whether the draft model's positions reach as far as a round may draft; beyond, the target decodes plainly."""
        longest = max(len(row.text) for row in self.rows)
        return self.num_positions is None or longest + 2 * self.plan.most_tokens + 2 <= self.num_positions

    def _run(self, frontiers: Sequence[Sequence[int]]) -> None:
        """One forward over nodes of every row, parents before children; their laws are known afterwards."""
        self._settle()
        first, width = self.num_places, max(map(len, frontiers))
        self.num_places = stop = first + width
        self._make_room(stop)
        self.token_ids[:, first:stop] = 0
        self.depths[:, first:stop] = 0
        self.mask[:, first:stop] = False
        self.mask[:, np.arange(first, stop), np.arange(first, stop)] = True
        for index, (row, frontier) in enumerate(zip(self.rows, frontiers, strict=True)):
            for place, node in enumerate(frontier, start=first):
                row.nodes[node].place = place
                self._place(index, row, row.nodes[node], place)
        device = self.drafter.model.device
        arrays = (self.token_ids[:, :stop], self.depths[:, :stop], self.mask[:, :stop, :stop])
        token_ids, depths, mask = (torch.from_numpy(array).to(device) for array in arrays)
        tree = DraftTree(token_ids, depths - 1, depths, mask, token_ids >= 0, int(self.depths[:, :stop].max()))
        cache = self.drafter.cache
        logits = self.drafter.verify(tree, self.drafter.root_positions(), first=first).logits
        cache.continue_round(width)
        self.counters.peak_entries = max(self.counters.peak_entries, cache.longest + stop)
        laws = self._laws(logits, drawn=self.plan.choice.do_sample)
        for row, frontier, row_laws in zip(self.rows, frontiers, laws, strict=True):
            for node, law in zip(frontier, row_laws, strict=False):
                row.nodes[node].law = law

    def _laws(self, logits: Tensor, *, drawn: bool) -> list[list[Law | None]]:
        """[batch, nodes, vocab] logits -> per row and node what they say; None where they are NaN or infinite."""
        top = logits.softmax(-1).topk(min(self.plan.most_branches, logits.shape[-1]), dim=-1)
        ids, sure = top.indices.tolist(), top.values.tolist()
        finite = [[values[0] == values[0] for values in row] for row in sure]
        drawn_from: list[list[Tensor | None]] = [[None] * len(row) for row in ids]
        chosen = [[tokens[0] for tokens in row] for row in ids]
        if drawn:
            batch, nodes, vocab = logits.shape
            scores = logits.where(top.values[..., :1].isfinite(), 0.0).view(-1, vocab)
            scores = self.plan.choice.warpers(logits.new_zeros((batch * nodes, 1), dtype=torch.int64), scores)
            law = scores.softmax(-1)
            draws = torch.multinomial(law, 1, generator=self.random).view(batch, nodes)
            chosen = draws.tolist()
            drawn_from = [list(row.unbind(0)) for row in law.view(batch, nodes, vocab).unbind(0)]
        return [
            [
                Law(ids[row][node], sure[row][node], chosen[row][node], drawn_from[row][node])
                if finite[row][node]
                else None
                for node in range(len(ids[row]))
            ]
            for row in range(len(ids))
        ]

    def _place(self, index: int, row: Row, node: Node, place: int) -> None:
        """Notes in the arrays what the cache holds, or will hold, at a place."""
        self.token_ids[index, place] = node.token
        self.mask[index, place] = False
        if node.parent >= 0:
            above = row.nodes[node.parent].place
            self.mask[index, place] = self.mask[index, above]
            self.depths[index, place] = self.depths[index, above] + 1
        else:
            self.depths[index, place] = 0
        self.mask[index, place, place] = True

    def _make_room(self, places: int) -> None:
        have = self.token_ids.shape[1]
        if places <= have:
            return
        batch, room = len(self.rows), 2 * places
        token_ids = np.zeros((batch, room), dtype=np.int64)
        depths = np.zeros((batch, room), dtype=np.int64)
        mask = np.zeros((batch, room, room), dtype=bool)
        if have:
            token_ids[:, :have], depths[:, :have], mask[:, :have, :have] = self.token_ids, self.depths, self.mask
        self.token_ids, self.depths, self.mask = token_ids, depths, mask


def _padded(laws: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """[rows, longest, vocab] from lists of laws [vocab] of different lengths; zeros where there is none."""
    known = [[law for law in row if law is not None] for row in laws]
    some = next(law for row in known for law in row)
    padded = some.new_zeros((len(known), max(map(len, known)), some.shape[-1]))
    for row, own in enumerate(known):
        if own:
            padded[row, : len(own)] = torch.stack(own)
    return padded
