"""Sampled output follows the target's own law: exact enumeration, frozen trees, and rules that must be caught."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdec.decoding.accept import Acceptor
from hf_specdec.decoding.sequences import Sequences
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.drafter import Drafter
from tests.laws import BOUND_SIGMA, assert_follows, deviation_sigma
from tests.method_table import METHODS
from tests.scripted import fixed_tree
from tests.targets import make_target

VOCAB, DEPTH, DRAWS, ROWS = 6, 3, 6_000, 2_000
PROMPT = [3, 5, 4, 1, 5]

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8, "temperature": 1.5},
    "low temperature and top-p": {"temperature": 0.3, "top_p": 0.9},
    "temperature 1 and top-p": {"temperature": 1.0, "top_p": 0.9},
    "repetition penalty": {"repetition_penalty": 1.8},
    "all of them": {
        "temperature": 1.3,
        "top_k": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
    },
}
# Below every root: two right tokens of three levels for some prefixes, siblings that repeat, an impossible one.
TREES = {
    "chain": ([3, 4, 5], [0, 1, 2]),
    "tree": ([3, 4, 5, 4, 2, 3, 5], [0, 0, 1, 1, 2, 4, 4]),
    "repeated siblings": ([3, 3, 4, 4, 5, 5, 3], [0, 0, 1, 2, 0, 0, 3]),
    "out of vocabulary": ([3, 9, 4, -2, 5], [0, 0, 1, 1, 2]),
}


def sampled_target() -> PreTrainedModel:
    return make_target(
        "llama", "sdpa", torch.float32, vocab_size=VOCAB, num_hidden_layers=3, hidden_size=16, initializer_range=0.2
    )


def arguments_of(sampling: str) -> dict[str, Any]:
    return {"do_sample": True, "top_k": 0, **SAMPLING[sampling]}


def enumerate_law(target: PreTrainedModel, prompt: list[int], sampling: str, **padding: Tensor) -> dict[Any, float]:
    """Probability of every continuation of `DEPTH` tokens, from the scores of plain `generate`'s first token."""
    law: dict[Any, float] = {(): 1.0}
    for _ in range(DEPTH):
        prefixes = torch.tensor([[*prompt, *tokens] for tokens in law])
        mask = torch.ones_like(prefixes)
        mask[:, : prompt.count(0)] = 0  # id 0 is left padding here
        output = target.generate(
            prefixes,
            attention_mask=mask,
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_scores=True,
            **arguments_of(sampling),
        )
        probs = output.scores[0].double().softmax(-1).tolist()
        law = {
            (*tokens, token): weight * probs[row][token]
            for row, (tokens, weight) in enumerate(law.items())
            for token in range(VOCAB)
        }
    return {tokens: weight for tokens, weight in law.items() if weight > 0}


