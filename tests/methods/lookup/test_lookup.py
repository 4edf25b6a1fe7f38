"""Look-ups: what they find, what they draft, and that they need nothing but texts."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec import load_drafter
from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.methods.lookup import (
    LookupGenerator,
    NGramDrafter,
    SuffixDrafter,
    SuffixIndex,
    continuation_tree,
    find,
)
from tests.targets import PROMPTS, fresh_target, make_target


def index_of(tokens: list[int], longest: int = 4) -> SuffixIndex:
    index = SuffixIndex(longest)
    index.extend(tokens)
    return index


def tree_of(
    tokens: list[int], tree_budget: int, depth: int, longest: int = 4
) -> tuple[list[int], list[int], list[float]]:
    matches = find([index_of(tokens, longest)], tokens[-longest:], shortest=1)
    return continuation_tree(tokens[-1], matches, tree_budget, depth)


def paths_of(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def matches_by_search(texts: list[list[int]], context: list[int], shortest: int) -> dict[tuple[int, ...], int]:
    """How long the match is at every place that has one of at least `shortest` tokens, by looking at all of them.

    Places are told by what stands before and behind them.
    """
    found: dict[tuple[int, ...], int] = {}
    for text in texts:
        for start in range(1, len(text)):
            length = 0
            while length < min(start, len(context)) and text[start - 1 - length] == context[-1 - length]:
                length += 1
            if length >= shortest:
                found[(*text[:start], -1, *text[start:])] = length
    return found


def split(texts: list[list[int]], place: int) -> tuple[int, ...]:
    """The text of a place, told as above."""
    start = place
    for text in texts:
        if start <= len(text):
            break
        start -= len(text) + 1
    return (*text[:start], -1, *text[start:])


def test_an_index_whose_last_tokens_are_removed_is_that_of_the_text_before() -> None:
    numbers = torch.Generator().manual_seed(0)
    text = torch.randint(0, 4, (300,), generator=numbers).tolist()
    whole, cut = SuffixIndex(longest=6), SuffixIndex(longest=6)
    for start in range(0, 200, 7):  # in steps, some of which are sorted anew and some inserted
        whole.extend(text[start : min(start + 7, 200)])
        cut.extend(text[start : min(start + 7, 200)])
        cut.extend(text[100:130])
        cut.truncate(len(whole))
    assert cut.last(200) == whole.last(200) == text[:200]
    for end in range(206, 300, 5):
        context = text[end - 6 : end]
        found, expected = (index.matches(context, 400) for index in (cut, whole))
        assert sorted(found) == sorted(expected)
        assert [length for _, length in found] == [length for _, length in expected]
    cut.truncate(0)
    assert len(cut) == 0
    assert cut.matches([1, 2], 4) == []


@pytest.mark.parametrize("vocab", [2, 3, 10])
@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (3, 1), (4, 2), (32, 5)])
def test_matches_are_those_of_a_plain_search_however_the_texts_grew(longest: int, shortest: int, vocab: int) -> None:
    draw = torch.Generator().manual_seed(vocab)
    texts: list[list[int]] = [[]]
    index = SuffixIndex(longest)
    for size, begins in ((1, False), (1, False), (18, False), (3, True), (40, True), (1, False), (1, False)):
        tokens = torch.randint(0, vocab, (size,), generator=draw).tolist()
        if begins:
            texts.append(tokens)
            index.add(tokens)
        else:
            texts[-1] = texts[-1] + tokens
            index.extend(tokens)
        context = torch.randint(0, vocab, (longest,), generator=draw).tolist()
        matches = index.matches(context, most=1000, shortest=shortest)
        assert {split(texts, place): length for place, length in matches} == matches_by_search(texts, context, shortest)
        lengths = [length for _, length in matches]
        assert lengths == sorted(lengths, reverse=True)
        assert index.matches(context, most=3, shortest=shortest) == matches[:3]
        for place, _ in matches:
            text = split(texts, place)
            assert index.continuation(place, 4) == list(text[text.index(-1) + 1 :][:4])


def test_the_latest_of_equal_matches_comes_first() -> None:
    assert index_of([1, 2, 7, 1, 2, 8, 1, 2], longest=2).matches([1, 2], most=9)[:2] == [(5, 2), (2, 2)]


def test_the_oldest_texts_are_forgotten() -> None:
    index = SuffixIndex(longest=4, max_tokens=100)
    for number in range(50):
        index.add([number, *range(100, 110)])
        assert len(index) <= 100
    assert index.matches([3], most=9) == []
    ((place, length),) = index.matches([49], most=9)
    assert (index.continuation(place, 2), length) == ([100, 101], 1)
    assert index.matches([48, *range(100, 103)], most=1)[0][1] == 4


def test_an_index_is_saved_and_loaded(tmp_path: Path) -> None:
    index = SuffixIndex(longest=5, max_tokens=40)
    for tokens in ([1, 2, 3, 4], [9, 2, 3, 7]):
        index.add(tokens)
    index.save(tmp_path / "index.safetensors")
    again = SuffixIndex.load(tmp_path / "index.safetensors")
    assert (again.longest, again.max_tokens, len(again)) == (5, 40, len(index))
    assert again.matches([2, 3], most=9) == index.matches([2, 3], most=9)
    with pytest.raises(FileNotFoundError):
        SuffixIndex.load(tmp_path / "absent")
    (tmp_path / "other").write_text("no tensors")
    with pytest.raises(ValueError, match=r"other' was not written by SuffixIndex.save"):
        SuffixIndex.load(tmp_path / "other")


def test_what_calls_wrote_is_drafted_in_later_ones_by_all_who_share_the_index() -> None:
    target, prompt = make_target("llama", "sdpa"), torch.tensor([[5, 6, 7, 8]])
    settings = {"max_new_tokens": 24, "do_sample": False}
    alone = target.generate(prompt, **settings)
    one = load_drafter("suffix", target)
    assert isinstance(one, SuffixDrafter)
    target.generate(prompt, **settings, assistant_model=one)
    assert one.index.continuation(0, 24) == alone[0, 4:].tolist()
    other = SuffixDrafter(one.index)
    assert target.generate(prompt, **settings, assistant_model=other).equal(alone)
    assert other.stats.mean_acceptance_length > 4
    other.forget()
    assert len(one.index) == 0


def test_rows_that_end_early_are_kept_in_the_index_too() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    alone = target.generate(**prompts, max_new_tokens=20, do_sample=False)
    width = prompts["input_ids"].shape[1]
    ends = int(alone[1, width + 3])
    drafter = SuffixDrafter()
    output = target.generate(
        **prompts, max_new_tokens=20, do_sample=False, eos_token_id=ends, pad_token_id=0, assistant_model=drafter
    )
    texts = [row[: row.index(ends) + 1] if ends in row else row for row in output[:, width:].tolist()]
    wrote = [drafter.index.continuation(place) for place in _beginnings(drafter.index)]
    assert min(map(len, texts)) < max(map(len, texts))
    for text in texts:  # one that ended with its first token was never drafted for
        assert len(text) == 1 or any(each[: len(text)] == text for each in wrote)


def _beginnings(index: SuffixIndex) -> list[int]:
    places = [0]
    while places[-1] + len(index.continuation(places[-1])) + 1 < len(index):
        places.append(places[-1] + len(index.continuation(places[-1])) + 1)
    return places


def test_continuation_of_the_longest_match_comes_first() -> None:
    text = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    assert paths_of(*tree_of(text, tree_budget=1, depth=1)[:2]) == {(7,)}
    assert paths_of(*tree_of(text, tree_budget=2, depth=1)[:2]) == {(7,), (8,)}


def test_continuations_that_begin_alike_share_their_nodes() -> None:
    tree = tree_of([5, 1, 2, 3, 5, 1, 2, 4, 5], tree_budget=9, depth=3)
    assert paths_of(*tree[:2]) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4)}


@pytest.mark.parametrize("budget", [0, 1, 3, 7, 100])
def test_every_budget_gives_a_tree_without_repeated_siblings(budget: int) -> None:
    tokens = torch.randint(0, 3, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    token_ids, parents, logprobs = tree_of(tokens, budget, depth=6)
    assert len(token_ids) <= 1 + budget
    assert (token_ids[0], parents[0]) == (tokens[-1], -1)
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert len(set(zip(parents, token_ids, strict=True))) == len(token_ids)
    assert logprobs[0] == 0.0
    assert all(later <= former for former, later in itertools.pairwise(logprobs))
    assert all(logprobs[node] < logprobs[parent] for node, parent in enumerate(parents) if node)


def test_alternatives_share_what_one_text_gives_alone() -> None:
    one = tree_of([1, 2, 3, 7, 9, 5, 1, 2, 3], tree_budget=1, depth=1)
    two = tree_of([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], tree_budget=2, depth=1, longest=3)
    assert (one[0][1:], sorted(two[0][1:])) == ([7], [7, 8])
    assert math.exp(one[2][1]) < 1.0  # one place is no certainty
    assert math.exp(two[2][1]) == math.exp(two[2][2]) < math.exp(one[2][1])
    # Matches of one token are worth less than longer ones.
    short = tree_of([9, 3, 7, 8, 5, 1, 2, 3], tree_budget=1, depth=1)
    assert short[2][1] < one[2][1]


def generator_of(**options: Any) -> LookupGenerator:
    generator = NGramDrafter(**options).candidate_generator(None)
    assert isinstance(generator, LookupGenerator)
    return generator


def begin(generator: LookupGenerator, prompts: torch.Tensor, padding: list[int]) -> None:
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
    generator = generator_of(depth=2)
    begin(generator, sequences[:, :5], padding=[0, 3])
    tree = generator.draft(context_of(sequences, [6, 6]))
    assert drafted(tree, 0) == {(5,), (5, 6)}
    assert drafted(tree, 1) == set()
    assert tree.valid[:, 0].all()


def test_rows_that_grew_by_different_numbers_of_tokens_and_finished_rows() -> None:
    sequences = torch.tensor([[1, 2, 3, 1, 9, 9], [4, 5, 6, 7, 4, 5], [1, 1, 1, 1, 9, 9]])
    generator = generator_of(depth=1)
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
        ({"depth": 2.5}, "depth=2.5 must be an integer"),
        ({"shortest_suffix": 5}, "shortest_suffix=5 is larger than longest_suffix=4; set"),
        ({"dept": 5}, "Unknown drafting option 'dept'. Did you mean 'depth'"),
    ],
)
def test_bad_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NGramDrafter(**options)
