"""Best-first trees: against Algorithm 1 of the paper, and against a full enumeration of prefixes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.growth import heap_tree as own_heap_tree
from hf_specdec.drafting.growth import level_tree
from tests.trees import heap_tree


def assert_is_algorithm_1(logits: Tensor, budget: int) -> None:
    """The tree of these marginals is that of the paper's algorithm. Padding may have any content."""
    roots = torch.arange(len(logits))
    found, expected = level_tree(roots, logits, budget), heap_tree(roots, logits, budget)
    assert found.finite is not None
    assert expected.finite is not None
    assert isinstance(found.path_logprobs, Tensor)
    assert expected.path_logprobs is not None
    assert found.finite.tolist() == expected.finite.tolist()
    assert found.valid.sum(1).tolist() == expected.valid.sum(1).tolist()
    for row, count in enumerate(expected.valid.sum(1).tolist()):
        assert found.valid[row, :count].all(), "valid nodes come before padding"
        for name in ("token_ids", "parents", "depths"):
            assert getattr(found, name)[row, :count].tolist() == getattr(expected, name)[row, :count].tolist(), name
        kept = found.ancestor_mask[row, :count, :count]
        assert kept.tolist() == expected.ancestor_mask[row, :count, :count].tolist()
        # A node that sees padding would read keys that belong to no path.
        assert not found.ancestor_mask[row, :count, count:].any()
        assert found.path_logprobs[row, :count].tolist() == list(expected.path_logprobs[row])
        assert (found.path_logprobs[row, count:] == -torch.inf).all()


def likeliest_prefixes(logits: Tensor, budget: int) -> list[tuple[int, ...]]:
    """All prefixes of one row, likeliest first, cut to `budget`; as tuples of token ids.

    Of equally likely ones the shorter is first, then the one whose parent is first, then the better rank.
    """
    logprobs = logits.log_softmax(-1).double()
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    every = []
    for position in logprobs:
        ranked = position.argsort(descending=True, stable=True).tolist()
        level = [(score + float(position[token]), (*path, token)) for score, path in level for token in ranked]
        level.sort(key=lambda prefix: -prefix[0])  # stable: by parent and then rank
        every += level
    return [tokens for _, tokens in sorted(every, key=lambda prefix: -prefix[0])[:budget]]


