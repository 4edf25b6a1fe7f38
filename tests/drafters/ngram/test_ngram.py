"""N-gram lookup: what it finds, what it drafts, and that it needs nothing but the text."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from hf_specdec.decoding.generator import Committed, DraftContext
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafters.ngram import NGramDrafter
from hf_specdec.drafters.ngram.candidates import MAX_MATCHES, NGramGenerator, SuffixIndex, continuation_tree
from tests.targets import fresh_target, make_target


def index_of(tokens: list[int], longest: int = 4, shortest: int = 1) -> SuffixIndex:
    index = SuffixIndex(longest, shortest)
    index.extend(tokens)
    return index


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def matches_by_search(tokens: list[int], longest: int, shortest: int) -> list[tuple[int, int]]:
    """What `SuffixIndex.matches` promises, by looking at every place."""
    found: list[tuple[int, int]] = []
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - 1, length - 1, -1):
            if tokens[start - length : start] == tokens[-length:] and start not in dict(found):
                found.append((start, length))
    return found[:MAX_MATCHES]


@pytest.mark.parametrize("vocab", [2, 3, 10])
@pytest.mark.parametrize("suffixes", [(1, 1), (3, 1), (4, 2), (5, 5)])
def test_matches_are_those_of_a_plain_search_however_the_text_grew(suffixes: tuple[int, int], vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    tokens = torch.randint(0, vocab, (60,), generator=generator).tolist()
    index = SuffixIndex(*suffixes)
    for start, stop in ((0, 1), (1, 2), (2, 20), (20, 21), (21, 60)):
        index.extend(tokens[start:stop])
        assert list(index.matches()) == matches_by_search(tokens[:stop], *suffixes)


def test_continuation_of_the_longest_match_comes_first() -> None:
    index = index_of([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3])
    assert paths_of(*continuation_tree(index, tree_budget=1, max_depth=1)[:2]) == {(7,)}
    assert paths_of(*continuation_tree(index, tree_budget=2, max_depth=1)[:2]) == {(7,), (8,)}


def test_continuations_that_begin_alike_share_their_nodes() -> None:
    index = index_of([5, 1, 2, 3, 5, 1, 2, 4, 5])
    assert paths_of(*continuation_tree(index, tree_budget=9, max_depth=3)[:2]) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4)}


@pytest.mark.parametrize("budget", [0, 1, 3, 7, 100])
def test_every_budget_gives_a_tree_without_repeated_siblings(budget: int) -> None:
    tokens = torch.randint(0, 3, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    token_ids, parents, logprobs = continuation_tree(index_of(tokens), budget, max_depth=6)
    assert len(token_ids) <= 1 + budget
    assert (token_ids[0], parents[0]) == (tokens[-1], -1)
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert len(set(zip(parents, token_ids, strict=True))) == len(token_ids)
    assert logprobs[0] == 0.0
    assert all(later <= former for former, later in itertools.pairwise(logprobs))
    assert all(logprobs[node] < logprobs[parent] for node, parent in enumerate(parents) if node)
    smaller = continuation_tree(index_of(tokens), max(0, budget - 1), max_depth=6)
    assert smaller[:2] == (token_ids[: len(smaller[0])], parents[: len(smaller[0])])


def test_alternatives_share_what_one_text_gives_alone() -> None:
    one = continuation_tree(index_of([1, 2, 3, 7, 9, 5, 1, 2, 3]), tree_budget=1, max_depth=1)
    two = continuation_tree(index_of([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]), tree_budget=2, max_depth=1)
    assert (one[0][1:], sorted(two[0][1:])) == ([7], [7, 8])
    assert math.exp(one[2][1]) < 1.0  # one place is no certainty
    assert math.exp(two[2][1]) == math.exp(two[2][2]) < math.exp(one[2][1])
    # Matches of one token are worth less than longer ones.
    short = continuation_tree(index_of([9, 3, 7, 8, 5, 1, 2, 3]), tree_budget=1, max_depth=1)
    assert short[2][1] < one[2][1]


def generator_of(**options: Any) -> NGramGenerator:
    generator = NGramDrafter(**options).candidate_generator(None)
    assert isinstance(generator, NGramGenerator)
    return generator


def begin(generator: NGramGenerator, prompts: torch.Tensor, padding: list[int]) -> None:
    steps = prompts.shape[1]
    committed = [steps - count for count in padding]
    generator.observe(Committed(prompts, None, prompts, None, Counts.of(committed), prompts))


def context_of(sequences: torch.Tensor, lengths: list[int], active: list[bool] | None = None) -> DraftContext:
    roots = torch.stack([row[length - 1] for row, length in zip(sequences, lengths, strict=True)])
    return DraftContext(roots, roots, sequences, lengths, active or [True] * len(lengths))


def drafted(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    valid = int(tree.valid[row].sum())
    return paths_of(tree.token_ids[row, :valid].tolist(), tree.parents[row, :valid].tolist())


def test_rows_of_a_batch_are_looked_up_in_their_own_text_without_padding() -> None:
    # The second row's padding would be a match of its end-of-text root, followed by more padding.
    sequences = torch.tensor([[4, 5, 6, 7, 8, 4, 9], [0, 0, 0, 5, 3, 0, 9]])
    generator = generator_of(max_depth=2)
    begin(generator, sequences[:, :5], padding=[0, 3])
    tree = generator.draft(context_of(sequences, [6, 6]))
    assert drafted(tree, 0) == {(5,), (5, 6)}
    assert drafted(tree, 1) == set()
    assert tree.valid[:, 0].all()


def test_rows_that_grew_by_different_numbers_of_tokens_and_finished_rows() -> None:
    sequences = torch.tensor([[1, 2, 3, 1, 9, 9], [4, 5, 6, 7, 4, 5], [1, 1, 1, 1, 9, 9]])
    generator = generator_of(max_depth=1)
    begin(generator, sequences[:, :3], padding=[0, 0, 0])
    generator.draft(context_of(sequences, [3, 3, 3]))
    tree = generator.draft(context_of(sequences, [4, 6, 4], [True, True, False]))
    assert drafted(tree, 0) == {(2,)}
    assert drafted(tree, 1) == {(6,)}
    assert drafted(tree, 2) == set()


def test_text_that_repeats_itself_is_drafted_right() -> None:
    # A target whose greedy continuation runs in a circle is then told its own words.
    target = fresh_target("llama", "sdpa", tie_word_embeddings=True, initializer_range=0.02)
    prompt = torch.tensor([[5, 6, 7, 8]])
    alone = target.generate(prompt, max_new_tokens=40, do_sample=False)
    drafter = NGramDrafter()
    assisted = target.generate(prompt, max_new_tokens=40, do_sample=False, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    assert drafter.stats.method == "ngram"
    assert drafter.stats.mean_acceptance_length > 2


def test_a_prompt_given_as_embeddings_is_no_obstacle() -> None:
    target = make_target("llama", "sdpa")
    embeddings = target.get_input_embeddings()(torch.tensor([[5, 6, 7, 8, 5, 6]]))
    arguments = {"inputs_embeds": embeddings, "max_new_tokens": 20, "do_sample": False}
    alone = target.generate(**arguments)
    assert target.generate(**arguments, assistant_model=NGramDrafter()).tolist() == alone.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest_suffix": 0}, "longest_suffix=0 must be an integer from 1 to 32"),
        ({"tree_budget": 10**6}, "tree_budget=1000000 must be an integer from 1 to 1024"),
        ({"max_depth": 2.5}, "max_depth=2.5 must be an integer"),
        ({"shortest_suffix": 5}, "shortest_suffix=5 is larger than longest_suffix=4; set"),
        ({"max_dept": 5}, "Unknown drafting option 'max_dept'. Did you mean 'max_depth'"),
    ],
)
def test_bad_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NGramDrafter(**options)
