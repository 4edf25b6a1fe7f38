"""The draft model's side of SpecBranch: its text, its cache, and its branches as a tree of Python lists per row.

`BranchDrafting` runs during verification, in a thread (`generator.py`). Its messages are small: the tokens that a round
emitted, and the chain to verify next. Source: SpecBranch, Section 5.2, Algorithm 1 and Figures 8 and 9 of its appendix.

The entries of one row's round in the draft model's cache, after the text: the root; the chain that is being verified,
whose last node is the leaf; and after the leaf the branches, k candidates of the branch point with their continuations.
They are paths of one tree, so the prefix is stored once. When the target has chosen a candidate, its branch is the next
round's chain. The same cache update that commits the accepted entries drops those of all other branches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specdec.decoding.devices import seconds_of
from hf_specdec.decoding.exchange import ChoiceRule
from hf_specdec.decoding.noise import draw
from hf_specdec.decoding.stats import SpeculationStats
from hf_specdec.decoding.tree import DraftTree, from_host
from hf_specdec.drafting.draft_model import DraftModel

# Classes of H-RAD for the tokens that would be verified next (SpecBranch, Eq. 6).
ALL_REJECT, CONFIDENCE, ALL_ACCEPT = 0, 1, 2


@dataclass(frozen=True)
class DraftingPlan:
    """The settings of a call.

    Attributes:
        most_tokens: gamma, most tokens of a chain, most tokens of a branch after its candidate, and most forwards of
            the draft model during one verification.
        most_branches: k_max.
        most_hedges: most branches from nodes within the chain that is being verified; 0 for none.
        min_confidence: epsilon; a node is a branch point if the draft model's likeliest next token has less.
        draw_candidates: whether the candidates of a branch point are sampled without replacement in calls that sample;
            if not, they are the likeliest tokens.
        choice: how the call chooses tokens.
        vocab_size: columns of the target's logits.
    """

    most_tokens: int
    most_branches: int
    most_hedges: int
    min_confidence: float
    draw_candidates: bool
    choice: ChoiceRule
    vocab_size: int


@dataclass(frozen=True)
class Signals:
    """The decisions of H-RAD, or of its replacement, for one row.

    Attributes:
        kept_branch: how much of the branch that the target has chosen is verified next.
        fresh: how much is drafted before the next verification if the target has chosen no branch.
        branches: how far branches are drafted during verification: the a-priori approach of Appendix G.2; `ALL_ACCEPT`
            for the posterior one, which decides afterwards.
    """

    kept_branch: int
    fresh: int
    branches: int = ALL_ACCEPT


@dataclass(frozen=True)
class Chains:
    """The tokens to verify next.

    Attributes:
        tokens: per row the chain after the root.
        draft_probs: [batch, longest chain, vocab] float32, the distributions of sampled tokens; None if greedy.
        finite: per row, whether the draft model's logits were finite.
    """

    tokens: list[list[int]]
    draft_probs: Tensor | None
    finite: list[bool]


@dataclass(frozen=True)
class Branches:
    """The branches drafted during a verification.

    Attributes:
        candidates: per row the candidates of the branch point.
        draft_probs: [batch, most candidates, vocab] float32, the distribution that each was sampled from, conditioned
            on the previous siblings; None if none were sampled.
    """

    candidates: list[list[int]]
    draft_probs: Tensor | None


@dataclass
class Prediction:
    """The draft model's output after a node.

    Attributes:
        token_ids: the likeliest tokens, likeliest first.
        probs: their probabilities, at temperature 1 (Appendix E.3).
        chosen: the token drafted next: the likeliest, or the sampled one.
        draft_probs: [vocab] float32, the distribution that `chosen` was sampled from; None if it was not sampled.
    """

    token_ids: list[int]
    probs: list[float]
    chosen: int
    draft_probs: Tensor | None


@dataclass
class Node:
    """A node of the tree.

    Attributes:
        token: its id.
        parent: index of its parent; -1 for none.
        cache_index: index of its cache entry; -1 if it was not run.
        prediction: the draft model's output after it; None if it was not run.
        next: the node that continues its branch; -1 for none.
        counted: whether its forward was counted as a draft.
    """

    token: int
    parent: int
    cache_index: int = -1
    prediction: Prediction | None = None
    next: int = -1
    counted: bool = False


@dataclass
class Row:
    """One row: its text, root included, and the draft tree. Nodes 0 to `root` are text that is not yet in the cache."""

    text: list[int]
    active: bool = True
    nodes: list[Node] = field(default_factory=list)
    root: int = 0
    chain: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    hedges: list[int] = field(default_factory=list)
    finite: bool = True

    @property
    def leaf(self) -> int:
        """The last node that is verified in this round."""
        return self.chain[-1] if self.chain else self.root

    def add(self, token: int, parent: int) -> int:
        """Adds a node; returns its index."""
        self.nodes.append(Node(token, parent))
        return len(self.nodes) - 1

    def extend(self, node: int) -> int | None:
        """Adds the drafted token after a node that was run; None if its logits were not finite."""
        prediction = self.nodes[node].prediction
        if prediction is None:
            return None
        self.nodes[node].next = self.add(prediction.chosen, node)
        return self.nodes[node].next

    def prepared(self) -> dict[tuple[int, int], int]:
        """The branches, by the result of the target that chooses each: how many tokens it accepts, and its next one."""
        path = [self.root, *self.chain]
        branches = (*self.branches, *self.hedges)
        results = [(path.index(self.nodes[branch].parent), self.nodes[branch].token) for branch in branches]
        return dict(zip(results, branches, strict=True))

    def chosen_branch(self, tokens: list[int]) -> int | None:
        """The branch that the target chose, from the tokens that the round emitted; None if it chose none."""
        return self.prepared().get((len(tokens) - 1, tokens[-1])) if tokens else None

    def branch_nodes(self, branch: int | None) -> list[int]:
        """The nodes of a branch, from its candidate to its last node; [] for None."""
        nodes = []
        while branch is not None and branch >= 0:
            nodes.append(branch)
            branch = self.nodes[branch].next
        return nodes

    def count_drafts(self, branch: int | None) -> int:
        """The number of drafted tokens, not counted before, on the path that is continued.

        This is the branch that the target chose, or else the likeliest one. Forwards for other branches are the cost of
        branching, and do not count as rolled back (Appendix E.3).
        """
        if branch is None and self.branches:
            branch = self.branches[0]
        nodes = self.branch_nodes(branch)
        path = [self.root, *self.chain]
        if nodes:
            path = [*path[: path.index(self.nodes[nodes[0]].parent) + 1], *nodes]
        run = [node for node in (self.nodes[index] for index in path) if node.cache_index >= 0 and not node.counted]
        for node in run:
            node.counted = True
        return len(run)

    def clear(self) -> None:
        """Removes the tree."""
        self.nodes, self.root, self.chain, self.branches, self.hedges = [], 0, [], [], []


def num_branches(most_branches: int, confidence: float) -> int:
    """K = max(1, floor(k_max (1 - q))): the number of candidates of a branch point. SpecBranch, Eq. 7.

    Examples:
        >>> [num_branches(6, confidence) for confidence in (0.99, 0.5, 0.1)]
        [1, 3, 5]
    """
    return max(1, int(most_branches * (1 - confidence)))


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
        self.stats = SpeculationStats()
        self.stopped = False  # set by another thread to end `draft_ahead` before its next forward
        self.num_positions: int = getattr(self.drafter.config, "max_position_embeddings", None) or sys.maxsize
        self.random = torch.Generator(model.device)
        self.num_entries = 0
        # The arguments of the next `_update_cache`.
        self.cache_update: tuple[list[list[int]], list[list[int]]] | None = None

    @torch.no_grad()
    def start(self, texts: list[list[int]], mask: Tensor | None, seed: int) -> None:
        """Runs the draft model over all texts without their last token.

        Args:
            texts: per row all tokens so far, root included.
            mask: [batch, shortest text - 1] bool, False at padding; None for no padding.
            seed: of all samples of this call.
        """
        self.rows = [Row(list(text)) for text in texts]
        self.random.manual_seed(seed)
        device = self.drafter.model.device
        length = min(map(len, texts)) - 1  # further tokens of longer rows are run in the first round
        token_ids = from_host([text[:length] for text in texts], device)
        # Drafted nodes may use all positions of the model.
        self.drafter.prefill_for_drafting(token_ids, None if mask is None else mask.to(device), self.num_positions)
        self.drafter.begin_rounds(length + 256)
        # By row and cache entry of the round: token, depth and ancestors.
        self.token_ids = np.zeros((len(texts), 64), dtype=np.int64)
        self.depths = np.zeros_like(self.token_ids)
        self.mask = np.zeros((len(texts), 64, 64), dtype=bool)

    @torch.no_grad()
    def seconds_per_forward(self) -> float:
        """T_q: the median time of a forward over as many nodes as a level may have branches and hedges."""
        width = self.plan.most_branches + self.plan.most_hedges

        def forward() -> None:
            for row in self.rows:
                row.nodes = [Node(row.text[-1], min(node, 1) - 1) for node in range(width)]
            self._run([list(range(width)) for _ in self.rows])
            for row in self.rows:
                row.clear()
            self.cache_update = [[] for _ in self.rows], [[] for _ in self.rows]

        random = self.random.get_state()  # so that later samples do not depend on this measurement
        seconds = seconds_of(forward, self.drafter.model.device)
        self._update_cache()
        self.stats = SpeculationStats()
        self.random.set_state(random)
        return seconds

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
            self._draft_fresh(signals)
        tokens = [[row.nodes[node].token for node in row.chain] for row in self.rows]
        above = [[row.nodes[row.nodes[node].parent].prediction for node in row.chain] for row in self.rows]
        draft_probs = [[each.draft_probs for each in row if each and each.draft_probs is not None] for row in above]
        return Chains(tokens, _padded(draft_probs), [row.finite for row in self.rows])

    @torch.no_grad()
    def skip(self, emitted: Sequence[list[int]], signals: Sequence[Signals]) -> None:
        """As `draft`, in a round that verifies no drafts: only updates the rows."""
        self._update_rows(emitted, [row.active for row in self.rows], signals)
        self._update_cache()

    @torch.no_grad()
    def draft_ahead(self, signals: Sequence[Signals]) -> Branches:
        """Drafts branches after the chains returned by `draft`, while the target verifies these."""
        forwards = 0
        if not self._has_positions():
            return Branches([[] for _ in self.rows], None)
        unrun: list[list[int]] = [[] for _ in self.rows]
        for row, nodes in zip(self.rows, unrun, strict=True):
            if row.nodes:
                nodes += [node for node in [*range(row.root + 1), *row.chain] if row.nodes[node].cache_index < 0]
                self._add_hedges(row)
        if any(unrun):  # candidates need the leaf's output, but hedges do not
            self._run_branches(signals, unrun)
            forwards += 1
        draft_probs = [self._add_candidates(row) if row.nodes else [] for row in self.rows]
        while forwards < self.plan.most_tokens and not self.stopped and self._run_branches(signals):
            forwards += 1
        candidates = [[row.nodes[node].token for node in row.branches] for row in self.rows]
        return Branches(candidates, _padded(draft_probs))

    def final_stats(self, emitted: Sequence[list[int]]) -> SpeculationStats:
        """The totals of the call; `emitted` is as for `draft`, from the last round."""
        for row, tokens in zip(self.rows, emitted, strict=True):
            self._count(row, tokens)
        return self.stats

    def _count(self, row: Row, tokens: list[int]) -> int | None:
        """Counts a row's drafts by their result; returns the branch that the target chose."""
        if not row.nodes or not tokens:
            return None
        chosen = row.chosen_branch(tokens)
        self.stats.num_path_drafts += row.count_drafts(chosen)
        self.stats.num_path_kept += len(tokens) - 1 + (chosen is not None)
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
            self.stats.num_prepared += row.active and bool(row.branches or row.hedges)
            self.stats.num_foreseen += row.active and chosen is not None
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

    def _draft_fresh(self, signals: Sequence[Signals]) -> None:
        """The draft stage: new chains for rows without a chosen branch."""
        rows = {index: row for index, row in enumerate(self.rows) if row.active and not row.nodes}
        frontiers: list[list[int]] = [[] for _ in self.rows]
        for index, row in rows.items():
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
            for index, row in rows.items():
                if not frontiers[index]:
                    continue
                tip, frontiers[index] = frontiers[index][-1], []
                if tip == row.root:
                    row.finite = row.nodes[tip].prediction is not None
                if signals[index].fresh == CONFIDENCE and not self._is_confident(row, tip):
                    continue
                drafted = row.extend(tip)
                if drafted is not None:
                    row.chain.append(drafted)
                    if len(row.chain) < self.plan.most_tokens:
                        frontiers[index] = [drafted]
        self.stats.num_path_drafts += sum(row.count_drafts(None) for row in rows.values())

    def _is_confident(self, row: Row, node: int) -> bool:
        """Whether the token after a node is not a branch point.

        It depends on the node's distribution, never on the token sampled from it: else the remaining drafts would have
        another distribution than the recorded one.
        """
        prediction = row.nodes[node].prediction
        return prediction is not None and prediction.probs[0] >= self.plan.min_confidence

    def _add_candidates(self, row: Row) -> list[Tensor]:
        """Adds the candidates after the leaf; returns the distribution of each sampled one, [] if none were sampled."""
        row.branches = []
        leaf = row.nodes[row.leaf]
        prediction = leaf.prediction
        if prediction is None:
            return []
        count = num_branches(self.plan.most_branches, prediction.probs[0])
        draft_probs: list[Tensor] = []
        tokens = prediction.token_ids[:count]
        if prediction.draft_probs is not None and self.plan.draw_candidates:
            # The token sampled at the leaf comes first: its branch may exist already.
            tokens, draft_probs, remaining = [prediction.chosen], [prediction.draft_probs], prediction.draft_probs
            while len(tokens) < count:
                remaining = remaining.index_fill(0, from_host(tokens[-1:], remaining.device), 0)
                total = remaining.sum()
                if not float(total) > 0:
                    break
                remaining = remaining / total
                tokens.append(int(draw(remaining, self.random)))
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
        paths = [row.branch_nodes(branch) for branch in [*row.branches, *row.hedges]]
        return [
            path[-1] for path in paths if row.nodes[path[-1]].cache_index < 0 and len(path) <= self.plan.most_tokens
        ]

    # Running the draft model.

    def _has_positions(self) -> bool:
        """Whether the draft model has enough positions for a round; if not, the target decodes without drafts."""
        longest = max(len(row.text) for row in self.rows)
        return longest + 2 * self.plan.most_tokens + 2 <= self.num_positions

    def _run(self, frontiers: Sequence[Sequence[int]]) -> None:
        """One forward over nodes of every row, parents before children; sets their outputs."""
        self._update_cache()
        first, width = self.num_entries, max(map(len, frontiers))
        self.num_entries = stop = first + width
        if stop > self.token_ids.shape[1]:
            more = (0, 2 * stop - self.token_ids.shape[1])
            self.token_ids, self.depths = (np.pad(array, ((0, 0), more)) for array in (self.token_ids, self.depths))
            self.mask = np.pad(self.mask, ((0, 0), more, more))
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
        token_ids, depths, mask = (from_host(array, device) for array in arrays)
        tree = DraftTree(token_ids, depths - 1, depths, mask, token_ids >= 0, int(self.depths[:, :stop].max()))
        cache = self.drafter.cache
        logits = self.drafter.verify(tree, self.drafter.root_positions(), first=first).logits
        cache.continue_round(width)
        self.stats.peak_draft_entries = max(self.stats.peak_draft_entries, cache.longest + stop)
        for row, frontier, row_predictions in zip(self.rows, frontiers, self._predictions(logits), strict=True):
            for node, prediction in zip(frontier, row_predictions, strict=False):
                row.nodes[node].prediction = prediction

    def _predictions(self, logits: Tensor) -> list[list[Prediction | None]]:
        """[batch, nodes, vocab] logits -> outputs per row and node; None if the logits are NaN or infinite."""
        batch, nodes, vocab = logits.shape
        top = logits.softmax(-1).topk(min(self.plan.most_branches, vocab), dim=-1)
        chosen, draft_probs = top.indices[..., :1], [None] * (batch * nodes)
        if self.plan.choice.do_sample:
            scores = logits.where(top.values[..., :1].isfinite(), 0.0).view(-1, vocab)
            scores = self.plan.choice.warpers(logits.new_zeros((batch * nodes, 1), dtype=torch.int64), scores)
            probs = scores.softmax(-1)
            chosen, draft_probs = draw(probs, self.random).view(batch, nodes, 1), list(probs.unbind(0))
        made: list[Prediction | None] = []
        # One transfer: ids are exact in float32, since no vocabulary has 2^24 tokens.
        rows = torch.cat([top.values, top.indices, chosen], -1).flatten(0, 1).tolist()
        for (*numbers, token), own_probs in zip(rows, draft_probs, strict=True):
            sure, ids = numbers[: len(numbers) // 2], [int(number) for number in numbers[len(numbers) // 2 :]]
            finite = sure[0] == sure[0]  # NaN differs from itself
            made.append(Prediction(ids, sure, int(token), own_probs) if finite else None)
        return [made[first : first + nodes] for first in range(0, len(made), nodes)]

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


def _padded(probs: Sequence[list[Tensor]]) -> Tensor | None:
    """[rows, longest, vocab] from lists of distributions [vocab] of different lengths; None if all are empty."""
    some = next((each for row in probs for each in row), None)
    if some is None:
        return None
    return pad_sequence([torch.stack(row) if row else some.new_zeros(0, len(some)) for row in probs], batch_first=True)
