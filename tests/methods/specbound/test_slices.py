"""Layers run a few at a time give what a whole forward gives: families x attention x batches, tokens and cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.generator import TreeCandidateGenerator
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.methods.specbound.drafting import PendingGenerator
from tests.scripted import StubDrafter
from tests.targets import FAMILIES, PROMPTS, make_target

NEW = 16


class SlicedDrafter(StubDrafter):
    """Drafts `script` for some tokens, then errs, and runs every node through a number of layers of its own."""

    def __init__(self, script: Tensor, *, width: int = 5, seed: int = 0) -> None:
        super().__init__(self.chain)
        self.script, self.width, self.dice = script, width, random.Random(seed)
        self.depths: list[list[int]] = []

    def candidate_generator(self, target: TargetModel) -> TreeCandidateGenerator:
        self.target = target
        self.generator = _SlicedGenerator(target, self)
        return self.generator

    def chain(self, context: DraftContext) -> DraftTree:
        chain = self.generator.begin_chain(context.root_positions, self.width)
        columns = [context.root_ids]
        chain.extend(context.root_ids)
        right = self.dice.randrange(self.width)
        self.depths.append([])
        for step in range(1, self.dice.randrange(1, self.width + 1)):
            depth = self.dice.randrange(chain.slices.num_layers)
            state = chain.advance(depth)
            assert state.shape == (len(context.root_ids), self.target.config.hidden_size)
            self.depths[-1].append(depth)
            places = [min(length + step - 1, self.script.shape[1] - 1) for length in context.lengths]
            drafted = self.script[torch.arange(len(places)), places]
            columns.append(drafted if step <= right else (drafted + 1) % 64)
            chain.extend(columns[-1])
            passed = [layers for layers, states in chain._segments for _ in range(states.shape[1])]
            assert len(passed) == chain.num_nodes == len(columns)
            assert passed == sorted(passed, reverse=True)
        return DraftTree.chain(torch.stack(columns, 1))


class _SlicedGenerator(PendingGenerator):
    def __init__(self, target: TargetModel, drafter: SlicedDrafter) -> None:
        super().__init__(target)
        self.drafter = drafter

    def draft(self, context: DraftContext) -> DraftTree:
        return self.drafter.chain(context)


CASES = [
    pytest.param(family, attention, batch, id=f"{family}-{attention}-{batch}")
    for family, (_, _, implementations) in FAMILIES.items()
    for attention in implementations
    for batch in PROMPTS
]


@pytest.mark.parametrize(("family", "attention", "batch"), CASES)
def test_a_chain_run_in_slices_gives_the_tokens_and_the_cache_of_plain_decoding(
    family: str, attention: str, batch: str
) -> None:
    # In float64 eager attention turns fully masked rows of left padding into NaN; see test_exactness.py.
    padded_eager = attention == "eager" and batch != "batch of one"
    target = make_target(family, attention, torch.float32 if padded_eager else torch.float64)
    prompts = PROMPTS[batch]()
    arguments: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    alone = target.generate(**prompts, **arguments, **{CACHE: DynamicCache()})
    drafter = SlicedDrafter(alone.sequences)
    assisted = target.generate(**prompts, **arguments, **{CACHE: DynamicCache()}, assistant_model=drafter)
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert drafter.stats.num_accepted_draft_tokens > 0
    seen = prompts["attention_mask"].bool()
    for own, theirs in zip(assisted[CACHE].layers, alone[CACHE].layers, strict=True):
        for part in ("keys", "values"):
            found, expected = getattr(own, part), getattr(theirs, part)
            assert found.shape == expected.shape
            tokens = torch.cat([seen, seen.new_ones(len(seen), found.shape[2] - seen.shape[1])], 1)
            tolerance = 1e-3 if padded_eager else 1e-5  # norms and rotary angles are float32 in any case
            torch.testing.assert_close(
                found.transpose(1, 2)[tokens], expected.transpose(1, 2)[tokens], rtol=tolerance, atol=tolerance
            )