def prefixes_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """The drafted prefixes of a row, in node order."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[int(tree.parents[row, node])], int(tree.token_ids[row, node])))
    return paths[1:]


def random_logits(batch: int, depth: int, vocab: int, *, seed: int, scale: float = 2.0) -> Tensor:
    return torch.randn(batch, depth, vocab, generator=torch.Generator().manual_seed(seed)) * scale


SHAPES = [(1, 7, 50, 16), (3, 15, 40, 64), (2, 4, 9, 1), (2, 3, 4, 1000), (1, 1, 30, 8), (4, 6, 2, 30)]


@pytest.mark.parametrize(("batch", "depth", "vocab", "budget"), SHAPES)
@pytest.mark.parametrize("scale", [0.1, 2.0, 12.0])
def test_the_tree_is_that_of_the_papers_algorithm(
    batch: int, depth: int, vocab: int, budget: int, scale: float
) -> None:
    for seed in range(5):
        assert_is_algorithm_1(random_logits(batch, depth, vocab, seed=seed, scale=scale), budget)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_tree_is_that_of_the_algorithm_where_many_scores_are_equal(steps: int) -> None:
    for seed in range(10):
        assert_is_algorithm_1((random_logits(3, 6, 12, seed=seed, scale=1.0) * steps).round() / steps, 40)


def test_the_tree_is_that_of_the_algorithm_where_all_scores_are_equal() -> None:
    assert_is_algorithm_1(torch.zeros(2, 4, 5), 30)


def test_the_tree_is_that_of_the_algorithm_where_a_token_is_certain() -> None:
    # Log-probability 0: a child scores exactly what its parent scores.
    logits = torch.full((1, 5, 8), -200.0)
    logits[0, :, 3] = 200.0
    logits[0, 2, 4] = 200.0
    assert_is_algorithm_1(logits, 20)


@pytest.mark.parametrize(("depth", "vocab"), [(1, 5), (2, 4), (3, 3), (4, 3), (5, 2)])
@pytest.mark.parametrize("budget", [1, 2, 5, 13, 400])
def test_tree_is_the_likeliest_prefixes_of_a_full_enumeration(depth: int, vocab: int, budget: int) -> None:
    for seed in range(3):
        logits = random_logits(2, depth, vocab, seed=seed)
        tree = level_tree(torch.tensor([0, 1]), logits, budget)
        assert tree.valid.all()
        for row in range(2):
            assert prefixes_of(tree, row) == likeliest_prefixes(logits[row], budget)


@pytest.mark.parametrize("budget", [5, 40, 400])
def test_equally_likely_tokens_rank_by_their_ids(budget: int) -> None:
    for seed in range(5):
        logits = random_logits(1, 3, 5, seed=seed, scale=1.0).round()
        tree = level_tree(torch.tensor([0]), logits, budget)
        assert prefixes_of(tree, 0) == likeliest_prefixes(logits[0], budget)


def test_root_is_first_and_parents_come_before_their_children() -> None:
    roots = torch.tensor([7, 9])
    tree = level_tree(roots, random_logits(2, 5, 20, seed=0), 25)
    assert tree.token_ids[:, 0].tolist() == [7, 9]
    assert (tree.parents < torch.arange(26)).all()
    assert tree.parents[:, 0].tolist() == [-1, -1]
    assert (tree.parents[:, 1:] >= 0).all()
    assert tree.num_nodes == 26


def test_budget_zero_drafts_nothing() -> None:
    tree = level_tree(torch.tensor([4, 5]), random_logits(2, 3, 6, seed=0), 0)
    assert tree.token_ids.tolist() == [[4], [5]]
    assert tree.valid.all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_with_unusable_logits_keeps_only_its_root(value: float) -> None:
    logits = random_logits(3, 4, 10, seed=0)
    logits[1, 2, 5] = value
    tree = level_tree(torch.tensor([1, 2, 3]), logits, 12)
    assert tree.finite is not None
    assert tree.finite.tolist() == [True, False, True]
    assert tree.valid[1].tolist() == [True] + [False] * 12
    for row in (0, 2):
        alone = level_tree(torch.tensor([row + 1]), logits[row : row + 1], 12)
        assert tree.token_ids[row].tolist() == alone.token_ids[0].tolist()
        assert tree.parents[row].tolist() == alone.parents[0].tolist()


def test_a_position_without_any_possible_token_is_unusable() -> None:
    logits = random_logits(1, 3, 6, seed=0)
    logits[0, 1] = -torch.inf
    tree = level_tree(torch.tensor([1]), logits, 6)
    assert tree.finite is not None
    assert tree.finite.tolist() == [False]
    assert tree.valid[0, 1:].any().item() is False


def test_impossible_tokens_are_never_drafted() -> None:
    logits = random_logits(2, 3, 6, seed=0)
    logits[..., 4] = -torch.inf
    tree = level_tree(torch.tensor([0, 0]), logits, 300)
    drafted = tree.token_ids[tree.valid & (torch.arange(tree.num_nodes) > 0)]
    assert 4 not in drafted.tolist()
    assert tree.valid.sum(1).tolist() == [1 + 5 + 25 + 125] * 2
    assert_is_algorithm_1(logits, 300)


def test_rows_do_not_influence_each_other() -> None:
    logits = random_logits(4, 5, 30, seed=3)
    together = level_tree(torch.arange(4), logits, 20)
    for row in range(4):
        alone = level_tree(torch.tensor([row]), logits[row : row + 1], 20)
        for name in ("token_ids", "parents", "depths", "ancestor_mask", "valid"):
            assert torch.equal(getattr(together, name)[row], getattr(alone, name)[0]), name


@pytest.mark.parametrize("budget", [1, 5, 40])
def test_both_builders_give_one_tree(budget: int) -> None:
    for seed in range(5):
        logits = random_logits(2, 4, 9, seed=seed, scale=1.0)
        logits = logits.round() if seed % 2 else logits  # many equal ones
        if seed == 3:
            logits[0, 1] = torch.nan
        heap = own_heap_tree(torch.tensor([3, 4]), logits, budget)
        level = level_tree(torch.tensor([3, 4]), logits, budget)
        for row in range(2):
            own, other = (tree.valid[row].nonzero().squeeze(1) for tree in (heap, level))
            assert len(own) == len(other)
            for name in ("token_ids", "parents", "depths"):
                assert torch.equal(getattr(heap, name)[row, own], getattr(level, name)[row, other]), name
