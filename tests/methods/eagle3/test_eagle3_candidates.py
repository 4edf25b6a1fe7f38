"""EAGLE-3 in a `generate` call: pairs, positions and trees row by row, garbage, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.tree import DraftTree
from hf_specdec.methods.eagle3.network import Eagle3Drafter
from tests.method_table import make_eagle3
from tests.targets import PROMPTS, make_target

NEW = 14


def run(target: PreTrainedModel, drafter: Eagle3Drafter, prompts: dict[str, Tensor], **settings: Any) -> list[Any]:
    """[(context, tree)] of every round; asserts that the output is the target's own."""
    rounds: list[Any] = []
    make = drafter.candidate_generator

    def listening(model: Any) -> Any:
        generator = make(model)
        draft = generator.draft

        def keeping(context: Any) -> DraftTree:
            tree = draft(context)
            rounds.append((context, list(context.lengths), list(context.active), tree))
            return tree

        generator.draft = keeping
        return generator

    arguments = {"max_new_tokens": NEW, "do_sample": False} | settings
    drafter.candidate_generator = listening  # type: ignore[method-assign]
    output = target.generate(**prompts, **arguments, assistant_model=drafter)
    del drafter.candidate_generator
    assert output.tolist() == target.generate(**prompts, **arguments).tolist()
    return rounds


def from_scratch(target: PreTrainedModel, drafter: Eagle3Drafter, text: list[int]) -> dict[tuple[int, ...], float]:
    """The tree below the last token of `text`, path by path without a cache or a batch: path -> score, in order."""
    features = torch.cat(
        [
            target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[layer + 1]
            for layer in drafter.config.target_layer_ids
        ],
        dim=-1,
    )
    embeddings = target.get_input_embeddings()

    def top(path: tuple[int, ...], states: Tensor) -> tuple[list[tuple[int, float]], Tensor]:
        """The likeliest tokens after a path, whose states so far are given; and the states with its own."""
        ids = torch.tensor([[*text[1:], *path]])
        outputs = drafter(embeddings(ids), states, torch.arange(ids.shape[1])[None], is_causal=True)
        logprobs, draft_ids = drafter.logits(outputs[0, -1]).log_softmax(-1).topk(drafter.options.top_k)
        tokens = drafter.to_target_ids(draft_ids).tolist()
        return list(zip(tokens, logprobs.tolist(), strict=True)), torch.cat([states, outputs[:, -1:]], dim=1)

    children, grown = top((), drafter.fuse(features))
    scores = {(token,): logprob for token, logprob in children}
    states = dict.fromkeys(scores, grown)
    frontier = list(scores)
    for _ in range(1, drafter.options.depth):
        level = {}
        for path in frontier:
            children, grown = top(path, states[path])
            for token, logprob in children:
                level[(*path, token)] = scores[path] + logprob
                states[(*path, token)] = grown
        scores |= level
        frontier = sorted(level, key=level.__getitem__, reverse=True)[: drafter.options.top_k]
    return dict(sorted(scores.items(), key=lambda entry: entry[1], reverse=True)[: drafter.options.tree_budget])


def paths_of(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    parents, tokens = tree.parents[row].tolist(), tree.token_ids[row].tolist()
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(parents)):
        paths[node] = (*paths[parents[node]], tokens[node])
    return {paths[node] for node in range(1, len(parents))}


@pytest.mark.usefixtures("whole_batch")
@pytest.mark.parametrize("batch", PROMPTS)
@torch.no_grad()
def test_every_tree_equals_one_drafted_from_scratch(batch: str) -> None:
    target = make_target("llama", "sdpa", torch.float64)
    drafter = make_eagle3(target, seed=1).double()
    prompts = PROMPTS[batch]()
    pads = (prompts["attention_mask"] == 0).sum(1).tolist()
    rounds = run(target, drafter, prompts)
    accepted = drafter.stats.num_accepted_draft_tokens
    assert accepted > 0, "no draft was accepted, so no later pair was ever entered"
    for context, lengths, active, tree in rounds:
        for row, length in enumerate(lengths):
            if active[row]:
                text = context.sequences[row, pads[row] : length].tolist()
                assert paths_of(tree, row) == set(from_scratch(target, drafter, text)), (row, length)


@pytest.mark.usefixtures("whole_batch")
def test_rows_that_wait_for_others_change_nothing() -> None:
    # Without an end-of-text token a row that another criterion stopped goes on while others are longer.
    target = make_target("llama", "sdpa", torch.float64)
    drafter = make_eagle3(target, seed=1).double()
    prompts = PROMPTS["ragged batch of three"]()
    rounds = run(target, drafter, prompts, max_new_tokens=30)
    assert any(not all(active) for _, _, active, _ in rounds)


@pytest.mark.parametrize("top_k", [1, 2, 40])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_trees_of_every_shape_change_no_token(depth: int, top_k: int) -> None:
    target = make_target("llama", "sdpa", torch.float64)
    drafter = make_eagle3(target, depth=depth, top_k=top_k, tree_budget=6).double()
    for _, _, _, tree in run(target, drafter, PROMPTS["batch of one"]()):
        assert tree.num_nodes <= 7
        assert int(tree.depths.max()) <= depth
        if top_k == 1:
            assert tree.parents[0].tolist() == list(range(-1, tree.num_nodes - 1))


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("weight", ["fc.weight", "lm_head.weight", "norm.weight"])
def test_garbage_weights_change_no_token(weight: str, value: float) -> None:
    target = make_target("llama", "sdpa", torch.float64)
    drafter = make_eagle3(target).double()
    drafter.get_parameter(weight).data.view(-1)[3] = value
    run(target, drafter, PROMPTS["ragged batch of three"]())
    if value != value:
        assert drafter.stats.num_plain_steps > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_drafter_of_another_dtype_than_the_target_drafts(dtype: torch.dtype) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    drafter = make_eagle3(target).to(dtype)
    run(target, drafter, PROMPTS["batch of one"]())
    assert drafter.stats.num_draft_tokens > 0
    assert drafter.stats.num_plain_steps == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth=0 must be an integer from 1 to 64"),
        ({"top_k": 0}, "top_k=0 must be an integer from 1 to 128"),
        ({"tree_budget": 5000}, "tree_budget=5000 must be an integer from 1 to 1024"),
        ({"method": "ddtree"}, "method='ddtree' was given, but this drafter has only the method 'eagle3'"),
        ({"total_token": 60}, "Unknown drafting option 'total_token'"),
    ],
)
def test_bad_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_eagle3(make_target("llama")).set_options(**options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_hidden_size": 48}, "target hidden states of size 48, but target .* hidden_size 32"),
        ({"vocab_size": 80, "draft_vocab_size": 80}, "vocabulary of 80, but target .* has 64 embeddings"),
        ({"target_layer_ids": [0, 4]}, r"target layers \[0, 4\], but \[4\] are not among the layers 0 to 3"),
        (
            {"hidden_size": 64, "target_hidden_size": 32},
            "embeddings of size 64, but those of target .* have size 32",
        ),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65; it must be an integer from 1 to vocab_size 64"),
    ],
)
def test_drafter_of_another_target_raises(settings: dict[str, Any], message: str) -> None:
    target = make_target("llama")
    with pytest.raises(ValueError, match=message):
        make_eagle3(target, **settings).check_target(target)


def test_drafter_narrower_than_its_target_drafts_with_its_own_embeddings() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    drafter = make_eagle3(target, hidden_size=16, head_dim=8, target_hidden_size=32, own_embeddings=True).double()
    run(target, drafter, PROMPTS["ragged batch of three"]())
    assert drafter.stats.num_draft_tokens > 0
