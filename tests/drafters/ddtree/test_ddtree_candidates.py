"""Best-first trees: the two builders against each other, and both against a full enumeration of prefixes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.ddtree import heap_tree, level_tree

BUILDERS = {"heap": heap_tree, "level by level": level_tree}


def finite_rows(tree: DraftTree) -> list[bool]:
    """None stands for all of them."""
    return [True] * len(tree.token_ids) if tree.finite is None else tree.finite.tolist()


def assert_same_tree(found: DraftTree, expected: DraftTree) -> None:
    """Padding may look as it likes; all else must be equal."""
    assert found.num_nodes == expected.num_nodes
    assert found.valid.tolist() == expected.valid.tolist()
    assert finite_rows(found) == finite_rows(expected)
    for row, valid in enumerate(expected.valid):
        for name in ("token_ids", "parents", "depths"):
            assert getattr(found, name)[row][valid].tolist() == getattr(expected, name)[row][valid].tolist(), name
        kept = found.ancestor_mask[row][valid][:, valid]
        assert kept.tolist() == expected.ancestor_mask[row][valid][:, valid].tolist()
        # A node that sees padding would read keys that belong to no path.
        assert not found.ancestor_mask[row][valid][:, ~valid].any()


def likeliest_prefixes(logits: Tensor, budget: int) -> list[tuple[int, ...]]:
    """All prefixes of one row, likeliest first and ties by rank tuple, cut to `budget`; as tuples of token ids."""
    logprobs = logits.log_softmax(-1).double()
    ranked = [row.argsort(descending=True, stable=True).tolist() for row in logprobs]
    scored = []
    for depth in range(1, len(logits) + 1):
        for ranks in itertools.product(range(logits.shape[1]), repeat=depth):
            tokens = tuple(ranked[level][rank] for level, rank in enumerate(ranks))
            score = 0.0
            for level, token in enumerate(tokens):
                score += float(logprobs[level, token])
            scored.append((-score, ranks, tokens))
    return [tokens for _, _, tokens in sorted(scored)[:budget]]


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
def test_both_builders_give_one_tree(batch: int, depth: int, vocab: int, budget: int, scale: float) -> None:
    for seed in range(5):
        logits = random_logits(batch, depth, vocab, seed=seed, scale=scale)
        roots = torch.arange(batch)
        assert_same_tree(level_tree(roots, logits, budget), heap_tree(roots, logits, budget))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_both_builders_give_one_tree_where_many_scores_are_equal(steps: int) -> None:
    for seed in range(10):
        logits = (random_logits(3, 6, 12, seed=seed, scale=1.0) * steps).round() / steps
        roots = torch.arange(3)
        assert_same_tree(level_tree(roots, logits, 40), heap_tree(roots, logits, 40))


def test_both_builders_give_one_tree_where_all_scores_are_equal() -> None:
    logits = torch.zeros(2, 4, 5)
    roots = torch.zeros(2, dtype=torch.int64)
    assert_same_tree(level_tree(roots, logits, 30), heap_tree(roots, logits, 30))


def test_both_builders_give_one_tree_where_a_token_is_certain() -> None:
    # Log-probability 0: a child scores exactly what its parent scores.
    logits = torch.full((1, 5, 8), -200.0)
    logits[0, :, 3] = 200.0
    logits[0, 2, 4] = 200.0
    roots = torch.zeros(1, dtype=torch.int64)
    assert_same_tree(level_tree(roots, logits, 20), heap_tree(roots, logits, 20))


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(("depth", "vocab"), [(1, 5), (2, 4), (3, 3), (4, 3), (5, 2)])
@pytest.mark.parametrize("budget", [1, 2, 5, 13, 400])
def test_tree_is_the_likeliest_prefixes_of_a_full_enumeration(
    builder: str, depth: int, vocab: int, budget: int
) -> None:
    for seed in range(3):
        logits = random_logits(2, depth, vocab, seed=seed)
        tree = BUILDERS[builder](torch.tensor([0, 1]), logits, budget)
        assert tree.valid.all()
        for row in range(2):
            assert prefixes_of(tree, row) == likeliest_prefixes(logits[row], budget)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("budget", [5, 40, 400])
def test_equally_likely_tokens_rank_by_their_ids(builder: str, budget: int) -> None:
    for seed in range(5):
        logits = random_logits(1, 3, 5, seed=seed, scale=1.0).round()
        tree = BUILDERS[builder](torch.tensor([0]), logits, budget)
        assert prefixes_of(tree, 0) == likeliest_prefixes(logits[0], budget)


def test_the_lowest_ids_are_drafted_where_all_tokens_are_equally_likely() -> None:
    tree = heap_tree(torch.tensor([0]), torch.zeros(1, 3, 50), 12)
    assert prefixes_of(tree, 0) == [(token,) for token in range(12)]


@pytest.mark.parametrize("builder", BUILDERS)
def test_root_is_first_and_parents_come_before_their_children(builder: str) -> None:
    roots = torch.tensor([7, 9])
    tree = BUILDERS[builder](roots, random_logits(2, 5, 20, seed=0), 25)
    assert tree.token_ids[:, 0].tolist() == [7, 9]
    assert (tree.parents < torch.arange(26)).all()
    assert tree.parents[:, 0].tolist() == [-1, -1]
    assert (tree.parents[:, 1:] >= 0).all()
    assert tree.num_nodes == 26


@pytest.mark.parametrize("builder", BUILDERS)
def test_budget_zero_drafts_nothing(builder: str) -> None:
    tree = BUILDERS[builder](torch.tensor([4, 5]), random_logits(2, 3, 6, seed=0), 0)
    assert tree.token_ids.tolist() == [[4], [5]]
    assert tree.valid.all()


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_with_unusable_logits_keeps_only_its_root(builder: str, value: float) -> None:
    logits = random_logits(3, 4, 10, seed=0)
    logits[1, 2, 5] = value
    tree = BUILDERS[builder](torch.tensor([1, 2, 3]), logits, 12)
    assert finite_rows(tree) == [True, False, True]
    assert tree.valid[1].tolist() == [True] + [False] * 12
    for row in (0, 2):
        alone = BUILDERS[builder](torch.tensor([row + 1]), logits[row : row + 1], 12)
        assert tree.token_ids[row].tolist() == alone.token_ids[0].tolist()
        assert tree.parents[row].tolist() == alone.parents[0].tolist()


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_position_without_any_possible_token_is_unusable(builder: str) -> None:
    logits = random_logits(1, 3, 6, seed=0)
    logits[0, 1] = -torch.inf
    tree = BUILDERS[builder](torch.tensor([1]), logits, 6)
    assert finite_rows(tree) == [False]
    assert tree.valid[0, 1:].any().item() is False


@pytest.mark.parametrize("builder", BUILDERS)
def test_impossible_tokens_are_never_drafted(builder: str) -> None:
    logits = random_logits(2, 3, 6, seed=0)
    logits[..., 4] = -torch.inf
    tree = BUILDERS[builder](torch.tensor([0, 0]), logits, 300)
    drafted = tree.token_ids[tree.valid & (torch.arange(tree.num_nodes) > 0)]
    assert 4 not in drafted.tolist()
    assert tree.valid.sum(1).tolist() == [1 + 5 + 25 + 125] * 2
    assert_same_tree(level_tree(torch.tensor([0, 0]), logits, 300), heap_tree(torch.tensor([0, 0]), logits, 300))


def test_rows_do_not_influence_each_other() -> None:
    logits = random_logits(4, 5, 30, seed=3)
    together = level_tree(torch.arange(4), logits, 20)
    for row in range(4):
        alone = level_tree(torch.tensor([row]), logits[row : row + 1], 20)
        for name in ("token_ids", "parents", "depths", "ancestor_mask", "valid"):
            assert torch.equal(getattr(together, name)[row], getattr(alone, name)[0]), name
