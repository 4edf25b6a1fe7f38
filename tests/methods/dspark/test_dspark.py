"""DSpark: its trees and chains against a plain reading of the equations, one path at a time."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.growth import Slots, conditional_tree
from hf_specdec.methods.dspark import DSparkConfig, DSparkDrafter
from tests.method_table import make_dspark
from tests.targets import make_target, one_prompt
from tests.watched import Watched

VOCAB, DEPTH = 7, 3
HEADS = ("vanilla", "gated", "rnn")


def small_drafter(**block: Any) -> DSparkDrafter:
    """A drafter of few words, whose heads matter."""
    config = DSparkConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        initializer_range=1.0,
        dflash_config={"mask_token_id": 1, "target_layer_ids": [0], "block_size": DEPTH, "markov_rank": 4} | block,
    )
    torch.manual_seed(3)
    return DSparkDrafter(config).eval()


def path_logprob(drafter: DSparkDrafter, states: Tensor, logits: Tensor, root: int, path: tuple[int, ...]) -> float:
    """log of p_1(x_1) p_2(x_2) ...: formats of 2026, section 2.4, one slot after the other; of one row."""
    head, kind = drafter.markov_head, drafter.config.markov_head_type
    assert head is not None
    anchored = drafter.config.sample_from_anchor
    slots = range(len(states)) if anchored else range(1, len(states))
    s, previous, total = torch.zeros(head.rank), root, 0.0

    def bias(h: Tensor, e: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "vanilla":
            return head.markov_w2.weight @ e, s
        if kind == "gated":
            gate = torch.sigmoid(head.gate_proj.weight @ torch.cat([h, e]) + head.gate_proj.bias)
            return head.markov_w2.weight @ (gate * e), s
        joint = head.joint_proj.weight @ torch.cat([s, e, h]) + head.joint_proj.bias
        g, c, o = joint.chunk(3)
        return head.markov_w2.weight @ torch.tanh(o), torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)

    if not anchored:
        _, s = bias(states[0], head.markov_w1.weight[root], s)
    for place, (slot, token) in enumerate(zip(slots, path, strict=False)):
        h, e = states[slot], head.markov_w1.weight[previous]
        b, s = bias(h, e, s)
        total += float((logits[place] + b).log_softmax(-1)[token])
        previous = token
    return total


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        if tree.valid[row, node]:
            paths.append((*paths[int(tree.parents[row, node])], int(tree.token_ids[row, node])))
    return paths[1:]


@pytest.mark.combinations(28)
@pytest.mark.parametrize("budget", [1, 4, 13, 40])
@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_the_tree_is_the_likeliest_paths_of_a_full_enumeration(kind: str, anchored: bool, budget: int) -> None:
    drafter = small_drafter(
        markov_head_type=kind,
        sample_from_anchor=anchored,
    )
    torch.manual_seed(budget)
    depth = DEPTH if anchored else DEPTH - 1
    states, logits, roots = torch.randn(2, DEPTH, 8), torch.randn(2, depth, VOCAB), torch.tensor([2, 5])
    slots = drafter.slots(states, logits, roots)
    tree = conditional_tree(roots, slots, torch.arange(VOCAB), budget)
    assert tree.path_logprobs is not None
    every = [path for length in range(1, depth + 1) for path in itertools.product(range(VOCAB), repeat=length)]
    for row, root in enumerate(roots.tolist()):
        scores = {path: path_logprob(drafter, states[row], logits[row], root, path) for path in every}
        likeliest = sorted(every, key=lambda path: -scores[path])[:budget]
        drafted = paths_of(tree, row)
        assert sorted(drafted) == sorted(likeliest)
        stated = tree.path_logprobs[row, 1 : 1 + len(drafted)].tolist()
        assert stated == pytest.approx([scores[path] for path in drafted], abs=1e-4)
        assert stated == sorted(stated, reverse=True)


@torch.no_grad()
def test_a_row_of_nan_drafts_nothing_and_the_other_all() -> None:
    drafter = small_drafter()
    states, logits, roots = torch.randn(2, DEPTH, 8), torch.randn(2, DEPTH, VOCAB), torch.tensor([2, 5])
    logits[0, 1] = math.nan
    tree = conditional_tree(roots, drafter.slots(states, logits, roots), torch.arange(VOCAB), 5)
    assert tree.finite is not None
    assert tree.finite.tolist() == [False, True]
    assert tree.valid.tolist() == [[True, *[False] * 5], [True] * 6]


@pytest.mark.parametrize("kind", HEADS)
def test_a_greedy_chain_takes_the_likeliest_token_of_each_slot_in_turn(kind: str) -> None:
    target = make_target("llama", "sdpa", torch.float32)
    drafter = make_dspark(target, method="dspark_chain", dflash_config={"markov_head_type": kind})
    rounds: list[tuple[DraftContext, Slots, DraftTree]] = []
    make = drafter.candidate_generator

    def keeping_slots(model: Any) -> Any:
        generator: Any = make(model)
        tree = generator.tree

        def keeping(context: DraftContext, slots: Slots) -> DraftTree:
            rounds.append((context, slots, tree(context, slots)))
            return rounds[-1][2]

        generator.tree = keeping
        return generator

    drafter.candidate_generator = keeping_slots  # type: ignore[method-assign]
    target.generate(**one_prompt(), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert len(rounds) > 2
    for context, slots, chain in rounds:
        root, path = int(context.root_ids), ()
        for _ in range(slots.depth):
            with torch.no_grad():
                scores = [
                    path_logprob(drafter, slots.states[0], slots.logits[0], root, (*path, token))
                    for token in range(slots.logits.shape[-1])
                ]
            path = (*path, max(range(len(scores)), key=scores.__getitem__))
        assert tuple(chain.token_ids[0, 1:].tolist()) == path


def test_the_mask_token_is_never_drafted() -> None:
    target = make_target("llama", "sdpa", torch.float32)
    drafter = make_dspark(target, tree_budget=40)
    assert drafter.markov_head is not None
    with torch.no_grad():  # whatever stands before, the head asks for the mask
        drafter.markov_head.markov_w1.weight.fill_(1.0)
        drafter.markov_head.markov_w2.weight[drafter.config.mask_token_id] = 100.0
    watched = Watched(drafter)
    target.generate(**one_prompt(), max_new_tokens=8, do_sample=False, assistant_model=watched)
    drafted = torch.cat([drafted.tree.token_ids[0, 1:] for drafted in watched.rounds])
    assert len(drafted)
    assert drafter.config.mask_token_id not in drafted.tolist()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"markov_rank": -1}, "markov_rank is -1 in this DSpark config; it must be an integer of at least 0"),
        ({"markov_head_type": "lstm"}, r"markov_head_type is 'lstm' in this DSpark config; it must be in \['vanilla'"),
        (
            {"markov_rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": True},
            "confidence_head_with_markov is true and markov_rank 0",
        ),
    ],
)
def test_a_config_that_makes_no_sense_raises(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_drafter(**block)
