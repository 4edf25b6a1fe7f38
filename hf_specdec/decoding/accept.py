"""The lossless acceptance rule: follow the target's choices through the tree.

At each node the user's processors are applied to the target's logits with that node's own prefix, and the target
chooses a token (argmax or sample). The child with that token is accepted; if there is none, the choice is the bonus
token. Each choice is made exactly as in plain decoding, so the output is the target's for any tree and any processor,
if drafts were chosen without randomness or drawn independently of the target's choices. A sampled choice depends on the
seed, the row and the position only, not on the tree (`noise.py`).
If a tree has `draft_probs`, the distributions that its tokens were drawn from, the target's choice is coupled with the
draft (`coupled_choices`) instead of drawn independently. Drafts are then accepted more often.
On a device, known processors are applied to all nodes at once if possible (`at_nodes.py`), and `follow` finds the
path. In host memory `_follow_on_host` finds a greedy path; a sampled one is found step by step, since there processors
and noise take time at each node. So are paths under other processors that read the prefix. Code of the user
(`user_code.py`) is called column by column, for all rows together, exactly as plain decoding calls it.
Sources: DDTree, arXiv 2604.12989, Section 4.1, step 4; for the coupling Leviathan et al., arXiv 2211.17192,
Section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec.decoding.at_nodes import process_nodes, works_at_nodes
from hf_specdec.decoding.devices import ToHost, abilities
from hf_specdec.decoding.noise import PositionNoise, draw
from hf_specdec.decoding.relaxed import Relaxed
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.tree import DraftTree, from_host, pick
from hf_specdec.decoding.user_code import PREFIX_FREE

# The choice at a node whose processed logits are no distribution: NaN, an infinite logit, or no possible token. Such a
# node is not accepted; the call raises where it is a root, which is where plain sampling raises.
NO_DISTRIBUTION = -2


@dataclass(frozen=True)
class DrawnCandidates:
    """Sampled candidates for the token after a leaf of the verified tree; the bonus token is coupled with them.

    Attributes:
        nodes: [batch] int64, that leaf.
        token_ids: [batch, siblings] int64, the candidates, in the order they were drawn.
        draft_probs: [batch, siblings, vocab] float32, the distribution each was drawn from, conditioned on the
            previously drawn siblings.
        drafted: [batch, siblings] bool, False where a row has fewer candidates.
    """

    nodes: Tensor
    token_ids: Tensor
    draft_probs: Tensor
    drafted: Tensor

    def at(self, rows: Sequence[int] | slice) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of `coupled_choices` for these rows."""
        return self.token_ids[rows], self.draft_probs[rows], self.drafted[rows]


@dataclass
class HostVerdict:
    """A verdict as read by the host, per row.

    Attributes:
        tokens: accepted tokens, root excluded, then the bonus token; empty for inactive rows, and for rows with NaN
            logits at the root.
        num_drafted: valid nodes, root excluded.
        finite: whether the drafter's output was finite.
        nan: whether the target's logits are NaN at the root.
        is_prefix: whether the accepted nodes of all rows are nodes 0, 1, 2, ...; None where that was not checked.
    """

    tokens: list[list[int]]
    num_drafted: list[int]
    finite: list[bool]
    nan: list[bool]
    is_prefix: bool | None = None


