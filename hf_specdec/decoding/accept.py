"""The lossless rules: follow the target's own choice through the tree, coupled with the drafts where those were drawn.

At each node the user's processors are applied to the target's logits with that node's own prefix, the target chooses
(argmax or sample), and the walk goes to the child with that token; where there is none, the choice is the bonus token.
Each choice is made exactly as plain decoding makes it, so the output is the target's for any tree and any processor.
That holds for drafts chosen without randomness and for drafts that are drawn independently of the target's choices.
A tree that says from which law its tokens were drawn is accepted more often: there the target's choice is not drawn
anew but coupled with the draft (`coupled_choices`), and then followed in the same way.
Processors that look at logits alone take all nodes at once; the walk is then `follow` on a device, and `_walk` in host
memory. Processors that read the text before a node are asked step by step.
Sources: DDTree, arXiv 2604.12989, Section 4.1, step 4; for the coupling Leviathan et al., arXiv 2211.17192,
Section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from hf_specdec.decoding.devices import ToHost, abilities
from hf_specdec.decoding.host import asked_about_rows
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.tree import DraftTree, from_host, pick

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


def check_rows(logits_processor: LogitsProcessorList, batch: int) -> None:
    """Raises ValueError if a processor keeps state from call to call and there are several rows."""
    stateful = [type(processor).__name__ for processor in logits_processor if isinstance(processor, STATEFUL)]
    if stateful and batch > 1:
        raise ValueError(
            f"{stateful[0]} keeps state from call to call, for rows that grow together, but in a batch of {batch} rows "
            "accept different numbers of drafted tokens. Generate one row at a time, or without assistant_model."
        )


@dataclass(frozen=True)
class DrawnCandidates:
    """Tokens drawn at random for what may follow a verified tree; the bonus token can then be coupled with them.

    Attributes:
        nodes: [batch] int64, the leaf of the verified tree that the tokens would follow.
        token_ids: [batch, siblings] int64, candidates for the token after that leaf, in the order they were drawn.
        draft_probs: [batch, siblings, vocab] float32, the law each was drawn from, given its elder siblings.
        drafted: [batch, siblings] bool, False where a row has fewer candidates.
    """

    nodes: Tensor
    token_ids: Tensor
    draft_probs: Tensor
    drafted: Tensor

    def at(self, rows: Sequence[int] | slice) -> tuple[Tensor, Tensor, Tensor]:
        """What `coupled_choices` takes, for some of the rows."""
        return self.token_ids[rows], self.draft_probs[rows], self.drafted[rows]


@dataclass(frozen=True)
class HostVerdict:
    """A verdict as the host has read it, per row.

    Attributes:
        tokens: accepted tokens, root excluded, and then the bonus token; nothing at all in a row that took no part, or
            for whose root the target gave NaN.
        num_drafted: valid nodes, root excluded.
        finite: whether the drafter's output was finite.
        nan: whether the target gave NaN for the root.
        leading: the accepted nodes of all rows are the first of the tree, in order; None where that was not looked at.
    """

    tokens: list[list[int]]
    num_drafted: list[int]
    finite: list[bool]
    nan: list[bool]
    leading: bool | None = None


class Verdict:
    """What the target made of a tree, on the device; `read` is the only transfer of a round to the host.

    Args:
        tree: that was verified.
        path: [batch, max_depth + 1] int64, accepted nodes in order, root first; any node behind a row's last.
        num_accepted: [batch] int64, -1 where the target gave NaN for the root.
        bonus_ids: [batch] int64, the target's choice after the last accepted node.
        nan: [batch] bool, whether the target gave NaN for the root.
        going: per row, whether it takes part; None for all.
        scores: [batch, max_depth + 1, vocab] float32, processed logits at the nodes of `path`, where they are kept.
        host: the verdict as the host knows it already, where the walk was made there; `path` then has the columns that
            the longest row needs.

    Attributes:
        path: [batch, steps] int64. `steps` is max_depth + 1 until the host has read, then what the longest row needs.
        path_ids: [batch, steps] int64, its tokens.
        counts: nodes of `path` that each row keeps, the root among them; 0 for rows that take no part or have NaN.
    """

    def __init__(
        self,
        tree: DraftTree,
        path: Tensor,
        num_accepted: Tensor,
        bonus_ids: Tensor,
        nan: Tensor,
        going: list[bool] | None = None,
        scores: Tensor | None = None,
        host: HostVerdict | None = None,
    ) -> None:
        self.path, self.path_ids, self.bonus_ids, self.scores = path, pick(tree.token_ids, path), bonus_ids, scores
        counts = num_accepted + 1
        if going is not None:
            takes_part = from_host(going, counts.device)
            counts, nan = counts * takes_part, nan & takes_part
        self.counts, self.host, self._copy = Counts(counts, path.shape[1]), host, None
        if host is not None:
            self.counts.known = [len(tokens) for tokens in host.tokens]
            return
        finite = tree.valid[:, 0] if tree.finite is None else tree.finite
        columns = torch.stack([counts, bonus_ids, finite, nan, tree.valid.sum(1)], dim=1)
        self._copy = ToHost(torch.cat([columns, self.path_ids], dim=1))

    def read(self) -> HostVerdict:
        """Waits for the outcome, where it has not been read yet."""
        if self.host is None:
            assert self._copy is not None
            rows = self._copy.tolist()
            self.host = HostVerdict(
                tokens=[[*row[6 : 5 + row[0]], row[1]] if row[0] else [] for row in rows],
                num_drafted=[row[4] - 1 for row in rows],
                finite=[bool(row[2]) for row in rows],
                nan=[bool(row[3]) for row in rows],
            )
            self.counts.known = [row[0] for row in rows]
            steps = max(1, *self.counts.known)
            self.path, self.path_ids = self.path[:, :steps], self.path_ids[:, :steps]
        return self.host


class Acceptor:
    """The acceptance rule of one `generate` call.

    A node that the target gives NaN for is not followed: its token may be chosen, as a bonus, and is the root of the
    next round. NaN at a root says nothing of it while there are other tokens, or entries of the cache that the host
    has dropped: masks let NaN pass, they only multiply by 0. Such a row keeps nothing, and is to be verified again
    with these wiped and without its drafts. The root of a bare row (`DraftTree.without_drafts`) is taken as it is.

    Args:
        logits_processor: of the call, warpers included.
        do_sample: sample from the processed distribution, or take its argmax.
        keep_scores: whether processed logits are wanted in the output.
    """

    def __init__(self, logits_processor: LogitsProcessorList, *, do_sample: bool, keep_scores: bool) -> None:
        self.asked: list[int] = []  # the rows that processors are asked about, the others stand in for them
        self.processors = asked_about_rows(logits_processor, lambda row: row in self.asked)
        self.do_sample = do_sample
        self.keep_scores = keep_scores
        self.prefix_free = all(type(processor) in PREFIX_FREE for processor in logits_processor)

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        sequences: Sequences,
        drawn: DrawnCandidates | None = None,
        going: list[bool] | None = None,
    ) -> Verdict:
        """Walks `tree` by the target's choices; without a look at the device where no processor reads a prefix.

        Args:
            tree: the tree that was verified.
            logits: [batch, nodes, vocab] float32, the target's.
            sequences: the rows up to and including the root; read for processors with a prefix only.
            drawn: what was drawn behind the tree meanwhile, which the bonus token is coupled with.
            going: per row, whether it takes part; None for all.
        """
        if not self.do_sample:
            drawn = None
        if not self.prefix_free:
            return self._step_by_step(tree, logits, sequences, drawn)
        nan, unknown = _nan(tree, logits)
        logits, choices = self._choices(tree, logits, unknown, drawn)
        if abilities(logits.device).host_memory:
            path, num_accepted, bonus_ids, host = _walk(tree, choices, nan, going)
        else:
            (path, num_accepted, bonus_ids), host = follow(tree, choices), None
        scores = pick(logits, path) if self.keep_scores else None
        return Verdict(tree, path, num_accepted, bonus_ids, nan, going, scores, host)

    def _choices(
        self, tree: DraftTree, logits: Tensor, unknown: Tensor, drawn: DrawnCandidates | None
    ) -> tuple[Tensor, Tensor]:
        """Processed logits [batch, nodes, vocab], and the choice after each node [batch, nodes] int64, -1 for none."""
        if self.do_sample and (not abilities(logits.device).host_memory or bool(unknown.any())):
            logits = logits.masked_fill(unknown.unsqueeze(-1), 0)  # drawing from NaN is an error
        if self.processors:
            flat = self.processors(tree.token_ids.reshape(-1, 1), logits.reshape(-1, logits.shape[-1]))
            logits = flat.view(logits.shape)
        if self.do_sample and tree.draft_probs is not None:
            choices = coupled_choices(logits, *_drafts_below(tree))
        else:
            choices = self._choose(logits)
        if drawn is not None:
            leaf = (torch.arange(len(choices), device=choices.device), drawn.nodes)
            choices[leaf] = coupled_choices(logits[leaf], *drawn.at(slice(None)))
        return logits, choices.masked_fill(unknown, -1)

    def _choose(self, scores: Tensor) -> Tensor:
        """[..., vocab] -> [...] int64: the target's choice, as plain decoding makes it."""
        if not self.do_sample:
            return scores.argmax(-1)
        probs = torch.softmax(scores, dim=-1)
        return torch.multinomial(probs.view(-1, probs.shape[-1]), num_samples=1).view(scores.shape[:-1])

    def _step_by_step(
        self, tree: DraftTree, logits: Tensor, sequences: Sequences, drawn: DrawnCandidates | None
    ) -> Verdict:
        """The same rule for processors that read the prefix: one call per accepted token plus one, in plain order.

        In a batch of one, even a processor with a state of its own sees exactly the calls that plain decoding makes.
        """
        batch, _, vocab = logits.shape
        rows = torch.arange(batch, device=logits.device)
        path = tree.token_ids.new_zeros(batch, tree.max_depth + 1)
        num_accepted = path.new_zeros(batch)
        bonus_ids = tree.token_ids[:, 0].clone()
        scores = logits.new_zeros(batch, tree.max_depth + 1, vocab) if self.keep_scores else None
        node = path.new_zeros(batch)
        sequences.reserve(tree.max_depth + 1)
        nan, unknown = _nan(tree, logits)
        num_accepted -= unknown[:, 0].long()  # no processor should see these rows
        going, failed = sequences.active, unknown[:, 0].tolist()
        walking = [row for row in range(batch) if going[row] and not failed[row]]
        drafts = _drafts_below(tree) if self.do_sample and tree.draft_probs is not None else None
        for depth in range(tree.max_depth + 1):
            if not walking:
                break
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
                    chosen[arrived] = coupled_choices(processed[arrived], *drawn.at(arrived))
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
            if depth == tree.max_depth:
                break
            for row in walking:
                sequences.ids[row, sequences.lengths[row] + depth] = chosen[row]
            node[walking] = child[walking]
            path[walking, depth + 1] = child[walking]
            num_accepted[walking] += 1
        return Verdict(tree, path, num_accepted, bonus_ids, nan, going, scores)


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


