"""Look-ahead: the n-grams of its pool are those that Jacobi iteration gives, one plain forward per path."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_specdec import load_drafter
from hf_specdec.decoding.policies import AutoBudget
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.methods.lookahead import LookaheadDrafter, LookaheadGenerator, LookaheadOptions
from tests.targets import make_target, one_prompt
from tests.watched import Watched


@pytest.mark.by_the_clock
@pytest.mark.parametrize("every", [1, 3])
def test_the_newest_iteration_is_what_the_target_chooses_after_each_path(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every `every`-th round: the others do not draft, and leave the window as it is."""
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    watched, rounds = Watched(LookaheadDrafter(window=3, ngram=4, guesses=2)), itertools.count()
    monkeypatch.setattr(AutoBudget, "note", lambda self, *arguments: None)
    monkeypatch.setattr(AutoBudget, "drafting", property(lambda self: next(rounds) % every == 0))
    target.generate(**prompt, max_new_tokens=12, do_sample=False, assistant_model=watched)
    assert len(watched.rounds) > 2
    assert (watched.stats.num_undrafted_steps > 0) == (every > 1)
    start = watched.rounds[0].text(0)
    window = [[start[-1 - (level + place)] for place in range(3)] for level in range(3)]
    for each in watched.rounds:
        paths = [[*window[0][: place + 1], window[1][place], window[2][place]] for place in range(3)]
        drafted = paths_of(each.tree)
        assert all(tuple(path) in drafted for path in paths)
        texts = (torch.tensor([[*each.text(0), *path]]) for path in paths)
        window = [*window[1:], [int(target(text).logits[0, -1].argmax()) for text in texts]]


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens from the root, which is left out, to every node."""
    parents, tokens = tree.parents[0].tolist(), tree.token_ids[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        paths.append((*paths[parents[node]], tokens[node]))
    return set(paths)


def test_n_grams_of_the_pool_begin_with_the_root_and_the_latest_come_first() -> None:
    generator = LookaheadGenerator(LookaheadOptions(window=1, ngram=3, guesses=2))
    generator.pools = [{}]
    for ngram in ([5, 1, 2], [5, 3, 4], [5, 1, 2], [6, 7, 8], [5, 9, 9]):
        generator._remember(0, ngram)
    assert generator.pools[0] == {5: [(9, 9), (1, 2)], 6: [(7, 8)]}
    tokens, parents, leaves = generator._tree(5, [[4], [2]], generator.pools[0][5])
    assert (tokens, parents) == ([5, 9, 9, 1, 2, 4, 2], [-1, 0, 1, 0, 3, 0, 5])
    assert leaves == [6]


def test_a_text_that_repeats_is_guessed() -> None:
    # A target that repeats a cycle: Jacobi iteration finds the cycle, and the pool drafts it.
    target = make_target("llama", "sdpa", torch.float64, initializer_range=0.05)
    prompt = one_prompt()
    alone = target.generate(**prompt, max_new_tokens=48, do_sample=False)
    drafter = load_drafter("lookahead")
    assert torch.equal(target.generate(**prompt, max_new_tokens=48, do_sample=False, assistant_model=drafter), alone)
    assert len(set(alone[0, -24:].tolist())) < 20
    assert drafter.stats.mean_acceptance_length > 1.2


def test_an_n_gram_of_one_token_raises() -> None:
    with pytest.raises(ValueError, match="ngram=1 must be at least 2"):
        load_drafter("lookahead", ngram=1)
