"""P-EAGLE: what one forward over pairs and placeholders says is what is drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.hub.formats.base import Reading
from hf_specdec.methods.peagle import PEagleConfig, PEagleDrafter, peagle_reading
from tests.method_table import make_peagle
from tests.targets import make_target, one_prompt
from tests.watched import Watched

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa")


def one_forward(drafter: PEagleDrafter, target: PreTrainedModel, text: Tensor) -> Tensor:
    """[depth, draft_vocab] log-probabilities behind a text [1, length], all pairs and placeholders in one forward."""
    states = target(text, output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids or []], dim=-1)
    pairs, further = text.shape[1] - 1, drafter.config.num_draft_tokens - 1
    mask_ids = torch.full((1, further), drafter.config.mask_token_id)
    token_ids = torch.cat([text[:, 1:], mask_ids], dim=1)
    joined = torch.cat([taps[:, :-1], drafter.mask_hidden.expand(1, further, -1)], dim=1)
    table = drafter.embed_tokens if drafter.config.own_embeddings else target.get_input_embeddings()
    outputs = drafter(
        table(token_ids), drafter.fuse(joined), torch.arange(pairs + further).unsqueeze(0), is_causal=True
    )
    return drafter.logits(outputs[0, pairs - 1 :]).log_softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"own_embeddings": True, "num_hidden_layers": 3, "norm_before_fc": True},
        {"fc_norm": True, "norm_before_residual": True, "draft_vocab_size": None, "num_draft_tokens": 6},
        {"num_draft_tokens": 1},
    ],
    ids=["plain", "own embeddings, three layers", "norms, whole vocabulary", "one token"],
)
@torch.no_grad()
def test_drafts_are_the_marginals_of_one_causal_forward(target: PreTrainedModel, settings: dict[str, Any]) -> None:
    drafter = make_peagle(target, method="dflash", **settings).to(target.dtype)
    watched = Watched(drafter)
    target.generate(**one_prompt(), **GREEDY, assistant_model=watched)
    assert len(watched.rounds) > 3
    for each in watched.rounds:
        expected = one_forward(drafter, target, torch.tensor([each.text(0)])).argmax(-1)
        assert each.tree.token_ids[0, 1:].tolist() == drafter.to_target_ids(expected).tolist()


def test_a_mask_token_said_twice_and_proposals_without_a_number_raise() -> None:
    reading = Reading({}, {})
    with pytest.raises(ValueError, match="mask_token_id is 3 at the top level and 4 in dflash_config"):
        peagle_reading(reading, {"mask_token_id": 3, "dflash_config": {"mask_token_id": 4}})
    for methods in ({"speculative_tokens": 4}, ["greedy"], [{}]):
        with pytest.raises(ValueError, match="its first entry must have speculative_tokens"):
            peagle_reading(reading, {"speculators_config": {"proposal_methods": methods}})


def test_a_config_without_its_mask_token_says_what_to_add() -> None:
    with pytest.raises(ValueError, match="mask_token_id is None; a P-EAGLE drafter needs.*add the id"):
        PEagleDrafter(PEagleConfig(vocab_size=64, hidden_size=32))
    with pytest.raises(ValueError, match="num_draft_tokens is 0"):
        PEagleDrafter(PEagleConfig(vocab_size=64, hidden_size=32, mask_token_id=1, num_draft_tokens=0))