def _nan(tree: DraftTree, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Where the target gives NaN: [batch] bool at the root, and [batch, nodes] bool at nodes that are not followed.

    The roots of bare rows are taken as they are. One number tells, since NaN in a hidden state is NaN in all logits.
    """
    unknown = logits[..., 0].isnan()
    nan = unknown[:, 0].clone()
    if tree.bare is not None:
        unknown[:, 0] &= ~tree.bare
    return nan, unknown


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
    index = torch.arange(nodes, device=choices.device).expand(batch, nodes)
    path = choices.new_zeros(batch, tree.max_depth + 2).scatter_(1, slots, index)[:, :-1]
    num_accepted = nodes - 1 - blocked.sum(1, keepdim=True)
    bonus_ids = choices.gather(1, path.gather(1, num_accepted.clamp(min=0)))
    return path, num_accepted.squeeze(1), bonus_ids.squeeze(1)


def _walk(
    tree: DraftTree, choices: Tensor, nan: Tensor, going: list[bool] | None
) -> tuple[Tensor, Tensor, Tensor, HostVerdict]:
    """`follow` where tensors lie in host memory: a look-up per accepted token, where `follow` makes a dozen tensors.

    The arguments are those of `follow` and of `Verdict`, which is also who the outcome is for.
    """
    paths: list[list[int]] = []
    tokens: list[list[int]] = []
    num_drafted = []
    rows = zip(tree.token_ids.tolist(), tree.parents.tolist(), tree.valid.tolist(), choices.tolist(), strict=True)
    for row, (token_ids, parents, valid, chosen) in enumerate(rows):
        children = {(parents[node], token_ids[node]): node for node in range(1, len(valid)) if valid[node]}
        num_drafted.append(len(children))
        walked: list[int] = []
        node: int | None = 0 if going is None or going[row] else None
        while node is not None and chosen[node] >= 0:
            walked.append(node)
            node = children.get((node, chosen[node]))
        paths.append(walked)
        tokens.append([chosen[node] for node in walked])
    steps = max(1, *map(len, paths))
    finite = [True] * len(paths) if tree.finite is None else tree.finite.tolist()
    known_nan = [is_nan and (going is None or going[row]) for row, is_nan in enumerate(nan.tolist())]
    return (
        from_host([walked + [0] * (steps - len(walked)) for walked in paths], None),
        from_host([len(walked) - 1 for walked in paths], None),
        from_host([new[-1] if new else -1 for new in tokens], None),
        HostVerdict(tokens, num_drafted, finite, known_nan, all(path == list(range(len(path))) for path in paths)),
    )
