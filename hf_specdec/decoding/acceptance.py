"""The lossless rules: follow the target's own choice through the tree, coupled with the drafts where those were drawn.

At each node the user's processors are applied to the target's logits with that node's own prefix, the target chooses
(argmax or sample), and the walk goes to the child with that token; where there is none, the choice is the bonus token.
Each choice is made exactly as plain decoding makes it, so the output is the target's for any tree and any processor.
That holds for drafts chosen without randomness and for drafts that are drawn independently of the target's choices.
A tree that says from which law its tokens were drawn is accepted more often: there the target's choice is not drawn
anew but coupled with the draft (`coupled_choices`), and then followed in the same way.
Sources: DDTree, arXiv 2604.12989, Section 4.1, step 4; for the coupling
Leviathan et al., arXiv 2211.17192, Section 2.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from hf_specdec.decoding.devices import abilities
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.transfer import ToHost, works_ahead
from hf_specdec.decoding.tree import DraftTree, count_up, from_host, pick

if TYPE_CHECKING:
    from hf_specdec.decoding.candidates import DraftsAhead, DrawnCandidates

# Processors that look at the logits alone, one row at a time: all nodes of a tree can go through them in one call.
PREFIX_FREE = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinPLogitsWarper,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)

# Processors of the host that remember earlier calls, one state for the whole batch; rows of a batch take turns here.
STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


@dataclass
class Acceptance:
    """What the target made of a tree.

    Attributes:
        path: [batch, steps] int64, accepted nodes in order, root first; any node index behind a row's last. `steps` is
            at least the longest accepted path, root included.
        path_ids: [batch, steps] int64, their tokens.
        bonus_ids: [batch] int64, the target's choice after the last accepted node.
        tokens: the same for the host: per row the accepted tokens, root excluded, and then the bonus token. Nothing at
            all where the target gave NaN for the root (`FollowTarget`).
        num_drafted: valid nodes per row, root excluded.
        finite: per row, whether the drafter's output was finite.
        leading: the host knows that the accepted nodes of every row are the first of the tree, in order.
        scores: [batch, steps, vocab] float32, processed logits at the nodes of `path`, or None if not asked for.
    """

    path: Tensor
    path_ids: Tensor
    bonus_ids: Tensor
    tokens: list[list[int]]
    num_drafted: list[int]
    finite: list[bool]
    leading: bool
    scores: Tensor | None

    @property
    def num_accepted(self) -> list[int]:
        """Drafted nodes kept per row; root and bonus excluded."""
        return [max(0, len(row) - 1) for row in self.tokens]


class FollowTarget:
    """The acceptance rule of one `generate` call.

    A node that the target gives NaN for is not followed: its token may be chosen, as a bonus, and is the root of the
    next round. NaN at a root says nothing of it while there are other tokens, or entries of the cache that the host
    has dropped: masks let NaN pass, they only multiply by 0. Such a row accepts nothing, and is to be verified again
    with these wiped and without its drafts. The root of a bare row (`DraftTree.without_drafts`) is taken as it is.

    Args:
        logits_processor: of the call, warpers included.
        do_sample: sample from the processed distribution, or take its argmax.
        keep_scores: whether processed logits are wanted in the output.
    """

    def __init__(self, logits_processor: LogitsProcessorList, *, do_sample: bool, keep_scores: bool) -> None:
        self.processors = LogitsProcessorList(map(self._of_own_rows, logits_processor))
        self.asked: list[int] = []  # the rows that processors are asked about, the others stand in for them
        self.do_sample = do_sample
        self.keep_scores = keep_scores
        self.prefix_free = all(type(processor) in PREFIX_FREE for processor in logits_processor)

    def _of_own_rows(self, processor: LogitsProcessor) -> LogitsProcessor:
        """A `prefix_allowed_tokens_fn` is told the row, so it is asked about none that holds another row's text."""
        if type(processor) is not PrefixConstrainedLogitsProcessor:
            return processor
        allowed = processor._prefix_allowed_tokens_fn

        def of_own_rows(row: int, sent: Tensor) -> list[int]:
            return allowed(row, sent) if row in self.asked else [0]

        return PrefixConstrainedLogitsProcessor(of_own_rows, processor._num_beams)

    def __call__(
        self, tree: DraftTree, logits: Tensor, sequences: Sequences, ahead: DraftsAhead | None = None
    ) -> Acceptance:
        """Walks `tree` by the target's choices.

        Args:
            tree: the tree that was verified.
            logits: [batch, nodes, vocab] float32, the target's. May be written to.
            sequences: the rows up to and including the root.
            ahead: what was drafted behind the tree meanwhile; its drawn tokens are coupled with the bonus token.
        """
        drawn = ahead.drawn if ahead is not None and self.do_sample else None
        if not self.prefix_free:
            return self._walk_step_by_step(tree, logits, sequences, drawn)
        simple = tree.children is not None and not self.do_sample and not self.processors
        if simple and tree.bare is None and abilities(logits.device).host_memory:
            acceptance = _walk(tree, functools.partial(_likeliest, logits.numpy()))
        else:
            logits, choices = self._choices(tree, logits, drawn)
            if tree.children is not None:
                listed = choices.tolist()
                acceptance = _walk(tree, lambda row, node: listed[row][node])
            else:
                acceptance = _read(tree, *follow(tree, choices))
        if self.keep_scores:
            acceptance = replace(acceptance, scores=pick(logits, acceptance.path))
        return acceptance

    def begin(self, tree: DraftTree, logits: Tensor) -> Walk:
        """The same on the device alone, for processors without a prefix; `Walk.read` waits for it.

        Args:
            tree: the tree that was verified; drafted, not drawn, and nothing of it known to the host.
            logits: [batch, nodes, vocab] float32, the target's. May be written to.
        """
        return Walk(tree, *follow(tree, self._choices(tree, logits, None)[1]))

    def _choices(self, tree: DraftTree, logits: Tensor, drawn: DrawnCandidates | None) -> tuple[Tensor, Tensor]:
        """Processed logits [batch, nodes, vocab], and the choice after each node [batch, nodes] int64, -1 for none."""
        unknown = _unknown(tree, logits)
        if self.do_sample and (works_ahead(logits.device) or bool(unknown.any())):
            logits = logits.masked_fill(unknown.unsqueeze(-1), 0)  # drawing from NaN is an error
        logits = self._processed(tree, logits)
        if self.do_sample and tree.draft_probs is not None:
            choices = coupled_choices(logits, *_drafts_below(tree))
        else:
            choices = self._choose(logits)
        if drawn is not None:
            leaf = (torch.arange(len(choices), device=choices.device), drawn.nodes)
            choices[leaf] = coupled_choices(logits[leaf], drawn.token_ids, drawn.draft_probs, drawn.drafted)
        return logits, choices.masked_fill(unknown, -1)

    def _processed(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """[batch, nodes, vocab], all nodes through the processors at once."""
        if not self.processors:
            return logits
        flat = self.processors(tree.token_ids.reshape(-1, 1), logits.reshape(-1, logits.shape[-1]))
        return flat.view(logits.shape)

    def _choose(self, scores: Tensor) -> Tensor:
        """[..., vocab] -> [...] int64: the target's choice, as plain decoding makes it."""
        if not self.do_sample:
            return scores.argmax(-1)
        probs = torch.softmax(scores, dim=-1)
        return torch.multinomial(probs.view(-1, probs.shape[-1]), num_samples=1).view(scores.shape[:-1])

    def _walk_step_by_step(
        self, tree: DraftTree, logits: Tensor, sequences: Sequences, drawn: DrawnCandidates | None
    ) -> Acceptance:
        """The same rule for processors that read the prefix: one call per accepted token plus one, in plain order.

        In a batch of one, even a processor with a state of its own sees exactly the calls that plain decoding makes.
        """
        batch, _, vocab = logits.shape
        device = logits.device
        rows = torch.arange(batch, device=device)
        path = torch.zeros(batch, tree.max_depth + 1, dtype=torch.int64, device=device)
        num_accepted = torch.zeros(batch, dtype=torch.int64, device=device)
        bonus_ids = tree.token_ids[:, 0].clone()
        scores = logits.new_zeros(batch, tree.max_depth + 1, vocab) if self.keep_scores else None
        node = torch.zeros(batch, dtype=torch.int64, device=device)
        sequences.reserve(tree.max_depth + 1)
        walking = [row for row, active in enumerate(sequences.active) if active]
        unknown = _unknown(tree, logits)
        if bool(unknown[walking, 0].any()):  # no processor should see that
            return _read(tree, *follow(tree, torch.full_like(tree.token_ids, -1)))
        drafts = _drafts_below(tree) if self.do_sample and tree.draft_probs is not None else None
        for depth in range(tree.max_depth + 1):
            at_node = logits[rows, node]
            processed = torch.empty_like(at_node)

            def ask(length: int, group: list[int], stand_ins: list[int], at_node: Tensor = at_node) -> Tensor:
                self.asked = group
                return self.processors(sequences.prefixes(length, group), at_node[stand_ins])

            for group, values in sequences.for_each_length(walking, depth, ask):
                processed = processed.to(values.dtype)  # a processor may answer in another precision
                processed[group] = values[group]
            chosen = torch.empty_like(bonus_ids)
            if drafts is None:
                chosen[walking] = self._choose(processed[walking])
            else:
                here = (walking, node[walking])
                chosen[walking] = coupled_choices(processed[walking], *(part[here] for part in drafts))
            if drawn is not None:
                arrived = [row for row in walking if int(node[row]) == int(drawn.nodes[row])]
                if arrived:
                    parts = (drawn.token_ids, drawn.draft_probs, drawn.drafted)
                    chosen[arrived] = coupled_choices(processed[arrived], *(part[arrived] for part in parts))
            if scores is not None:
                scores = scores.to(processed.dtype)
                scores[walking, depth] = processed[walking]
            bonus_ids[walking] = chosen[walking]
            is_child = (tree.parents == node.unsqueeze(1)) & (tree.token_ids == chosen.unsqueeze(1)) & tree.valid
            found, child = is_child.max(-1)
            # The next prefix of this walk is this one plus the choice. What follows the end nobody is asked.
            outcome = torch.stack([found.to(chosen.dtype), chosen])[:, walking].tolist()
            walking = [
                row
                for row, hit, token in zip(walking, *outcome, strict=True)
                if hit and not sequences.ends(token, sequences.lengths[row] + depth + 1)
            ]
            if not walking or depth == tree.max_depth:
                break
            for row in walking:
                sequences.ids[row, sequences.lengths[row] + depth] = chosen[row]
            node[walking] = child[walking]
            path[walking, depth + 1] = child[walking]
            num_accepted[walking] += 1
        return replace(_read(tree, path, num_accepted, bonus_ids), scores=scores)


def coupled_choices(scores: Tensor, draft_ids: Tensor, draft_probs: Tensor, drafted: Tensor) -> Tensor:
    """The target's choices where tokens were drafted by draws: a draft itself as often as the target's law allows.

    Several drafts for one place, siblings, are asked in the order in which they were drawn, each with the law that it
    was drawn from, given its elder siblings. Let rest_1 = target_probs. Sibling x_i, drawn from draft_i, is the choice
    with probability min(1, rest_i[x_i] / draft_i[x_i]); otherwise the next one is asked with
    rest_{i+1} = max(rest_i - draft_i, 0), normalised; what no sibling was chosen for is drawn from the last rest.

    The choice follows target_probs exactly, by induction from the last sibling: over the draws of x_i a token is chosen
    here with min(rest_i, draft_i), and the others share what is missing, max(rest_i - draft_i, 0), if what comes after
    follows rest_{i+1} as the induction says; together that is rest_i, and rest_1 is the target's law. With one sibling
    this is Theorem 3.5 of Leviathan et al., arXiv 2211.17192.

    How siblings were drawn is told by their laws alone. Independent draws carry the same law each: Algorithm 2 of
    SpecBranch and SpecInfer (arXiv 2305.09781). Draws without replacement carry the law without the elder siblings,
    renormalised. Tokens picked without randomness, a top-k, would carry all of their law on themselves; the rule then
    accepts x_i with rest_i[x_i] and so comes down to drawing from target_probs, which needs no rule. To hand such
    tokens in with the law they were picked from is the mistake that a literal reading of Algorithm 2 makes: its output
    leans towards them.

    Args:
        scores: [..., vocab] float32, processed logits of the target.
        draft_ids: [..., siblings] int64, the tokens drafted there, in the order they were drawn.
        draft_probs: [..., siblings, vocab] float32, the law each was drawn from, given its elder siblings.
        drafted: [..., siblings] bool, False where there is no draft; the other two then hold anything.

    Returns:
        [...] int64. Equal to one of `draft_ids` wherever one is accepted.
    """
    rest = torch.softmax(scores, dim=-1)
    choices: Tensor | None = None
    open_still = torch.ones_like(scores[..., 0], dtype=torch.bool)
    for sibling in range(draft_ids.shape[-1]):
        ids, law, there = draft_ids[..., sibling], draft_probs[..., sibling, :], drafted[..., sibling]
        index = ids.unsqueeze(-1)
        at_draft = torch.cat([rest.gather(-1, index), law.gather(-1, index)], dim=-1)
        accepted = there & open_still & (torch.rand_like(at_draft[..., 0]) * at_draft[..., 1] < at_draft[..., 0])
        choices = ids if choices is None else ids.where(accepted, choices)
        open_still = open_still & ~accepted
        missing = (rest - law).clamp_(min=0)
        total = missing.sum(-1, keepdim=True)
        # Without a rest the two laws are equal up to rounding; a law with NaN has none either, and is not believed.
        has_rest = there.unsqueeze(-1) & (total > 0)
        rest = (missing / total).where(has_rest, rest)
    drawn = torch.multinomial(rest.view(-1, rest.shape[-1]), num_samples=1).view(open_still.shape)
    return drawn if choices is None else drawn.where(open_still, choices)


def _drafts_below(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
    """Per node of a drawn chain what was drafted after it, one sibling: token ids, laws, and whether anything was."""
    assert tree.draft_probs is not None
    token_ids, drafted = tree.token_ids.roll(-1, 1), tree.valid.roll(-1, 1)
    drafted[:, -1] = False  # nothing follows the last node
    laws = torch.nn.functional.pad(tree.draft_probs, (0, 0, 0, 1))
    return token_ids.unsqueeze(-1), laws.unsqueeze(-2), drafted.unsqueeze(-1)


def _unknown(tree: DraftTree, logits: Tensor) -> Tensor:
    """[batch, nodes] bool: where the target gives NaN, but for the roots of bare rows, which are taken as they are.

    One number tells, since NaN in a hidden state is NaN in all logits.
    """
    unknown = logits[..., 0].isnan()
    if tree.bare is not None:
        unknown[:, 0] &= ~tree.bare
    return unknown


def _likeliest(logits: np.ndarray, row: int, node: int) -> int:
    """The token with the largest of the logits [batch, nodes, vocab] after a node, -1 where there is NaN.

    As torch finds it: of equals the first, and NaN is the largest.
    """
    scores = logits[row, node]
    best = int(scores.argmax())
    return -1 if math.isnan(scores.item(best)) else best


def follow(tree: DraftTree, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Walks every row of a tree by the target's choice at each node, all nodes at once and without a host sync.

    A node is accepted when it and all its ancestors carry the token chosen at their parent, and have a choice.

    Args:
        tree: the tree.
        choices: [batch, nodes] int64, the token the target chose after each node, -1 where it gave none.

    Returns:
        path [batch, max_depth + 1], number of accepted nodes [batch], root excluded, and bonus_ids [batch], all int64.
        Without a choice after the root -1 nodes are accepted, and what the others hold is of no use.

    Example:
        >>> tree = DraftTree.from_parents(torch.tensor([[7, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]), max_depth=2)
        >>> follow(tree, torch.tensor([[2, 9, 3, 5]]))
        (tensor([[0, 2, 3]]), tensor([2]), tensor([5]))
    """
    rejected = choices < 0
    strays = choices.gather(1, tree.parents[:, 1:]) != tree.token_ids[:, 1:]
    rejected[:, 1:].logical_or_(strays | ~tree.valid[:, 1:])
    blocked = (rejected.unsqueeze(1) & tree.ancestor_mask).any(-1)
    # Accepted nodes form one path, since siblings differ in their token; each is written at its depth, the rest aside.
    slots = tree.depths.masked_fill(blocked, tree.max_depth + 1)
    batch, nodes = choices.shape
    index = count_up(nodes, choices.device).expand(batch, nodes)
    path = choices.new_zeros(batch, tree.max_depth + 2).scatter_(1, slots, index)[:, :-1]
    num_accepted = nodes - 1 - blocked.sum(1, keepdim=True)
    bonus_ids = choices.gather(1, path.gather(1, num_accepted.clamp(min=0)))
    return path, num_accepted.squeeze(1), bonus_ids.squeeze(1)


class Walk:
    """What came of a tree, on the device: the outcome of `follow`, and the only transfer of a round under way.

    Attributes:
        path: [batch, max_depth + 1] int64.
        path_ids: [batch, max_depth + 1] int64, its tokens.
        num_accepted: [batch] int64.
        bonus_ids: [batch] int64.
    """

    def __init__(self, tree: DraftTree, path: Tensor, num_accepted: Tensor, bonus_ids: Tensor) -> None:
        self.path, self.num_accepted, self.bonus_ids = path, num_accepted, bonus_ids
        self.path_ids = tree.token_ids.gather(1, path)
        self._first = 3 + tree.num_nodes + 1  # where the path's tokens begin, root left out
        finite = tree.valid[:, :1] if tree.finite is None else tree.finite.unsqueeze(1)
        columns = (num_accepted.unsqueeze(1), bonus_ids.unsqueeze(1), finite, tree.valid, self.path_ids)
        self._outcome = ToHost(torch.cat(columns, dim=1))

    def read(self) -> Acceptance:
        """Waits for the outcome."""
        rows, first = self._outcome.tolist(), self._first
        return Acceptance(
            path=self.path,
            path_ids=self.path_ids,
            bonus_ids=self.bonus_ids,
            tokens=[[*row[first : first + row[0]], row[1]] if row[0] >= 0 else [] for row in rows],
            num_drafted=[sum(row[3 : first - 1]) - 1 for row in rows],
            finite=[bool(row[2]) for row in rows],
            leading=False,  # only the device knows
            scores=None,
        )


def _read(tree: DraftTree, path: Tensor, num_accepted: Tensor, bonus_ids: Tensor) -> Acceptance:
    """Brings the outcome of a walk to the host."""
    return Walk(tree, path, num_accepted, bonus_ids).read()


def _walk(tree: DraftTree, choose: Callable[[int, int], int]) -> Acceptance:
    """`follow` for a tree whose children are known to the host: one look-up per accepted token.

    `choose(row, node)` is the target's choice after a node, -1 where it gave none.
    """
    assert tree.children is not None
    paths: list[list[int]] = []
    tokens: list[list[int]] = []
    leading = True
    for row, children in enumerate(tree.children):
        walked: list[int] = []
        chosen: list[int] = []
        node: int | None = 0
        while node is not None and (choice := choose(row, node)) >= 0:
            leading &= node == len(walked)
            walked.append(node)
            chosen.append(choice)
            node = children.get((node, choice))
        paths.append(walked)
        tokens.append(chosen)
    steps = max(1, *map(len, paths))
    device = tree.token_ids.device
    if leading:
        path, path_ids = count_up(steps, device).expand(len(paths), -1), tree.token_ids[:, :steps]
    else:
        path = from_host([walked + [0] * (steps - len(walked)) for walked in paths], device)
        path_ids = pick(tree.token_ids, path)
    return Acceptance(
        path=path,
        path_ids=path_ids,
        bonus_ids=from_host([chosen[-1] if chosen else -1 for chosen in tokens], device),
        tokens=tokens,
        num_drafted=[len(children) for children in tree.children],
        finite=[True] * len(tokens) if tree.finite is None else tree.finite.tolist(),
        leading=leading,
        scores=None,
    )
