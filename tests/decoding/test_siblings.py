"""Several tokens drawn for one place: the target's choice follows its law however they were drawn, and only then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_specdec.decoding.accept import DrawnCandidates, coupled_choices
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.state import RoundState
from hf_specdec.decoding.target import TargetModel, TargetOutput
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.options import DrafterOptions
from tests.decoding.test_sampling import PROMPT, ROWS, VOCAB, count, draw, enumerate_law, sampled_target
from tests.laws import BOUND_SIGMA, assert_follows, deviation_sigma
from tests.scripted import StubDrafter

DRAWS = 60_000
TARGET = torch.tensor([0.35, 0.3, 0.2, 0.1, 0.05])
DRAFT = torch.tensor([0.1, 0.5, 0.1, 0.2, 0.1])


def without_replacement(law: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[rows, vocab] -> [rows, count] tokens and the law of each, given its elders."""
    tokens, laws = [], []
    for _ in range(count):
        laws.append(law)
        tokens.append(torch.multinomial(law, 1).squeeze(1))
        law = law.scatter(1, tokens[-1][:, None], 0.0)
        law = law / law.sum(-1, keepdim=True)
    return torch.stack(tokens, 1), torch.stack(laws, 1)


def with_replacement(law: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return torch.multinomial(law, count, replacement=True), law[:, None].expand(-1, count, -1)


def likeliest_as_if_drawn(law: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Algorithm 2 taken literally: the top k, each with the law they were picked from."""
    return law.topk(count, dim=-1).indices, law[:, None].expand(-1, count, -1)


def likeliest_as_they_are(law: Tensor, count: int) -> tuple[Tensor, Tensor]:
    tokens = law.topk(count, dim=-1).indices
    return tokens, torch.nn.functional.one_hot(tokens, law.shape[-1]).float()


Drawing = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def choose(draw_siblings: Drawing, siblings: int) -> tuple[Tensor, Tensor]:
    tokens, laws = draw_siblings(DRAFT.expand(DRAWS, -1), siblings)
    scores = TARGET.log().expand(DRAWS, -1)
    return tokens, coupled_choices(scores, tokens, laws, torch.ones_like(tokens, dtype=torch.bool))


@pytest.mark.parametrize("siblings", [1, 2, 3, 5])
@pytest.mark.parametrize("drawing", [without_replacement, with_replacement, likeliest_as_they_are])
def test_choices_follow_the_target_however_siblings_were_drawn(drawing: Drawing, siblings: int) -> None:
    tokens, choices = choose(drawing, siblings)
    assert_follows(Counter(choices.tolist()), dict(enumerate(TARGET.tolist())))
    if siblings == len(TARGET) and drawing is not with_replacement:
        assert bool((tokens == choices[:, None]).any(-1).all()), "every token was a candidate"


@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_top_k_siblings_passed_as_drawn_are_detected(siblings: int) -> None:
    # The negative control.
    _, choices = choose(likeliest_as_if_drawn, siblings)
    assert deviation_sigma(Counter(choices.tolist()), dict(enumerate(TARGET.tolist()))) > 2 * BOUND_SIGMA


def test_more_siblings_are_accepted_more_often() -> None:
    hits = []
    for siblings in (1, 2, 3):
        tokens, choices = choose(without_replacement, siblings)
        hits.append(float((tokens == choices[:, None]).any(-1).float().mean()))
    assert hits[0] == pytest.approx(float(torch.minimum(TARGET, DRAFT).sum()), abs=0.01)
    assert hits[0] < hits[1] < hits[2]


def test_rows_may_have_different_numbers_of_siblings() -> None:
    tokens, laws = without_replacement(DRAFT.expand(DRAWS, -1), 3)
    drafted = torch.arange(3) < torch.arange(DRAWS)[:, None] % 4
    choices = coupled_choices(TARGET.log().expand(DRAWS, -1), tokens, laws, drafted)
    for row in range(4):
        assert_follows(Counter(choices[row::4].tolist()), dict(enumerate(TARGET.tolist())))


class _BranchingGenerator(TreeCandidateGenerator):
    """A drawn token below every root, and two candidates behind it, drafted while the target verifies."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.table = (2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))).softmax(-1)

    def draft(self, context: DraftContext) -> DraftTree:
        tokens, laws = without_replacement(self.table[context.root_ids], 1)
        return DraftTree.chain(torch.cat([context.root_ids[:, None], tokens], 1), draft_probs=laws)

    def verify(self, target: TargetModel, tree: DraftTree, state: RoundState) -> TargetOutput:
        tokens, laws = self.drawing(self.table[tree.token_ids[:, 1]], 2)
        leaves = torch.ones(len(tokens), dtype=torch.int64)
        drawn = DrawnCandidates(leaves, tokens, laws, torch.ones_like(tokens) > 0)
        return replace(super().verify(target, tree, state), drawn=drawn)


class BranchingDrafter(StubDrafter):
    def __init__(self, drawing: Drawing) -> None:
        self.options = DrafterOptions()
        self.drawing = drawing

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        return _BranchingGenerator(self.drawing)


@pytest.mark.parametrize("sampling", ["plain", "temperature", "repetition penalty"])
def test_sampled_tokens_follow_the_target_with_candidates_after_the_tree(sampling: str) -> None:
    target = sampled_target()
    drafter: Drafter = BranchingDrafter(without_replacement)
    drawn = draw(target, torch.tensor([PROMPT]), sampling, drafter)
    assert_follows(count(drawn), enumerate_law(target, PROMPT, sampling))
    assert drafter.stats is not None
    assert drafter.stats.num_accepted_draft_tokens > ROWS / 20


@pytest.mark.parametrize("sampling", ["plain", "repetition penalty"])
def test_top_k_candidates_passed_as_drawn_are_detected(sampling: str) -> None:
    target = sampled_target()
    drawn = draw(target, torch.tensor([PROMPT]), sampling, BranchingDrafter(likeliest_as_if_drawn))
    assert deviation_sigma(count(drawn), enumerate_law(target, PROMPT, sampling)) > 2 * BOUND_SIGMA
