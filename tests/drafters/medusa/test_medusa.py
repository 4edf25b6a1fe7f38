"""Medusa heads read the target's last state after its final norm; the first speaks of the token after the root."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_specdec.drafters.medusa import MedusaConfig, MedusaDrafter, MedusaMarginals
from tests.methods import make_medusa
from tests.targets import PROMPTS, fresh_target, make_target


@pytest.mark.parametrize("batch", PROMPTS)
def test_marginals_are_the_heads_on_the_state_before_the_root(batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama", "sdpa", torch.float64)
    drafter = make_medusa(target, own_head=False).double()
    seen: list[tuple[list[int], list[bool], Tensor]] = []
    marginals = MedusaMarginals.marginals

    def listening(self: MedusaMarginals, context: Any) -> Tensor:
        logits = marginals(self, context)
        seen.append((list(context.lengths), context.active, logits.clone()))
        return logits

    monkeypatch.setattr(MedusaMarginals, "marginals", listening)
    prompts = PROMPTS[batch]()
    output = target.generate(**prompts, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    pads = (prompts["attention_mask"] == 0).sum(1).tolist()
    for lengths, active, logits in seen:
        for row, length in enumerate(lengths):
            if not active[row]:
                continue
            with torch.no_grad():
                states = target.model(output[row : row + 1, pads[row] : length - 1]).last_hidden_state[:, -1]
                expected = drafter(states, target.lm_head)
            torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-5, atol=1e-5)
    assert len(seen) > 1


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
