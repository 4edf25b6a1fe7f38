"""DraftTree: masks, depths, repeated siblings, and validity that passes down from parent to child."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_specdec.decoding.accept import follow
from hf_specdec.decoding.tree import DraftTree, ancestor_mask


def random_parents(nodes: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes))]


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node itself and all above it, one step at a time."""
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


@pytest.mark.parametrize("nodes", [1, 2, 9, 40])
def test_ancestor_mask_and_depths_equal_those_found_by_following_parents(nodes: int) -> None:
    parents = [random_parents(nodes, seed=seed) for seed in range(3)]
    tree = DraftTree.from_parents(torch.arange(nodes).expand(3, -1), torch.tensor(parents), nodes - 1)
    for row in range(3):
        for node in range(nodes):
            above = ancestors(parents[row], node)
            assert set(tree.ancestor_mask[row, node].nonzero().flatten().tolist()) == above
            assert int(tree.depths[row, node]) == len(above) - 1
    assert tree.num_nodes == nodes


@pytest.mark.parametrize("bound", [31, 32, 33, 60])
def test_ancestor_mask_needs_only_a_bound_of_the_depth(bound: int) -> None:
    chain = torch.arange(32)[None] - 1
    assert torch.equal(ancestor_mask(chain, bound)[0], torch.ones(32, 32).tril().bool())


def test_chain_is_a_tree_with_one_path() -> None:
    token_ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
    chain = DraftTree.chain(token_ids)
    tree = DraftTree.from_parents(token_ids, torch.tensor([[-1, 0, 1]] * 2), 2)
    for name in ("token_ids", "parents", "depths", "ancestor_mask", "valid"):
        assert torch.equal(getattr(chain, name), getattr(tree, name)), name


def test_sibling_with_a_repeated_token_and_its_descendants_are_invalid() -> None:
    #            0  1  2  3  4  5  6
    parents = [[-1, 0, 0, 2, 3, 1, 0]]
    tokens = [[9, 4, 4, 5, 6, 5, 5]]
    tree = DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents), 3)
    assert tree.valid.tolist() == [[True, True, False, False, False, True, True]]


def test_the_same_token_below_different_parents_stays_valid() -> None:
    tree = DraftTree.from_parents(torch.tensor([[9, 4, 5, 7, 7]]), torch.tensor([[-1, 0, 0, 1, 2]]), 2)
    assert tree.valid.all()


def test_nodes_below_an_invalid_node_become_invalid() -> None:
    valid = torch.tensor([[True, True, False, True, True]])
    tree = DraftTree.from_parents(torch.tensor([[0, 1, 2, 3, 4]]), torch.tensor([[-1, 0, 1, 2, 1]]), 3, valid=valid)
    assert tree.valid.tolist() == [[True, True, False, False, True]]


def test_ids_outside_the_vocabulary_and_their_descendants_are_invalid() -> None:
    tokens = torch.tensor([[3, 12, 5, -1, 6, 7]])
    tree = DraftTree.from_parents(tokens, torch.tensor([[-1, 0, 1, 0, 3, 0]]), 2).within_vocabulary(10)
    assert tree.valid.tolist() == [[True, False, False, False, False, True]]
    assert 0 <= int(tree.token_ids.min()) <= int(tree.token_ids.max()) < 10


def test_tree_from_lists_equals_tree_from_parents() -> None:
    rows = [([9, 1, 2, 3, 1], [-1, 0, 0, 2, 2]), ([8, 5, 6], [-1, 0, 1])]
    lists = DraftTree.from_lists([tokens for tokens, _ in rows], [parents for _, parents in rows])
    for row, (tokens, parents) in enumerate(rows):
        size = len(tokens)
        alone = DraftTree.from_parents(torch.tensor([tokens]), torch.tensor([parents]), 3)
        assert lists.valid[row].tolist() == [node < size for node in range(5)]
        for name in ("token_ids", "parents", "depths"):
            assert torch.equal(getattr(lists, name)[row, :size], getattr(alone, name)[0]), name
        assert torch.equal(lists.ancestor_mask[row, :size, :size], alone.ancestor_mask[0])
        assert not lists.ancestor_mask[row, :size, size:].any()


def walk(tokens: list[int], parents: list[int], valid: list[bool], choices: list[int]) -> tuple[list[int], int]:
    """One node at a time: the reference for `follow`."""
    path = [0]
    while True:
        children = [
            node
            for node in range(1, len(tokens))
            if parents[node] == path[-1] and valid[node] and tokens[node] == choices[path[-1]]
        ]
        if not children:
            return path, choices[path[-1]]
        path.append(children[0])


@pytest.mark.parametrize("seed", range(20))
def test_follow_equals_following_one_node_at_a_time(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes, batch = 15, 4
    parents = [random_parents(nodes, seed=10 * seed + row) for row in range(batch)]
    tokens = torch.randint(0, 4, (batch, nodes), generator=generator)  # few tokens, so that paths are long
    valid = torch.rand(batch, nodes, generator=generator) < 0.9
    valid[:, 0] = True
    tree = DraftTree.from_parents(tokens, torch.tensor(parents), nodes - 1, valid=valid)
    choices = torch.randint(0, 4, (batch, nodes), generator=generator)
    path, num_accepted, bonus_ids = follow(tree, choices)
    for row in range(batch):
        expected, bonus = walk(tokens[row].tolist(), parents[row], tree.valid[row].tolist(), choices[row].tolist())
        assert path[row, : int(num_accepted[row]) + 1].tolist() == expected
        assert int(bonus_ids[row]) == bonus


def test_root_only_accepts_nothing_and_returns_the_choice_as_bonus() -> None:
    tree = DraftTree.root_only(torch.tensor([5, 6]))
    path, num_accepted, bonus_ids = follow(tree, torch.tensor([[1], [2]]))
    assert path.tolist() == [[0], [0]]
    assert num_accepted.tolist() == [0, 0]
    assert bonus_ids.tolist() == [1, 2]


def test_a_root_that_repeats_its_own_token_is_no_child_of_itself() -> None:
    tree = DraftTree.chain(torch.tensor([[5, 5, 5]]))
    choices: Tensor = torch.tensor([[5, 5, 5]])
    _, num_accepted, bonus_ids = follow(tree, choices)
    assert (int(num_accepted), int(bonus_ids)) == (2, 5)
