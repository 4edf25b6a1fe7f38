"""Token recycling: what the table learns, and the tree that is filled from it."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import load_drafter
from tests.chains import assisted_loop
from tests.targets import make_target, one_prompt
from tests.watched import Watched


def test_the_table_has_the_targets_likeliest_tokens_after_every_verified_token() -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    drafter = load_drafter("token-recycling", top_k=3, tree_budget=6)
    text = target.generate(**prompt, max_new_tokens=2, do_sample=False, assistant_model=drafter)
    length = prompt["input_ids"].shape[1]
    logits = target(text[:, :-1]).logits[0]
    last = text[0, length - 1]
    assert drafter.table[last].tolist() == logits[length - 1].topk(3).indices.tolist()
    # Of tokens of the prompt only what follows is known, from the last occurrence of each.
    words = text[0, :length].tolist()
    for place, token in enumerate(words[:-1]):
        if token not in words[place + 1 :]:
            assert drafter.table[token].tolist() == [words[place + 1], -1, -1]


def test_refused_nodes_are_recycled() -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    drafter = load_drafter("token-recycling", top_k=2, tree_budget=4)
    root = int(target.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1])
    wrong = (int(target.generate(**prompt, max_new_tokens=2, do_sample=False)[0, -1]) + 1) % 64
    target.generate(**prompt, max_new_tokens=1, do_sample=False, assistant_model=drafter)
    drafter.table[root] = wrong  # the next call drafts it, and the target refuses it
    target.generate(**prompt, max_new_tokens=3, do_sample=False, assistant_model=drafter)
    assert drafter.stats.per_step_accepted[0][0] == 0
    after = target(torch.cat([prompt["input_ids"], torch.tensor([[root, wrong]])], 1)).logits[0, -1]
    assert drafter.table[wrong].tolist() == after.topk(2).indices.tolist()


def test_the_tree_is_looked_up_level_by_level_and_unknown_tokens_end_it() -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    root = int(target.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1])
    drafter = load_drafter("token-recycling", top_k=2, tree_budget=6, depth=3)
    target.generate(**prompt, max_new_tokens=1, do_sample=False, assistant_model=drafter)
    drafter.table.fill_(-1)
    one, two, three = [token for token in range(2, 64) if token not in prompt["input_ids"] and token != root][:3]
    drafter.table[root] = torch.tensor([one, two])
    drafter.table[one, 0] = three
    watched = Watched(drafter)
    target.generate(**prompt, max_new_tokens=2, do_sample=False, assistant_model=watched)
    tree = watched.rounds[0].tree
    words = prompt["input_ids"][0].tolist()
    drafted = {
        (int(tree.token_ids[0, tree.parents[0, node]]), int(tree.token_ids[0, node]))
        for node in range(1, tree.num_nodes)
        if tree.valid[0, node]
    }
    assert {(root, one), (root, two), (one, three)} <= drafted
    assert all(parent in words or parent in (root, one) for parent, _ in drafted)


def test_a_second_call_starts_from_the_first_and_forget_clears_the_table() -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    drafter = load_drafter("token-recycling", tree_budget=80)
    accepted = []
    for _ in range(2):
        target.generate(**prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter)
        accepted.append(drafter.stats.num_accepted_draft_tokens)
    assert accepted[1] > accepted[0]
    drafter.forget()
    target.generate(**prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert drafter.stats.num_accepted_draft_tokens == accepted[0]


def test_a_table_of_another_vocabulary_is_cleared() -> None:
    drafter = load_drafter("token-recycling", top_k=3)
    for vocab in (64, 40):
        target = make_target("llama", "sdpa", torch.float64, vocab_size=vocab)
        prompt = torch.tensor([[3, 5, 4, 1, 5]])
        alone = target.generate(prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter), alone)
        assert drafter.table.shape == (vocab, 3)


def test_it_learns_in_the_assisted_loop_too() -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    drafter = load_drafter("token-recycling", tree_budget=80)
    alone = target.generate(**prompt, max_new_tokens=24, do_sample=False)
    with assisted_loop():
        for _ in range(2):
            with pytest.warns(UserWarning, match="drafts chains"):
                assisted = target.generate(**prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter)
            assert torch.equal(assisted, alone)
    assert drafter.stats.num_accepted_draft_tokens > 0
