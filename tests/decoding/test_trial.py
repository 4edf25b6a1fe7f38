"""The trial compares with transformers' own decoding, and leaves no trace in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_specdec.decoding.targets.trial import check_trees, why_no_chains
from hf_specdec.decoding.upstream import CACHE
from tests.chains import assisted_loop
from tests.multimodal import prompt, tiny_model
from tests.scripted import right_for
from tests.targets import fresh_target, one_prompt, ragged_prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
pytestmark = pytest.mark.filterwarnings("ignore:.*(In this call|decodes it plainly)")


class Target(LlamaForCausalLM):
    """With changed positions."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **others: Any
    ) -> Any:
        cache = others.get(CACHE)
        position_ids = self.changed(
            input_ids, attention_mask, position_ids, 0 if cache is None else cache.get_seq_length()
        )
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **others)

    def changed(self, input_ids: Tensor, mask: Any, position_ids: Any, seen: int) -> Any:
        """Positions for the forward, after `seen` tokens."""
        raise NotImplementedError


class OwnPositions(Target):
    """Makes positions of its own, which begin at 7, unless it gets some; transformers passes none."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("position_ids", None)
        return inputs

    def changed(self, input_ids: Tensor, mask: Any, position_ids: Any, seen: int) -> Any:
        own = 7 + 2 * torch.arange(seen, seen + input_ids.shape[1]).unsqueeze(0)
        return own if position_ids is None else position_ids


def own_positions() -> PreTrainedModel:
    target = fresh_target("llama", "sdpa")
    target.__class__ = OwnPositions
    return target


def kosmos() -> PreTrainedModel:
    return tiny_model("kosmos-2.5")


@pytest.mark.parametrize("right", [0, 3, [2, 0, 5, 1]], ids=str)
@pytest.mark.parametrize("make", [own_positions, kosmos])
def test_positions_that_the_model_makes_itself_run_chains(make: Any, right: Any) -> None:
    target = make()
    alone = target.generate(**one_prompt(), **GREEDY)
    drafter = right_for(right, alone, siblings=0)
    with pytest.warns(UserWarning, match=r"a draft tree got logits .* that differ by.*own loop verifies"):
        assert target.generate(**one_prompt(), **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert (drafter.stats.num_accepted_draft_tokens > 0) == (right != 0)


class FourDimensionsFail(Target):
    """Has code of its own for masks of two dimensions."""

    _supports_attention_backend = False

    def changed(self, input_ids: Tensor, mask: Any, position_ids: Any, seen: int) -> Any:
        if mask is not None:
            _batch, _length = mask.shape
        return position_ids


class PaddedDiffers(Target):
    """Shifts positions if its mask of two dimensions has padding."""

    _supports_attention_backend = False

    def changed(self, input_ids: Tensor, mask: Any, position_ids: Any, seen: int) -> Any:
        if mask is not None and mask.dim() == 2:
            return position_ids + 3 * (1 - mask).sum(1, keepdim=True) * torch.arange(input_ids.shape[1])
        return position_ids


@pytest.mark.parametrize("target_class", [FourDimensionsFail, PaddedDiffers])
def test_masks_that_a_model_reads_in_another_way_are_found_before_the_first_token(target_class: Any) -> None:
    target = fresh_target("llama", "sdpa")
    target.__class__ = target_class
    for inputs in (one_prompt(), ragged_prompts()):
        alone = target.generate(**inputs, **GREEDY)
        for right in (2, [2, 0, 5]):
            drafter = right_for(right, alone)
            assert target.generate(**inputs, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()


class Remembering(Target):
    """Remembers something of the last prompt, as models of pictures do."""

    _supports_attention_backend = False
    first: Tensor | None = None

    def changed(self, input_ids: Tensor, mask: Any, position_ids: Any, seen: int) -> Any:
        if not seen:
            self.first = input_ids[:, :1]
        return position_ids


def test_trials_leave_the_state_that_a_call_has_left() -> None:
    target = fresh_target("llama", "sdpa")
    target.__class__ = Remembering
    target.generate(**one_prompt(), **GREEDY)
    before = dict(vars(target))
    check_trees(target)
    assert why_no_chains(target) is None
    assert vars(target).keys() == before.keys()
    assert all(vars(target)[name] is value for name, value in before.items())


def test_chains_run_after_a_call_with_a_picture() -> None:
    target = tiny_model("qwen2_5_vl")
    for pictures in ([0], [None], [1]):
        inputs = prompt(target, pictures)
        alone = target.generate(**inputs, **GREEDY)
        offsets = target.model.rope_deltas
        drafter = right_for(3, alone, siblings=0)
        with assisted_loop():
            assert target.generate(**inputs, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        assert drafter.stats.num_accepted_draft_tokens > 0
        assert target.model.rope_deltas.equal(offsets)