class Verdict:
    """Which nodes of a tree the target accepted, on the device; `read` is the only transfer of a round to the host.

    Args:
        tree: that was verified.
        path: [batch, max_depth + 1] int64, accepted nodes in order, root first; then any node.
        num_accepted: [batch] int64, -1 where the target's logits are NaN at the root.
        bonus_ids: [batch] int64, the target's choice after the last accepted node.
        nan: [batch] bool, whether the target's logits are NaN at the root; not needed with `host`.
        active: per row, whether its result is used; None for all.
        scores: [batch, max_depth + 1, vocab] float32, processed logits at the nodes of `path`; None if not requested.
        host: the same verdict, if it was computed on the host; `path` then has the columns that the longest row needs.
        undefined: [batch] bool, whether the choice at the root is `NO_DISTRIBUTION`; None for nowhere.

    Attributes:
        path: [batch, steps] int64. `steps` is max_depth + 1 before `read`, then what the longest row needs.
        path_ids: [batch, steps] int64, the tokens of `path`.
        counts: nodes of `path` that each row keeps, the root included; 0 for inactive rows and rows with NaN.
    """

    def __init__(
        self,
        tree: DraftTree,
        path: Tensor,
        num_accepted: Tensor,
        bonus_ids: Tensor,
        nan: Tensor | None = None,
        active: list[bool] | None = None,
        scores: Tensor | None = None,
        host: HostVerdict | None = None,
        undefined: Tensor | None = None,
    ) -> None:
        self.path, self.path_ids, self.bonus_ids, self.scores = path, pick(tree.token_ids, path), bonus_ids, scores
        counts = num_accepted + 1
        if nan is not None and active is not None:
            is_active = from_host(active, counts.device)
            counts, nan = counts * is_active, nan & is_active
        self.counts, self.host, self._copy = Counts(counts, path.shape[1]), host, None
        if host is not None:
            self.counts.known = [len(tokens) for tokens in host.tokens]
            return
        assert nan is not None
        finite = tree.valid[:, 0] if tree.finite is None else tree.finite
        if undefined is not None:
            nan = nan + 2 * (undefined if active is None else undefined & is_active)
        columns = torch.stack([counts, bonus_ids, finite, nan, tree.valid.sum(1)], dim=1)
        self._copy = ToHost(torch.cat([columns, self.path_ids], dim=1))

    @classmethod
    def on_host(cls, tree: DraftTree, path: list[list[int]], tokens: list[list[int]], nan: list[bool]) -> Verdict:
        """The verdict that the host has found: per row the accepted nodes, and the token chosen after each of them."""
        steps, home = max(1, *map(len, path)), tree.token_ids.device
        device = None if abilities(home).host_memory else home  # in every round of a CPU
        host = HostVerdict(
            tokens=tokens,
            num_drafted=[sum(row) - 1 for row in tree.valid.tolist()],
            finite=[True] * len(tokens) if tree.finite is None else tree.finite.tolist(),
            nan=nan,
            is_prefix=all(nodes == list(range(len(nodes))) for nodes in path),
        )
        return cls(
            tree,
            from_host([nodes + [0] * (steps - len(nodes)) for nodes in path], device),
            from_host([len(nodes) - 1 for nodes in path], device),
            from_host([new[-1] if new else -1 for new in tokens], device),
            host=host,
        )

    def read(self) -> HostVerdict:
        """The verdict on the host; the first call waits for the device.

        Raises:
            RuntimeError: as plain sampling, which cannot choose the next token.
        """
        if self.host is None:
            assert self._copy is not None
            rows = self._copy.tolist()
            if any(row[3] > 1 for row in rows):
                raise _no_distribution()
            self.host = HostVerdict(
                tokens=[[*ids[1:count], bonus] if count else [] for count, bonus, _, _, _, *ids in rows],
                num_drafted=[row[4] - 1 for row in rows],
                finite=[bool(row[2]) for row in rows],
                nan=[bool(row[3]) for row in rows],
            )
            self.counts.known = known = [row[0] for row in rows]
            steps = max(1, *known)
            self.path, self.path_ids = self.path[:, :steps], self.path_ids[:, :steps]
            if abilities(self.path.device).host_memory:
                pairs = zip(self.path.tolist(), known, strict=True)
                self.host.is_prefix = all(nodes[:count] == list(range(count)) for nodes, count in pairs)
        return self.host


