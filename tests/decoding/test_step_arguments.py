"""What plain decoding gives a target at every step beside tokens: positions by rules of its own, further arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
)

from hf_specdec.methods.lookup import NGramDrafter
from tests.method_table import METHODS
from tests.scripted import right_for
from tests.targets import IN_OLDEST, fresh_target, one_prompt, ragged_prompts

GREEDY = {"max_new_tokens": 12, "do_sample": False}


def same_tokens(target: PreTrainedModel, **inputs: Any) -> Tensor:
    """Generates alone and with drafts that are partly right."""
    alone = target.generate(**inputs, **GREEDY)
    drafter = right_for([3] * len(alone), alone)
    assisted = target.generate(**inputs, **GREEDY, assistant_model=drafter)
    assert assisted.tolist() == alone.tolist()
    assert drafter.stats is not None
    assert drafter.stats.num_accepted_draft_tokens
    return alone


def paligemma() -> PreTrainedModel:
    text = {
        "model_type": "gemma", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 32,
    }  # fmt: skip
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=63, projection_dim=32, hidden_size=32
    )
    torch.manual_seed(3)
    target = PaliGemmaForConditionalGeneration(config).double().eval()
    target.generation_config.update(pad_token_id=0, eos_token_id=None)
    return target


@pytest.mark.parametrize("rows", [1, 3])
def test_positions_are_those_that_the_host_would_give(rows: int) -> None:
    """PaliGemma counts from 1."""
    inputs = one_prompt() if rows == 1 else ragged_prompts()
    same_tokens(paligemma(), **inputs)


def test_positions_behind_an_image_are_those_that_the_host_would_give() -> None:
    ids = torch.cat([torch.full((1, 4), 63), one_prompt()["input_ids"]], 1)
    same_tokens(paligemma(), input_ids=ids, pixel_values=torch.randn(1, 3, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("prompts", [one_prompt, ragged_prompts])
def test_token_types_continue_as_in_the_host(prompts: Any) -> None:
    target, inputs = fresh_target("gpt2", "sdpa"), prompts()
    types = torch.arange(5, 5 + len(inputs["input_ids"])).unsqueeze(1).expand_as(inputs["input_ids"])
    without = target.generate(**inputs, **GREEDY)
    assert same_tokens(target, **inputs, token_type_ids=types).tolist() != without.tolist()


def test_token_types_stay_with_their_rows_when_others_have_finished() -> None:
    target, inputs = fresh_target("gpt2", "sdpa"), ragged_prompts()
    inputs["token_type_ids"] = torch.tensor([[5], [6], [7]]).expand_as(inputs["input_ids"])
    alone = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    ends = {"eos_token_id": [int(alone[0, 11]), int(alone[1, 13])], "max_new_tokens": 30, "do_sample": False}
    alone = target.generate(**inputs, **ends)
    assisted = target.generate(**inputs, **ends, assistant_model=NGramDrafter())
    assert assisted.tolist() == alone.tolist()


def test_layers_in_slices_refuse_token_types_that_they_would_not_see() -> None:
    target, inputs = fresh_target("gpt2", "sdpa"), one_prompt()
    types = torch.full_like(inputs["input_ids"], 5)
    with pytest.raises(ValueError, match=r"token_type_ids .* layer by layer; leave them out"):
        target.generate(**inputs, token_type_ids=types, **GREEDY, assistant_model=METHODS["specbound"](target))


class Steered(LlamaForCausalLM):
    """A target with arguments of its own, which `generate` hands on at every step; `unread` changes nothing."""

    def forward(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        steer: Tensor | None = None,
        loud: bool = False,
        unread: Tensor | None = None,
        **others: Any,
    ) -> Any:
        output = super().forward(input_ids, position_ids=position_ids, **others)
        if steer is not None:
            output.logits = output.logits + steer
        if loud:
            output.logits = output.logits.roll(1, -1)
        return output


def steered() -> PreTrainedModel:
    target = fresh_target("llama", "sdpa")
    target.__class__ = Steered
    return target


def test_arguments_without_tensors_are_passed_on() -> None:
    target = steered()
    assert same_tokens(target, **one_prompt(), loud=True).tolist() != same_tokens(target, **one_prompt()).tolist()


def test_tensors_that_nodes_cannot_share_run_chains() -> None:
    with pytest.warns(UserWarning, match=r"Steered gets \['steer'\] in every decoding step.*'ngram' drafts chains"):
        steered().generate(**one_prompt(), steer=torch.ones(64), **GREEDY, assistant_model=NGramDrafter())


def test_the_trial_of_a_tensor_leaves_no_features() -> None:
    """Whether a tensor may be left out is tried after the prompt has run, and before its features are read."""
    target = steered()
    drafter = METHODS["dflash"](target)
    target.generate(**one_prompt(), **GREEDY, assistant_model=drafter)
    accepted = drafter.stats.per_step_accepted
    settings = {**one_prompt(), **GREEDY, "unread": torch.ones(64)}
    alone = target.generate(**settings)
    assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.per_step_accepted == accepted


def mllama() -> PreTrainedModel:
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0, "cross_attention_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_output_dim": 32, "max_num_tiles": 1,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    torch.manual_seed(0)
    config = MllamaConfig(text_config=text, vision_config=vision, image_token_index=63)
    target = MllamaForConditionalGeneration(config).double().eval()
    target.generation_config.update(pad_token_id=0, eos_token_id=None)
    return target


@pytest.mark.skipif(IN_OLDEST, reason="Mllama of this transformers cannot run several tokens after cached ones")
@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")  # of older versions
def test_cross_attention_to_an_image_runs_chains() -> None:
    image = {
        "pixel_values": torch.randn(1, 1, 1, 3, 8, 8, dtype=torch.float64),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.int64),
    }
    with pytest.warns(UserWarning, match=r"pixel_values .* cross-attention.*'ngram' drafts chains"):
        mllama().generate(torch.tensor([[63, 5, 6, 7, 9]]), **image, **GREEDY, assistant_model=NGramDrafter())


def test_text_with_unused_cross_attention_equals_plain_decoding() -> None:
    same_tokens(mllama(), **one_prompt())


def test_cross_attention_to_an_encoder_runs_chains() -> None:
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=64, add_cross_attention=True, bos_token_id=1, eos_token_id=1
    )
    states = torch.randn(1, 4, 32)
    with pytest.warns(UserWarning, match=r"encoder_hidden_states .* cross-attention.*'ngram' drafts chains"):
        GPT2LMHeadModel(config).eval().generate(
            **one_prompt(), encoder_hidden_states=states, **GREEDY, assistant_model=NGramDrafter()
        )
