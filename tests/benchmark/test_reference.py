from __future__ import annotations

import pytest
import torch

from examples.speed.reference import heap_tree, reference_ddtree
from hf_specdec.methods.ddtree import level_tree
from tests.method_table import make_ddtree
from tests.targets import make_target, one_prompt


@pytest.mark.parametrize("budget", [1, 7, 40])
def test_reference_tree_is_ours(budget: int) -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(budget))
    tokens, parents = heap_tree(logits, root=3, budget=budget)
    ours = level_tree(torch.tensor([3]), logits.unsqueeze(0), budget)
    assert tokens == ours.token_ids[0].tolist()
    assert parents == ours.parents[0].tolist()


def test_reference_loop_writes_the_targets_text_in_the_same_rounds_as_ours() -> None:
    target, prompt = make_target("llama", "sdpa"), one_prompt()
    drafter = make_ddtree(target, tree_budget=20).to(torch.float64)
    settings = {"max_new_tokens": 40, "do_sample": False}
    ours = target.generate(**prompt, **settings, assistant_model=drafter)
    run = reference_ddtree(target, drafter, prompt["input_ids"], 40, budget=20)
    assert run.token_ids.tolist() == ours.tolist() == target.generate(**prompt, **settings).tolist()
    assert drafter.stats is not None
    accepted = [length - 1 for length in run.acceptance_lengths]
    # Ours may look less far ahead in the last round: it knows where the text ends.
    assert accepted[:-1] == drafter.stats.per_step_accepted[0][:-1]
    assert sum(accepted) > 0, "a test in which nothing is accepted shows little"


def test_scripted_trees_take_the_place_of_drafted_ones() -> None:
    target, prompt = make_target("llama", "sdpa"), one_prompt()["input_ids"]
    drafter = make_ddtree(target, tree_budget=5).to(torch.float64)
    text = target.generate(prompt, max_new_tokens=30, do_sample=False)[0].tolist()
    place = prompt.shape[1]

    def script(root: int) -> tuple[list[int], list[int]]:
        nonlocal place
        assert text[place] == root
        place += 4
        return text[place - 4 : place], [-1, 0, 1, 2]

    run = reference_ddtree(target, drafter, prompt, 20, budget=5, script=script)
    assert run.acceptance_lengths == [4] * 5
    assert run.token_ids[0].tolist() == text[: prompt.shape[1] + 20]