class Acceptor:
    """The acceptance rule of one `generate` call.

    A node with NaN logits is not accepted. Its token may be chosen as bonus token, and is then the root of the next
    round. NaN at a root may come from drafted nodes, or from cache entries that transformers' own cache would have
    dropped: additive masks do not stop NaN, because 0 * NaN is NaN. Such a row keeps nothing. The loop zeros these
    entries and verifies the row again without drafts (`DraftTree.without_drafts`); then NaN at the root is accepted.

    Args:
        logits_processor: of the call, warpers included.
        do_sample: sample from the processed distribution, or take its argmax.
        keep_scores: whether the output contains processed logits.
        lockstep: whether processors or criteria are code of the user, which must see the calls of plain decoding.
            Acceptance then appends the round's tokens to the sequences itself, column by column.
        relaxed: a rule that is not lossless, which the user asked for; None for the lossless one.
        device: of the logits.

    Attributes:
        at_once: whether no processor needs more than the tree, the logits, and the text up to the root.

    Raises:
        ValueError: the relaxed rule cannot be used in this call.
    """

    def __init__(
        self,
        logits_processor: LogitsProcessorList,
        *,
        do_sample: bool,
        keep_scores: bool,
        lockstep: bool = False,
        relaxed: Relaxed | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.processors = logits_processor
        self.do_sample = do_sample
        self.keep_scores = keep_scores
        self.lockstep = lockstep
        self.noise: PositionNoise | None = None  # of a sampling call, from its first choice on
        self._columns: list[Tensor] = []  # in lockstep, the processed logits of all columns if they are kept
        readers = [type(each).__name__ for each in logits_processor if type(each) not in PREFIX_FREE]
        self.prefix_free, self.on_host = not readers, abilities(torch.device(device)).host_memory
        self.at_once = self.prefix_free or (not self.on_host and all(map(works_at_nodes, logits_processor)))
        self.relaxed = relaxed
        if relaxed is not None and (lockstep or readers):
            raise ValueError(
                f"acceptance={relaxed!r} compares whole paths, but this call has code that reads the text token by "
                f"token ({', '.join(readers) or 'a stopping criterion or streamer of your own'}), or returns states of "
                "several rows without an end-of-text token. Leave that out, or set drafter.acceptance = None, which is "
                "lossless."
            )

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        sequences: Sequences,
        drawn: DrawnCandidates | None = None,
        active: list[bool] | None = None,
        states: Tensor | None = None,
    ) -> Verdict:
        """Follows the target's choices through `tree`; without a device sync if no processor reads the prefix.

        Args:
            tree: the tree that was verified.
            logits: [batch, nodes, vocab] float32, the target's.
            sequences: the rows up to and including the root; used only by processors that read the prefix.
            drawn: candidates for the token after a leaf, with which the bonus token is coupled.
            active: per row, whether its result is used; None for all.
            states: for a relaxed rule that reads them, see `Relaxed.accepts`.
        """
        if not self.do_sample:
            drawn = None
        elif self.noise is None:
            self.noise = PositionNoise(len(logits), logits.device)
        if self.lockstep:
            verdict = self._column_by_column(tree, logits, sequences, drawn)
        elif self.at_once and (self.relaxed is not None or not (self.on_host and self.do_sample)):
            verdict = self._all_at_once(tree, logits, sequences, drawn, active, states)
        else:
            verdict = self._step_by_step(tree, logits, sequences, drawn, active)
        if self.noise is not None:
            self.noise.position = self.noise.position + verdict.counts.tensor
        return verdict

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Continues with these rows."""
        if self.noise is not None:
            self.noise.keep_rows(rows)

    def _all_at_once(
        self,
        tree: DraftTree,
        logits: Tensor,
        sequences: Sequences,
        drawn: DrawnCandidates | None,
        active: list[bool] | None,
        states: Tensor | None,
    ) -> Verdict:
        nan, unknown = _nan(tree, logits)
        logits = process_nodes(self.processors, tree, logits, sequences)
        choices = self._choices(tree, logits, drawn).masked_fill(unknown, -1)
        if self.relaxed is not None and tree.num_nodes > 1:
            choices = self.relaxed.choices(tree, logits, choices, states)
        if abilities(logits.device).host_memory:
            verdict = _follow_on_host(tree, choices, nan, active)
        else:
            undefined = choices[:, 0] == NO_DISTRIBUTION if self.do_sample else None
            verdict = Verdict(tree, *follow(tree, choices), nan, active, undefined=undefined)
        verdict.scores = pick(logits, verdict.path) if self.keep_scores else None
        return verdict

    def _choices(self, tree: DraftTree, logits: Tensor, drawn: DrawnCandidates | None) -> Tensor:
        """The choice after each node, [batch, nodes] int64, for processed logits [batch, nodes, vocab]."""
        rows = torch.arange(len(logits), device=logits.device).unsqueeze(1)
        if self.do_sample and tree.draft_probs is not None:
            nodes = torch.arange(tree.num_nodes, device=logits.device).unsqueeze(0)
            choices = coupled_choices(logits, *_drafts_after(tree, rows, nodes))
        else:
            noise = None if self.noise is None else self.noise.at_nodes(tree, logits.shape[-1])
            choices = self._choose(logits, noise)
        if drawn is not None:
            leaf = (rows[:, 0], drawn.nodes)
            choices[leaf] = coupled_choices(logits[leaf], *drawn.at(slice(None)))
        return choices

    def _choose(self, scores: Tensor, noise: Tensor | None) -> Tensor:
        """[..., vocab] -> [...] int64: the target's choice; noise of the same shape in a call that samples."""
        if noise is None:
            return scores.argmax(-1)
        best = (scores + noise).max(-1)
        return best.indices.masked_fill(~best.values.isfinite(), NO_DISTRIBUTION)

    def _step_by_step(
        self,
        tree: DraftTree,
        logits: Tensor,
        sequences: Sequences,
        drawn: DrawnCandidates | None,
        active: list[bool] | None,
    ) -> Verdict:
        """The same rule for the nodes of the path only: one call of the processors per accepted token, plus one.

        If processors read the prefix, there is one call per length of the rows, with the complete batch, since they may
        look up a row's place.
        """
        batch, _, vocab = logits.shape
        rows = torch.arange(batch, device=logits.device)
        path = tree.token_ids.new_zeros(batch, tree.max_depth + 1)
        num_accepted = path.new_zeros(batch)
        bonus_ids = tree.token_ids[:, 0].clone()
        scores = logits.new_zeros(batch, tree.max_depth + 1, vocab) if self.keep_scores else None
        node = path.new_zeros(batch)
        if not self.prefix_free:
            sequences.reserve(tree.max_depth + 1)
        nan, unknown = _nan(tree, logits)
        num_accepted -= unknown[:, 0].long()  # these rows are not passed to any processor
        running, failed = active or sequences.of_remaining(sequences.active), unknown[:, 0].tolist()
        remaining = [row for row in range(batch) if running[row] and not failed[row]]
        for depth in range(tree.max_depth + 1):
            if not remaining:
                break
            at_node = logits[rows, node]
            if self.prefix_free:
                processed = self.processors(tree.token_ids[:, :1], at_node)
            else:
                processed = torch.empty_like(at_node)
                for length, group in sequences.by_length(remaining).items():
                    prefixes = sequences.prefixes(length + depth, group)
                    values = self.processors(prefixes, at_node[sequences.source_rows(group)])
                    processed = processed.to(values.dtype)  # a processor may return another dtype
                    processed[group] = values[group]
            chosen = torch.empty_like(bonus_ids)
            chosen[remaining] = self._choices_at(tree, node, remaining, depth, processed[remaining], drawn)
            if scores is not None:
                scores = scores.to(processed.dtype)
                scores[remaining, depth] = processed[remaining]
            undefined = chosen[remaining] == NO_DISTRIBUTION  # not accepted: the token of this node is the bonus token
            bonus_ids[remaining] = bonus_ids[remaining].where(undefined, chosen[remaining])
            num_accepted[remaining] -= undefined.long()
            found, child = _children(tree, node, chosen, unknown)
            # The next prefix is this one plus the choice. No processor is called for tokens after the end of the text.
            outcome = torch.stack([found.to(chosen.dtype), chosen])[:, remaining].tolist()
            if depth == 0 and NO_DISTRIBUTION in outcome[1]:
                raise _no_distribution()
            remaining = [
                row
                for row, hit, token in zip(remaining, *outcome, strict=True)
                if hit and (self.prefix_free or not sequences.ends(token, sequences.lengths[row] + depth + 1))
            ]
            if depth == tree.max_depth:
                break
            for row in [] if self.prefix_free else remaining:
                sequences.ids[row, sequences.lengths[row] + depth] = chosen[row]
            node[remaining] = child[remaining]
            path[remaining, depth + 1] = child[remaining]
            num_accepted[remaining] += 1
        return Verdict(tree, path, num_accepted, bonus_ids, nan, running, scores)

    def _column_by_column(
        self, tree: DraftTree, logits: Tensor, sequences: Sequences, drawn: DrawnCandidates | None
    ) -> Verdict:
        """The same rule for code of the user: processors, criteria and streamer get the calls of plain decoding.

        All active rows get one token per column. The round ends for all of them with the first column in which one has
        no child to go on with, and with the last column of the text; what else was accepted is drafted again. Finished
        rows show the logits after their last token, and padding.
        """
        rows = torch.arange(len(logits), device=logits.device)
        node = torch.zeros_like(tree.token_ids[:, 0])
        nan, unknown = _nan(tree, logits)
        active = sequences.of_remaining(sequences.active)
        failed = [is_nan and is_active for is_nan, is_active in zip(unknown[:, 0].tolist(), active, strict=True)]
        path: list[list[int]] = [[] for _ in active]
        tokens: list[list[int]] = [[] for _ in active]
        columns: list[Tensor] = []
        going = not any(failed)  # otherwise nothing is appended, and these rows are verified again without drafts
        while going:
            running = [row for row, is_active in enumerate(active) if is_active]
            processed = self.processors(sequences.columns, logits[rows, node])  # they may write into this copy
            chosen = torch.full_like(node, sequences.padding_id)
            chosen[running] = self._choices_at(tree, node, running, len(columns), processed[running], drawn)
            columns.append(processed)
            found, child = _children(tree, node, chosen, unknown)
            new, at, has_child = torch.stack([chosen, node, found.to(node.dtype)]).tolist()
            if NO_DISTRIBUTION in new:
                raise _no_distribution()
            for row in running:
                path[row].append(at[row])
                tokens[row].append(new[row])
            sequences.append_column(new, self._with_earlier_columns(processed))
            active = sequences.of_remaining(sequences.active)
            node = child.where(found, node)
            going = not sequences.done and all(has_child[row] for row, is_active in enumerate(active) if is_active)
        known_nan = [is_nan and is_active for is_nan, is_active in zip(nan.tolist(), active, strict=True)]
        verdict = Verdict.on_host(tree, path, tokens, known_nan)
        verdict.scores = torch.stack(columns, 1) if self.keep_scores and columns else None
        return verdict

    def _with_earlier_columns(self, processed: Tensor) -> tuple[Tensor, ...] | None:
        """The processed logits of all columns of the call so far, if the call keeps them."""
        if not self.keep_scores:
            return None
        self._columns.append(processed)
        return tuple(self._columns)

    def _choices_at(
        self,
        tree: DraftTree,
        node: Tensor,
        rows: list[int],
        depth: int,
        scores: Tensor,
        drawn: DrawnCandidates | None,
    ) -> Tensor:
        """The choices of some rows at their current nodes, which are at one depth.

        Args:
            tree: the tree.
            node: [batch] int64, the current node of each row.
            rows: the rows that choose.
            depth: of their nodes.
            scores: [len(rows), vocab], their processed logits.
            drawn: see `__call__`.

        Returns:
            [len(rows)] int64.
        """
        index = from_host(rows, node.device)
        if self.do_sample and tree.draft_probs is not None:
            chosen = coupled_choices(scores, *_drafts_after(tree, index, node[index]))
        else:
            noise, vocab = self.noise, scores.shape[-1]
            here = None if noise is None else noise.at(index, noise.position[index] + depth, vocab)
            chosen = self._choose(scores, here)
        if drawn is not None:
            at_leaf = [place for place, row in enumerate(rows) if int(node[row]) == int(drawn.nodes[row])]
            if at_leaf:
                chosen[at_leaf] = coupled_choices(scores[at_leaf], *drawn.at([rows[place] for place in at_leaf]))
        return chosen


