"""A draft model in shared memory: the same model on both sides, and no less of a model than before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec.drafters.specbranch.sharing import CannotShareError, SharedModel, open_shared
from tests.targets import fresh_target

PROMPT = torch.tensor([[5, 9, 14, 3]])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize("shared_in", [True, False])
@pytest.mark.parametrize("made_in", [True, False])
def test_the_opened_model_computes_the_same_on_the_same_tensors(made_in: bool, shared_in: bool) -> None:
    with torch.inference_mode(made_in):
        model = fresh_target("llama", "sdpa", tie_word_embeddings=True)
    before, parameters = logits(model), list(model.parameters())
    with torch.inference_mode(shared_in):
        shared = SharedModel(model)
    opened = open_shared(*shared.address)
    assert logits(model).equal(before)
    assert logits(opened).equal(before)
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
    assert opened.training == model.training
    assert all(tensor.is_inference() == made_in for tensor in model.parameters())
    with torch.inference_mode(made_in), torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
        model.model.rotary_emb.inv_freq.mul_(2)
    assert shared.holds(model)
    after = logits(opened)
    assert not after.equal(before)
    assert after.equal(logits(model))


def test_a_shared_model_is_saved_copied_pickled_and_trained_like_another(tmp_path: Path) -> None:
    model = fresh_target("llama", "sdpa")
    shared, before = SharedModel(model), logits(model)
    model.save_pretrained(tmp_path)
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=model.dtype)).equal(before)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    dumped = pickle.dumps(model)
    assert len(dumped) < 1.5 * size + 100_000  # each tensor alone, not the whole memory with each
    copies = copy.deepcopy(model), pickle.loads(dumped)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    assert logits(open_shared(*shared.address)).equal(logits(model))
    for copied in copies:
        assert not shared.holds(copied)
        assert logits(copied).equal(before)


def test_a_model_whose_tensors_were_replaced_is_not_held_any_more() -> None:
    model = fresh_target("llama", "sdpa")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shared = SharedModel(model)
    model.load_state_dict(state)
    assert shared.holds(model)
    model.load_state_dict(state, assign=True)
    assert not shared.holds(model)
    again = SharedModel(model)
    assert again.holds(model)
    model.to(torch.bfloat16)
    assert not again.holds(model)


def test_tensors_that_are_parts_of_one_storage_stay_so() -> None:
    model = fresh_target("llama", "sdpa")
    attention = model.model.layers[0].self_attn
    whole = torch.randn(2, *attention.k_proj.weight.shape, dtype=model.dtype)
    attention.k_proj.weight, attention.v_proj.weight = nn.Parameter(whole[0]), nn.Parameter(whole[1])
    before = logits(model)
    shared = SharedModel(model)
    key, value = attention.k_proj.weight, attention.v_proj.weight
    assert value.data_ptr() - key.data_ptr() == key.nbytes
    assert logits(open_shared(*shared.address)).equal(before)


def of_the_main_program(model: PreTrainedModel) -> None:
    model.__class__ = type("Own", (type(model),), {"__module__": "__main__"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_the_main_program, "Own is defined in the main program"),
        (lambda model: setattr(model, "extra", lambda: None), "cannot be pickled: .*lambda"),
        (lambda model: model.register_buffer("extra", torch.ones(3).to_sparse()), "Tensor of torch.sparse_coo on cpu"),
        (lambda model: model.register_buffer("extra", torch.ones(3, device="meta")), "strided on meta"),
    ],
)
def test_a_model_that_cannot_be_shared_is_told_of_and_left_as_it_was(
    change: Callable[[PreTrainedModel], None], message: str
) -> None:
    model = fresh_target("llama", "sdpa")
    change(model)
    pointers = [tensor.data_ptr() for tensor in model.parameters()]
    with pytest.raises(CannotShareError, match=message):
        SharedModel(model)
    assert [tensor.data_ptr() for tensor in model.parameters()] == pointers
