"""Drafts that were drawn at random: coupling the target's choice with them leaves its law as it is."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList

from hf_specdec.decoding import devices
from hf_specdec.decoding.accept import Acceptor, coupled_choices
from hf_specdec.decoding.devices import Abilities
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.tree import DraftTree
from tests.decoding.test_sampling import (
    DEPTH,
    PROMPT,
    ROWS,
    SAMPLING,
    VOCAB,
    count,
    draw,
    enumerate_law,
    sampled_target,
)
from tests.laws import BOUND_SIGMA, assert_follows, deviation_sigma
from tests.method_table import make_causal_lm_chain
from tests.scripted import StubDrafter
from tests.targets import PROMPTS, make_target

DRAWS = 40_000
LAWS = {
    "close": ([0.4, 0.3, 0.2, 0.1], [0.3, 0.3, 0.3, 0.1]),
    "equal": ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "overlapping": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
    "draft certain": ([0.4, 0.3, 0.2, 0.1], [0.0, 1.0, 0.0, 0.0]),
    "target certain": ([0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
}


def couple(target_probs: Tensor, draft_probs: Tensor, drafted: bool = True) -> tuple[Tensor, Tensor]:
    """`DRAWS` drafts and the choices coupled with them, as [batch, nodes] like the rule has them."""
    shape = (DRAWS // 4, 4)
    draft_ids = torch.multinomial(draft_probs.nan_to_num(0.25), DRAWS, replacement=True).view(shape)
    choices = coupled_choices(
        target_probs.log().expand(*shape, -1),
        draft_ids.unsqueeze(-1),
        draft_probs.expand(*shape, 1, -1),
        torch.full((*shape, 1), drafted),
    )
    return draft_ids, choices


@pytest.mark.parametrize("laws", LAWS)
def test_choices_follow_the_target_and_equal_the_draft_as_often_as_possible(laws: str) -> None:
    target_probs, draft_probs = map(torch.tensor, LAWS[laws])
    draft_ids, choices = couple(target_probs, draft_probs)
    seen = Counter(choices.flatten().tolist())
    if laws == "target certain":
        assert set(seen) == {2}
    else:
        assert_follows(seen, dict(enumerate(target_probs.tolist())))
    overlap = float(torch.minimum(target_probs, draft_probs).sum())
    accepted = float((choices == draft_ids).float().mean())
    spread = (overlap * (1 - overlap) / DRAWS) ** 0.5
    assert accepted == pytest.approx(overlap, abs=BOUND_SIGMA * spread + 1e-6)


def test_without_drafts_the_choice_is_the_targets() -> None:
    target_probs, draft_probs = map(torch.tensor, LAWS["draft certain"])
    _, choices = couple(target_probs, draft_probs, drafted=False)
    assert_follows(Counter(choices.flatten().tolist()), dict(enumerate(target_probs.tolist())))


def test_draft_probs_with_nan_are_ignored() -> None:
    target_probs = torch.tensor(LAWS["close"][0])
    _, choices = couple(target_probs, torch.full((4,), float("nan")))
    assert_follows(Counter(choices.flatten().tolist()), dict(enumerate(target_probs.tolist())))


SCORES = [0.4, 0.3, 0.2, 0.1]


def judged(tree: DraftTree, logits: Tensor, *, do_sample: bool) -> list[list[int]]:
    """Per row the tokens that the rule accepts."""
    rule = Acceptor(LogitsProcessorList(), do_sample=do_sample, keep_scores=False)
    rows = Sequences(tree.token_ids[:, :1], StoppingCriteriaList(), None, None)
    return rule(tree, logits, rows).read().tokens


@pytest.mark.parametrize("do_sample", [False, True])
def test_node_with_nan_logits_is_chosen_but_not_accepted(do_sample: bool) -> None:
    logits = torch.full((3, 4, 8), -torch.inf)
    logits[:, torch.arange(4), torch.tensor([5, 6, 7, 1])] = 0.0  # 5, then 6, then 7, then 1 for certain
    logits[1, 2], logits[2, 0] = torch.nan, torch.nan
    token_ids, parents = [[2, 5, 6, 7]] * 3, [[-1, 0, 1, 2]] * 3
    tree = DraftTree.from_lists(token_ids, parents)
    assert judged(tree, logits, do_sample=do_sample) == [[5, 6, 7, 1], [5, 6], []]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_a_token_that_cannot_be_sampled_raises_where_it_is_the_next_one(
    value: float, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_host:
        monkeypatch.setitem(devices.RULES, "cpu", lambda device: Abilities())
    logits = torch.full((2, 4, 8), -torch.inf)
    logits[:, torch.arange(4), torch.tensor([5, 6, 7, 1])] = 0.0  # 5, then 6, then 7, then 1 for certain
    tree = DraftTree.from_lists([[2, 5, 6, 3], [2, 5, 6, 7]], [[-1, 0, 1, 2]] * 2)
    logits[0, 3] = value  # a draft that is refused
    assert judged(tree, logits, do_sample=True) == [[5, 6, 7], [5, 6, 7, 1]]
    logits[1, 2] = value  # after two tokens; they may end the text
    assert judged(tree, logits, do_sample=True) == [[5, 6, 7], [5, 6]]
    logits[1, 0] = value
    with pytest.raises(RuntimeError, match="no distribution to sample from"):
        judged(tree, logits, do_sample=True)


@pytest.mark.combinations(12)
@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("nan_at", "expected"), [(None, [5, 6, 7, 1]), (2, [5, 6]), (0, [])])
def test_node_with_nan_logits_ends_the_path_where_processors_read_the_prefix(
    nan_at: int | None, expected: list[int], do_sample: bool, lockstep: bool
) -> None:
    logits = torch.full((1, 4, 8), -torch.inf)
    logits[:, torch.arange(4), torch.tensor([5, 6, 7, 1])] = 0.0
    if nan_at is not None:
        logits[0, nan_at] = torch.nan
    tree = DraftTree.from_lists([[2, 5, 6, 7]], [[-1, 0, 1, 2]])
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    rule = Acceptor(processors, do_sample=do_sample, keep_scores=False, lockstep=lockstep)
    rows = Sequences(tree.token_ids[:, :1], StoppingCriteriaList(), None, None, lockstep=lockstep)
    assert rule(tree, logits, rows).read().tokens == [expected]


@pytest.mark.parametrize("drawn", [False, True])
def test_nan_after_a_draft_does_not_change_the_distribution_of_its_token(drawn: bool) -> None:
    laws = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(DRAWS, 1, -1)
    drafts = torch.multinomial(laws[:, 0], 1)
    tree = DraftTree.chain(
        torch.cat([torch.zeros_like(drafts), drafts], 1), draft_probs=laws.contiguous() if drawn else None
    )
    logits = torch.tensor(SCORES).log().repeat(DRAWS, 2, 1)
    # What follows is unknown for two of the tokens: rows that ended there would be told by their token.
    logits[:, 1] = logits[:, 1].masked_fill(drafts % 2 == 0, torch.nan)
    tokens = judged(tree, logits, do_sample=True)
    assert_follows(Counter(row[0] for row in tokens), dict(enumerate(SCORES)))
    assert {len(row) for row in tokens if row[0] % 2 == 0} == {1}
    assert_follows(Counter(row[1] for row in tokens if len(row) > 1), dict(enumerate(SCORES)))


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_at_a_root_without_drafts_gives_the_token_of_plain_decoding(do_sample: bool) -> None:
    root, logits = DraftTree.root_only(torch.tensor([2])), torch.full((1, 1, 8), torch.nan)
    assert judged(root, logits, do_sample=do_sample) == [[]], "the cache may hold NaN that transformers has dropped"
    bare = root.without_drafts(torch.tensor([True]))
    if do_sample:
        with pytest.raises(RuntimeError, match="nan"):
            judged(bare, logits, do_sample=True)
    else:
        assert judged(bare, logits, do_sample=False) == [[int(logits[0, 0].argmax())]]


def drawn_chains(depth: int, *, lengths: tuple[int, ...] = (), honest: bool = True) -> StubDrafter:
    """Chains drawn from a law of the token before, far from the target's; row r is cut to `lengths[r % ...]` tokens.

    Where not `honest`, they are the law's likeliest tokens and only claim to have been drawn.
    """
    table = (2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))).softmax(-1)

    def draft(context: DraftContext) -> DraftTree:
        token_ids, laws = [context.root_ids], []
        for _ in range(depth):
            laws.append(table[token_ids[-1]])
            token_ids.append(laws[-1].argmax(-1) if not honest else torch.multinomial(laws[-1], 1).squeeze(1))
        valid = None
        if lengths:
            cut = torch.tensor(lengths).repeat(-(-len(context.lengths) // len(lengths)))[: len(context.lengths)]
            valid = torch.arange(depth + 1) <= cut.unsqueeze(1)
        return DraftTree.chain(torch.stack(token_ids, 1), valid=valid, draft_probs=torch.stack(laws, 1))

    return StubDrafter(draft)


@pytest.mark.parametrize("lengths", [(), (0, 2, 1, 3)])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_sampled_tokens_follow_the_target_with_drawn_drafts(
    sampling: str, lengths: tuple[int, ...], draws: int
) -> None:
    target = sampled_target()
    drafter = drawn_chains(DEPTH, lengths=lengths)
    drawn = draw(target, torch.tensor([PROMPT]), sampling, drafter, draws)
    assert_follows(count(drawn), enumerate_law(target, PROMPT, sampling))
    assert drafter.stats.num_accepted_draft_tokens > ROWS / 20


@pytest.mark.parametrize("sampling", ["plain", "repetition penalty"])
def test_argmax_drafts_passed_as_drawn_are_detected(sampling: str) -> None:
    # The negative control: were such drafts accepted as drawn ones, the output would follow another law.
    target = sampled_target()
    drawn = draw(target, torch.tensor([PROMPT]), sampling, drawn_chains(DEPTH, honest=False))
    assert deviation_sigma(count(drawn), enumerate_law(target, PROMPT, sampling)) > 2 * BOUND_SIGMA


@pytest.mark.parametrize("reads_prefix", [False, True])
def test_tokens_of_a_drawn_chain_follow_a_known_distribution(reads_prefix: bool) -> None:
    # A target that looks at one token only: the law of what a round emits, completed by the target, is then a product.
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(6))
    probs = table.softmax(-1)

    def unchanged(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    rows, root, depth = 30_000, 4, 2
    drafter = drawn_chains(depth)
    tree = drafter.draft(context_of(torch.full((rows,), root)))
    rule = Acceptor(LogitsProcessorList([unchanged] if reads_prefix else []), do_sample=True, keep_scores=False)
    sequences = Sequences(torch.full((rows, 1), root), [], None, None)
    tokens = rule(tree, table[tree.token_ids], sequences).read().tokens
    accepted = [len(row) - 1 for row in tokens]
    assert set(accepted) == {0, 1, 2}
    for row in tokens:
        while len(row) < depth + 1:
            row.append(int(torch.multinomial(probs[row[-1]], 1)))
    law = {
        (a, b, c): float(probs[root, a] * probs[a, b] * probs[b, c])
        for a in range(VOCAB)
        for b in range(VOCAB)
        for c in range(VOCAB)
    }
    assert_follows(Counter(map(tuple, tokens)), law)


def context_of(root_ids: Tensor) -> DraftContext:
    rows = len(root_ids)
    return DraftContext(root_ids, torch.zeros_like(root_ids), root_ids[:, None], [1] * rows, [True] * rows)


def test_greedy_call_ignores_draft_probs() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    arguments = {"max_new_tokens": 12, "do_sample": False}
    vocab = target.config.vocab_size

    def draft(context: DraftContext) -> DraftTree:
        laws = torch.full((3, 4, vocab), 1 / vocab)
        token_ids = torch.randint(0, vocab, (3, 4))
        return DraftTree.chain(torch.cat([context.root_ids[:, None], token_ids], 1), draft_probs=laws)

    assisted = target.generate(**prompts, **arguments, assistant_model=StubDrafter(draft))
    assert assisted.tolist() == target.generate(**prompts, **arguments).tolist()


def test_drafts_drawn_from_the_target_distribution_are_always_accepted() -> None:
    target = sampled_target()
    drafter = make_causal_lm_chain(target, noise=0.0, depth=3)
    arguments = {"do_sample": True, "temperature": 0.7, "top_k": 4, "max_new_tokens": 17}
    target.generate(torch.tensor([PROMPT]), assistant_model=drafter, **arguments)
    assert drafter.stats.per_step_accepted == [[3, 3, 3, 3]]
    drafter.set_options(sample_drafts=False)
    target.generate(torch.tensor([PROMPT]), assistant_model=drafter, **arguments)
    assert drafter.stats.mean_acceptance_length < 4