def draw(
    target: PreTrainedModel, prompt: Tensor, sampling: str, drafter: Drafter, draws: int = DRAWS, **kwargs: Any
) -> Tensor:
    """[draws * prompts, DEPTH] sampled continuations."""
    drawn = []
    for _ in range(draws // ROWS):
        output = target.generate(
            prompt,
            assistant_model=drafter,
            max_new_tokens=DEPTH,
            num_return_sequences=ROWS // len(prompt),
            **arguments_of(sampling),
            **kwargs,
        )
        drawn.append(output[:, prompt.shape[1] :])
    return torch.cat(drawn)


def count(drawn: Tensor) -> Counter[Any]:
    return Counter(map(tuple, drawn.tolist()))


@pytest.mark.parametrize(
    ("sampling", "tree"),
    [(sampling, "tree") for sampling in SAMPLING]
    + [(sampling, tree) for tree in TREES if tree != "tree" for sampling in ("plain", "all of them")],
)
def test_sampled_tokens_follow_the_target_whatever_the_tree(sampling: str, tree: str, draws: int) -> None:
    target = sampled_target()
    drafter = fixed_tree(*TREES[tree])
    drawn = draw(target, torch.tensor([PROMPT]), sampling, drafter, draws)
    assert_follows(count(drawn), enumerate_law(target, PROMPT, sampling))
    assert drafter.stats.num_accepted_draft_tokens > ROWS / 20


@pytest.mark.parametrize("sampling", ["plain", "all of them"])
@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_of_a_method_follow_the_target(method: str, sampling: str, draws: int) -> None:
    target = sampled_target()
    drafter = METHODS[method](target)
    drawn = draw(target, torch.tensor([PROMPT]), sampling, drafter, draws)
    assert_follows(count(drawn), enumerate_law(target, PROMPT, sampling))
    if sampling == "plain":
        assert drafter.stats.num_accepted_draft_tokens > ROWS / 20


def test_sampled_tokens_of_a_ragged_batch_follow_the_target_row_by_row() -> None:
    target = sampled_target()
    prompts = [PROMPT, [0, 0, 4, 5, 3]]
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    drawn = draw(target, torch.tensor(prompts), "repetition penalty", fixed_tree(*TREES["tree"]), attention_mask=mask)
    per_call = drawn.view(DRAWS // ROWS, 2, ROWS // 2, DEPTH)
    for row, prompt in enumerate(prompts):
        assert_follows(count(per_call[:, row].flatten(0, 1)), enumerate_law(target, prompt, "repetition penalty"))


def test_enumeration_agrees_with_plain_sampling() -> None:
    # The yardstick itself, without any draft.
    target = sampled_target()
    output = target.generate(
        torch.tensor([PROMPT]), max_new_tokens=DEPTH, num_return_sequences=DRAWS, **arguments_of("all of them")
    )
    assert_follows(count(output[:, len(PROMPT) :]), enumerate_law(target, PROMPT, "all of them"))


# A frozen tree: the same nodes and logits verified many times.
FROZEN_TOKENS = [1, 3, 4, 5, 2, 3, 4]
FROZEN_PARENTS = [-1, 0, 0, 1, 1, 2, 3]


def frozen_logits() -> Tensor:
    """[1, nodes, vocab]: the target's logits after each node's own path."""
    target, rows = sampled_target(), []
    for node in range(len(FROZEN_TOKENS)):
        path = []
        while node >= 0:
            path.insert(0, FROZEN_TOKENS[node])
            node = FROZEN_PARENTS[node]
        with torch.no_grad():
            rows.append(target(torch.tensor([[*PROMPT[:-1], *path]])).logits[0, -1].float())
    return torch.stack(rows)[None]


def frozen_law(logits: Tensor, processors: LogitsProcessorList) -> dict[Any, float]:
    """Probability of every (accepted nodes, bonus token): follow children by the processed probabilities."""
    law = {}

    def visit(node: int, path: tuple[int, ...], prefix: list[int], weight: float) -> None:
        scores = processors(torch.tensor([prefix]), logits[0, node : node + 1].clone())
        for token, prob in enumerate(scores.double().softmax(-1)[0].tolist()):
            children = [
                child
                for child in range(len(FROZEN_TOKENS))
                if FROZEN_PARENTS[child] == node and FROZEN_TOKENS[child] == token
            ]
            if children:
                visit(children[0], (*path, children[0]), [*prefix, token], weight * prob)
            elif prob > 0:
                law[path, token] = weight * prob

    visit(0, (), [*PROMPT[:-1], FROZEN_TOKENS[0]], 1.0)
    return law


@pytest.mark.parametrize("reads_prefix", [False, True])
def test_path_and_bonus_of_a_frozen_tree_follow_the_target(reads_prefix: bool) -> None:
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(4)])
    if reads_prefix:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(1.5))
    logits = frozen_logits()
    tree = DraftTree.from_parents(
        torch.tensor([FROZEN_TOKENS]).expand(ROWS, -1), torch.tensor([FROZEN_PARENTS]).expand(ROWS, -1), 3
    )
    accept = Acceptor(processors, do_sample=True, keep_scores=False)
    seen: Counter[Any] = Counter()
    for _ in range(DRAWS // ROWS):
        sequences = Sequences(torch.tensor([[*PROMPT[:-1], FROZEN_TOKENS[0]]]).expand(ROWS, -1), [], None, None)
        verdict = accept(tree, logits.repeat(ROWS, 1, 1), sequences)
        for path, tokens in zip(verdict.path.tolist(), verdict.read().tokens, strict=True):
            seen[tuple(path[1 : len(tokens)]), tokens[-1]] += 1
    assert_follows(seen, frozen_law(logits, processors))


class AcceptsArgmaxAsIfSampled(Acceptor):
    """Wrong: rejection sampling for drafts drawn from the drafter's law, applied to drafts that are its argmax."""

    draft_probs = torch.tensor([0.04, 0.04, 0.04, 0.46, 0.21, 0.21])  # their argmax is 3, the token drafted

    def _choose(self, scores: Tensor, noise: Tensor | None) -> Tensor:
        target_probs = scores.softmax(-1)
        accepted = torch.rand(scores.shape[:-1]) < target_probs[..., 3] / self.draft_probs[3]
        left = (target_probs - self.draft_probs).clamp(min=0)
        redrawn = torch.multinomial(left.view(-1, VOCAB), 1).view(scores.shape[:-1])
        return redrawn.masked_fill(accepted, 3)


class AcceptsTheLikelierHalf(Acceptor):
    """Wrong: a draft is accepted where the target finds it likely enough, whatever was drawn."""

    def _choose(self, scores: Tensor, noise: Tensor | None) -> Tensor:
        likely = scores.softmax(-1)[..., 3] > 1 / VOCAB
        return super()._choose(scores, noise).masked_fill(likely, 3)


@pytest.mark.parametrize("rule", [AcceptsArgmaxAsIfSampled, AcceptsTheLikelierHalf])
def test_a_wrong_acceptance_rule_is_caught(rule: type[Acceptor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdec.decoding.loop.Acceptor", rule)
    target = sampled_target()
    drawn = draw(target, torch.tensor([PROMPT]), "plain", fixed_tree([3, 3, 3], [0, 1, 2]))
    assert deviation_sigma(count(drawn), enumerate_law(target, PROMPT, "plain")) > 2 * BOUND_SIGMA


def test_distribution_of_the_tiny_target_separates_the_rules() -> None:
    law = enumerate_law(sampled_target(), PROMPT, "plain")
    assert len(law) == VOCAB**DEPTH
    assert max(law.values()) < 0.25
    assert all(tokens in law for tokens in itertools.product(range(VOCAB), repeat=DEPTH))


def test_seeded_sampling_repeats_itself() -> None:
    target = sampled_target()
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        output = target.generate(
            torch.tensor([PROMPT]), do_sample=True, max_new_tokens=20, assistant_model=fixed_tree([3, 4], [0, 0])
        )
        runs.append(output.tolist())
    assert runs[0] == runs[1]
