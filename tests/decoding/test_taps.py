"""Which hidden states a tap reads, told by transformers' own `output_hidden_states`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.decoding.exchange import Committed, DraftContext
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.verification.precision import Raised
from tests.scripted import StubDrafter, right_for
from tests.targets import PROMPTS, make_target

TAPS = (-1, 0, 2, 3, 4)  # of a target of 4 layers


class Reading(StubDrafter):
    """A stub that reads taps."""

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        return TAPS


def reading(target: PreTrainedModel, prompts: dict[str, Tensor], **settings: object) -> tuple[Tensor, list[Committed]]:
    arguments = {"max_new_tokens": 10, "do_sample": False, **settings}
    script = right_for([2, 0, 3], target.generate(**prompts, **arguments)).draft

    def draft(context: DraftContext) -> DraftTree:
        return script(context)

    drafter = Reading(draft)
    output = target.generate(**prompts, **arguments, assistant_model=drafter)
    return output, drafter.outcomes


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 4}])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3.5", "granite-hybrid", "llama4"])
@torch.no_grad()
def test_taps_read_inputs_and_outputs_of_layers_and_the_input_of_the_head(
    family: str, settings: dict[str, int]
) -> None:
    target = make_target(family, "sdpa")
    with Raised(torch.float64):  # some compute in float32 whatever the target is in
        output, outcomes = reading(target, PROMPTS["batch of one"](), **settings)
    raw: list[Tensor] = []
    layers = target.model.layers if family != "gpt2" else target.transformer.h
    handle = layers[-1].register_forward_hook(
        lambda module, args, given: raw.append(given[0] if isinstance(given, tuple) else given)
    )
    with Raised(torch.float64):
        states = target(output[:, :-1], output_hidden_states=True).hidden_states
    handle.remove()
    # The last entry of transformers' hidden states is after the final norm; what layer 3 gives is not.
    expected = torch.cat([states[0], states[1], states[3], raw[0], states[4]], dim=-1)
    features = torch.cat([outcome.features for outcome in outcomes], dim=1)
    length = min(features.shape[1], expected.shape[1])
    assert length > 15
    torch.testing.assert_close(features[:, :length], expected[:, :length], rtol=1e-9, atol=1e-9)
