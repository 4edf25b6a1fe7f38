"""Drafters without a network, whose drafts the test decides: the target's continuation, a fixed tree, or garbage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import Drafter
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.options import DrafterOptions


class StubDrafter(Drafter):
    """Drafts with a function from the context to a tree; remembers every tree and outcome of the latest call."""

    method = "stub"

    def __init__(self, draft: Callable[[DraftContext], DraftTree]) -> None:
        self.options = DrafterOptions()
        self.draft = draft
        self.trees: list[DraftTree] = []
        self.outcomes: list[Committed] = []

    def check_target(self, model: PreTrainedModel) -> None:
        """Fits any target."""

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        self.trees, self.outcomes = [], []
        return _StubGenerator(self)


class _StubGenerator(TreeCandidateGenerator):
    def __init__(self, drafter: StubDrafter) -> None:
        self.drafter = drafter

    def draft(self, context: DraftContext) -> DraftTree:
        tree = self.drafter.draft(context)
        self.drafter.trees.append(tree)
        return tree

    def observe(self, committed: Committed) -> None:
        self.drafter.outcomes.append(committed)


def right_for(num_right: int | Sequence[int], script: Tensor, *, siblings: int = 2, vocab: int = 64) -> StubDrafter:
    """Follows `script` for exactly `num_right` tokens, then errs; a sequence gives the number round by round.

    Every level also has `siblings` wrong tokens, in front of the right one, and one more level is all wrong.

    Args:
        num_right: how many drafted tokens of a round are the script's.
        script: [batch, length] int64, what plain decoding gives, prompt included.
        siblings: wrong alternatives per level.
        vocab: ids to draw wrong tokens from.
    """
    per_round = [num_right] if isinstance(num_right, int) else list(num_right)
    rounds = 0

    def draft(context: DraftContext) -> DraftTree:
        nonlocal rounds
        right = per_round[rounds % len(per_round)]
        rounds += 1
        rows = []
        for row, length in enumerate(context.lengths):
            tokens, parents, parent = [int(context.root_ids[row])], [-1], 0
            for depth in range(right + 1):
                following = _token_at(script, row, length + depth)
                for sibling in range(siblings):
                    tokens.append((following + 1 + sibling) % vocab)
                    parents.append(parent)
                wrong = depth == right
                tokens.append((following + 1 + siblings) % vocab if wrong else following)
                parents.append(parent)
                parent = len(tokens) - 1
            rows.append((tokens, parents))
        return _tree(rows, right + 1)

    return StubDrafter(draft)


def random_trees(script: Tensor, *, nodes: int = 12, share: float = 0.6, vocab: int = 64, seed: int = 0) -> StubDrafter:
    """Random parents and random tokens, a `share` of them what `script` has at that depth, so that some are right.

    Siblings may repeat, and padding may be anywhere.
    """
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(0, limit, (), generator=generator))

    def draft(context: DraftContext) -> DraftTree:
        rows = []
        for row, length in enumerate(context.lengths):
            tokens, parents, depths = [int(context.root_ids[row])], [-1], [0]
            for node in range(1, nodes):
                # Late parents are likelier, for deep trees.
                parent = max(below(node), below(node))
                depth = depths[parent] + 1
                right = float(torch.rand((), generator=generator)) < share
                tokens.append(_token_at(script, row, length + depth - 1) if right else below(vocab))
                parents.append(parent)
                depths.append(depth)
            rows.append((tokens, parents))
        valid = torch.rand(len(rows), nodes, generator=generator) < 0.95
        valid[:, 0] = True
        return _tree(rows, nodes - 1, valid)

    return StubDrafter(draft)


def fixed_tree(token_ids: list[int], parents: list[int]) -> StubDrafter:
    """The same tree below every root, whatever the prefix; the lists leave the root out, whose index is 0."""

    def draft(context: DraftContext) -> DraftTree:
        rows = len(context.lengths)
        drafted = torch.tensor(token_ids, dtype=torch.int64).expand(rows, -1)
        above = torch.tensor([-1, *parents]).expand(rows, -1)
        return DraftTree.from_parents(torch.cat([context.root_ids[:, None], drafted], 1), above, len(token_ids))

    return StubDrafter(draft)


def _token_at(script: Tensor, row: int, column: int) -> int:
    return int(script[row, column]) if column < script.shape[1] else 3


def _tree(rows: list[tuple[list[int], list[int]]], max_depth: int, valid: Tensor | None = None) -> DraftTree:
    token_ids = torch.tensor([tokens for tokens, _ in rows])
    parents = torch.tensor([parents for _, parents in rows])
    return DraftTree.from_parents(token_ids, parents, max_depth, valid=valid)