def _children(tree: DraftTree, node: Tensor, chosen: Tensor, unknown: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each row has a child of `node` with the token `chosen` and a choice of its own, and which: [batch] each.

    Args:
        tree: the tree.
        node: [batch] int64.
        chosen: [batch] int64.
        unknown: [batch, nodes] bool, see `_nan`.
    """
    is_child = (tree.parents == node.unsqueeze(1)) & (tree.token_ids == chosen.unsqueeze(1)) & tree.valid & ~unknown
    found, child = is_child.max(-1)
    return found, child


def coupled_choices(scores: Tensor, draft_ids: Tensor, draft_probs: Tensor, drafted: Tensor) -> Tensor:
    """The target's choices given sampled drafts: exactly distributed as the target, and as often a draft as possible.

    Several drafts after one node, siblings, are tried in the order in which they were drawn. Let residual_1 =
    target_probs, and draft_i the distribution that sibling x_i was drawn from, conditioned on the previously drawn
    siblings. x_i is the choice with probability min(1, residual_i[x_i] / draft_i[x_i]). Otherwise the next sibling is
    tried with residual_{i+1} = max(residual_i - draft_i, 0), normalised. If no sibling is accepted, the choice is drawn
    from the last residual.

    The choice is distributed as target_probs. Proof by induction from the last sibling: the draw of x_i contributes
    min(residual_i, draft_i); by the induction hypothesis the later steps contribute max(residual_i - draft_i, 0). The
    sum is residual_i, and residual_1 is target_probs. With one sibling this is Theorem 3.5 of Leviathan et al., arXiv
    2211.17192.

    The distributions describe how the siblings were drawn. Independent draws have the same distribution each:
    Algorithm 2 of SpecBranch and SpecInfer (arXiv 2305.09781). Draws without replacement have the distribution without
    the previously drawn siblings, renormalised. Tokens selected without randomness, as top-k, would have probability 1
    for themselves; x_i is then accepted with residual_i[x_i], which equals drawing from target_probs, so that no
    coupling is needed. A literal reading of Algorithm 2 passes the distribution that such tokens were selected from:
    that is an error, and biases the output towards these tokens.

    Args:
        scores: [..., vocab] float32, processed logits of the target.
        draft_ids: [..., siblings] int64, the tokens drafted there, in the order they were drawn.
        draft_probs: [..., siblings, vocab] float32, the distribution each was drawn from, conditioned on the
            previously drawn siblings.
        drafted: [..., siblings] bool, False where there is no draft; the other two are undefined there.

    Returns:
        [...] int64. Equal to one of `draft_ids` wherever one is accepted; `NO_DISTRIBUTION` where `scores` is none.
    """
    residual = torch.softmax(scores, dim=-1)
    undefined = residual[..., 0].isnan()  # then all are NaN
    choices: Tensor | None = None
    undecided = torch.ones_like(scores[..., 0], dtype=torch.bool)
    for sibling in range(draft_ids.shape[-1]):
        ids, probs, exists = draft_ids[..., sibling], draft_probs[..., sibling, :], drafted[..., sibling]
        index = ids.unsqueeze(-1)
        at_draft = torch.cat([residual.gather(-1, index), probs.gather(-1, index)], dim=-1)
        accepted = exists & undecided & (torch.rand_like(at_draft[..., 0]) * at_draft[..., 1] < at_draft[..., 0])
        choices = ids if choices is None else ids.where(accepted, choices)
        undecided = undecided & ~accepted
        missing = (residual - probs).clamp_(min=0)
        total = missing.sum(-1, keepdim=True)
        # A total of 0: the two distributions are equal up to rounding. NaN in `probs` gives no total either.
        has_residual = exists.unsqueeze(-1) & (total > 0)
        residual = (missing / total).where(has_residual, residual)
    drawn = draw(residual)
    drawn = drawn if choices is None else drawn.where(undecided, choices)
    return drawn.masked_fill(undefined, NO_DISTRIBUTION)


def _drafts_after(tree: DraftTree, rows: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The draft after nodes of a sampled chain, as one sibling: token ids, distributions, and whether it exists."""
    assert tree.draft_probs is not None
    last = tree.num_nodes - 1
    after = (nodes + 1).clamp(max=last)
    drafted = tree.valid[rows, after] & (nodes < last)
    # After the last node any distribution will do, since it is not used.
    draft_probs = tree.draft_probs[rows, after - 1] if last else tree.draft_probs.new_zeros(*drafted.shape, 1)
    return tree.token_ids[rows, after].unsqueeze(-1), draft_probs.unsqueeze(-2), drafted.unsqueeze(-1)


def _no_distribution() -> RuntimeError:
    return RuntimeError(
        "The processed logits of the next token are no distribution to sample from: they have nan, inf or no possible "
        "token."
    )


def _nan(tree: DraftTree, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Where the target's logits are NaN: [batch] bool at the root, and [batch, nodes] bool of nodes without a choice.

    Roots of rows without drafts get a choice in any case. The first logit suffices, since NaN in a hidden state makes
    all logits NaN.
    """
    unknown = logits[..., 0].isnan()
    nan = unknown[:, 0].clone()
    if tree.no_drafts is not None:
        unknown[:, 0] &= ~tree.no_drafts
    return nan, unknown


def follow(tree: DraftTree, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the target's choices from the root of every row, for all nodes at once and without a host sync.

    A node is accepted if it and all its ancestors have the token chosen at their parent, and a choice of their own.

    Args:
        tree: the tree.
        choices: [batch, nodes] int64, the token the target chose after each node, less than 0 for no choice.

    Returns:
        path [batch, max_depth + 1], number of accepted nodes [batch], root excluded, and bonus_ids [batch], all int64.
        For a row without a choice at the root the number is -1, and the other two are undefined.

    Examples:
        >>> tree = DraftTree.from_parents(torch.tensor([[7, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]), max_depth=2)
        >>> follow(tree, torch.tensor([[2, 9, 3, 5]]))
        (tensor([[0, 2, 3]]), tensor([2]), tensor([5]))
    """
    rejected = choices < 0
    not_chosen = choices.gather(1, tree.parents[:, 1:]) != tree.token_ids[:, 1:]
    rejected[:, 1:].logical_or_(not_chosen | ~tree.valid[:, 1:])
    blocked = (rejected.unsqueeze(1) & tree.ancestor_mask).any(-1)
    # Accepted nodes form one path, since siblings differ in their token. Each is written to the column of its depth,
    # all others to a last column, which is cut off.
    slots = tree.depths.masked_fill(blocked, tree.max_depth + 1)
    batch, nodes = choices.shape
    index = torch.arange(nodes, device=choices.device).expand(batch, nodes)
    path = choices.new_zeros(batch, tree.max_depth + 2).scatter_(1, slots, index)[:, :-1]
    num_accepted = nodes - 1 - blocked.sum(1, keepdim=True)
    bonus_ids = choices.gather(1, path.gather(1, num_accepted.clamp(min=0)))
    return path, num_accepted.squeeze(1), bonus_ids.squeeze(1)


def _follow_on_host(tree: DraftTree, choices: Tensor, nan: Tensor, active: list[bool] | None) -> Verdict:
    """`follow` for tensors in host memory: one look-up per accepted token instead of a dozen tensor operations.

    Args as of `follow` and `Verdict`.
    """
    paths: list[list[int]] = []
    tokens: list[list[int]] = []
    rows = zip(tree.token_ids.tolist(), tree.parents.tolist(), tree.valid.tolist(), choices.tolist(), strict=True)
    for row, (token_ids, parents, valid, chosen) in enumerate(rows):
        children = {(parents[node], token_ids[node]): node for node in range(1, len(valid)) if valid[node]}
        path: list[int] = []
        node: int | None = 0 if active is None or active[row] else None
        if node == 0 and chosen[0] == NO_DISTRIBUTION:
            raise _no_distribution()
        while node is not None and chosen[node] >= 0:
            path.append(node)
            node = children.get((node, chosen[node]))
        paths.append(path)
        tokens.append([chosen[node] for node in path])
    known_nan = [is_nan and (active is None or active[row]) for row, is_nan in enumerate(nan.tolist())]
    return Verdict.on_host(tree, paths, tokens, known_nan)
