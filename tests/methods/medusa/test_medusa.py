"""Medusa heads read the target's last state after its final norm; the first speaks of the token after the root."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.state import Counts
from hf_specdec.decoding.target import TargetModel
from hf_specdec.drafting.growth import static_tree
from hf_specdec.methods.medusa import MedusaConfig, MedusaDrafter, MedusaMarginals, rank_accuracies
from tests.method_table import make_medusa
from tests.targets import PROMPTS, fresh_target, make_target
from tests.watched import Watched


@pytest.mark.usefixtures("whole_batch")
@pytest.mark.parametrize("batch", PROMPTS)
def test_marginals_are_the_heads_on_the_state_before_the_root(batch: str) -> None:
    target = make_target("llama", "sdpa", torch.float64)
    drafter = make_medusa(target, own_head=False).double()
    watched = Watched(drafter)
    prompts = PROMPTS[batch]()
    output = target.generate(**prompts, max_new_tokens=8, do_sample=False, assistant_model=watched)
    pads = (prompts["attention_mask"] == 0).sum(1).tolist()
    for drafted in watched.rounds:
        for row, length in enumerate(drafted.context.lengths):
            if not drafted.context.active[row]:
                continue
            with torch.no_grad():
                states = target.model(output[row : row + 1, pads[row] : length - 1]).last_hidden_state[:, -1]
                expected = drafter(states, target.lm_head)
            torch.testing.assert_close(drafted.logits[row : row + 1], expected, rtol=1e-5, atol=1e-5)
    assert len(watched.rounds) > 1


def test_heads_that_know_the_text_are_accepted_to_the_last() -> None:
    # A target that counts upwards; a head of the identity and a matrix shifted by one more token is right every time.
    target = fresh_target("llama", "sdpa", torch.float32, hidden_size=64, head_dim=16)
    with torch.no_grad():
        target.model.embed_tokens.weight.copy_(torch.eye(64))
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.norm.weight.fill_(1.0)
        target.lm_head.weight.copy_(torch.eye(64).roll(1, dims=0))
        drafter = MedusaDrafter(MedusaConfig(vocab_size=64, hidden_size=64, medusa_num_heads=3)).eval()
        for place, head in enumerate(drafter.heads, start=2):
            head.blocks[0].linear.weight.zero_()
            head.blocks[0].linear.bias.zero_()
            head.lm_head.weight.copy_(torch.eye(64).roll(place, dims=0))
    drafter.set_options(tree_budget=3)
    output = target.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=13, do_sample=False, assistant_model=drafter)
    assert output[0].tolist() == list(range(3, 19))
    assert drafter.stats.per_step_accepted == [[3, 3, 3]]


def test_options_out_of_range_raise() -> None:
    drafter = make_medusa(make_target("llama"))
    with pytest.raises(ValueError, match="Unknown method 'ddtre'. Did you mean 'ddtree'?"):
        drafter.set_options(method="ddtre")
    with pytest.raises(ValueError, match="tree_budget=0 must be an integer from 1 to 1024"):
        drafter.set_options(method="ddtree", tree_budget=0)


def test_target_of_another_shape_raises() -> None:
    drafter = make_medusa(make_target("llama"))
    with pytest.raises(ValueError, match="target hidden states of size 32, but target .* hidden_size 48"):
        drafter.check_target(make_target("llama", hidden_size=48))
    with pytest.raises(ValueError, match="vocabulary of 64, but target .* has 80 embeddings"):
        drafter.check_target(make_target("llama", vocab_size=80))


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float32)


def test_static_tree_is_the_likeliest_paths() -> None:
    # Against all paths there are, by brute force.
    rates = [[0.5, 0.3, 0.1], [0.6, 0.2], [0.4, 0.35, 0.05]]
    chances = {
        path: math.prod(rates[level][rank] for level, rank in enumerate(path))
        for depth in (1, 2, 3)
        for path in itertools.product(*(range(len(level)) for level in rates[:depth]))
    }
    for budget in (1, 4, 9, 30):
        paths = static_tree(rates, budget)
        best = sorted(chances.values(), reverse=True)[:budget]
        assert [chances[path] for path in paths] == pytest.approx(best)
        assert all(path[:-1] in paths[:place] or len(path) == 1 for place, path in enumerate(paths))


def test_static_tree_holds_the_heads_guesses_rank_by_rank(target: PreTrainedModel) -> None:
    drafter = make_medusa(target, method="static_tree", rank_accuracies=[[0.6, 0.5], [0.9], [0.1]], tree_budget=5)
    source = MedusaMarginals(drafter, TargetModel(target))
    generator = drafter.candidate_generator(TargetModel(target))
    features = torch.randn(1, 4, 32, dtype=target.dtype)
    logits = torch.zeros(1, 1, target.config.vocab_size)
    outcome = Committed(
        torch.zeros(1, 4, dtype=torch.int64), features, torch.arange(4)[None], None, Counts.of([4]), logits
    )
    context = DraftContext(torch.tensor([7]), torch.tensor([4]), torch.zeros(1, 8, dtype=torch.int64), [5], [True])
    source.observe(outcome)
    generator.observe(outcome)
    guesses = source.marginals(context).topk(2).indices[0]
    tree = generator.draft(context)
    first, second = guesses[0].tolist()
    # (0,) (0, 0) (1,) (1, 0) and the likeliest third.
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 3, 2]]
    third = int(guesses[1, 0])
    assert tree.token_ids.tolist() == [[7, first, third, second, third, int(guesses[2, 0])]]


def test_rank_accuracies_count_right_guesses(target: PreTrainedModel) -> None:
    drafter = make_medusa(target)
    ids = torch.randint(3, 64, (2, 12))
    states = target.model(ids).last_hidden_state
    rates = rank_accuracies(drafter, target, ids, ranks=64)
    assert rates.shape == (3, 64)
    torch.testing.assert_close(rates.sum(1), torch.ones(3))  # some guess of all is right
    logits = drafter(states[0, 4:5].to(drafter.dtype))[0, 1]
    rank = logits.argsort(descending=True).tolist().index(int(ids[0, 4 + 3]))
    assert rates[1, rank] > 0


@pytest.mark.parametrize("rates", [[[1.5]], [], [[0.1]] * 4, [[]]])
def test_accuracies_that_make_no_sense_raise(target: PreTrainedModel, rates: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="must be a list of shares from 0 to 1 for each of at most 3 heads"):
        make_medusa(target, rank_accuracies=rates)
