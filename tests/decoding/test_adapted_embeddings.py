"""Targets whose embeddings or head have an adapter of PEFT, in every way that PEFT offers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec import attach
from hf_specdec.decoding.targets.modules import apply_head, core_of, is_quantised, num_tokens, table_rows, table_shape
from tests.method_table import METHODS, make_causal_lm
from tests.targets import make_target

LORA = functools.partial(peft.LoraConfig, r=2, lora_alpha=8, init_lora_weights=False)
WAYS: dict[str, Any] = {
    "LoRA on the embedding": lambda: LORA(target_modules=["embed_tokens", "q_proj"]),
    "LoRA on the head": lambda: LORA(target_modules=["lm_head"]),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[*range(3, 30)]),
    "LoRA and trainable tokens": lambda: LORA(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [*range(3, 30)]}
    ),
    "a copy of the embedding": lambda: LORA(target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "copies of both": lambda: LORA(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
}


def adapted(target: PreTrainedModel, way: str) -> Any:
    """The target in PEFT's wrapper, with adapters that change its output."""
    wrapped: Any = peft.get_peft_model(target, WAYS[way](), autocast_adapter_dtype=False).eval()
    draw = torch.Generator().manual_seed(1)
    for name, weight in wrapped.named_parameters():
        if "modules_to_save" in name or "trainable_tokens_delta" in name:
            weight.data += 0.1 * torch.randn(weight.shape, generator=draw, dtype=weight.dtype)
    return wrapped


def target_of(family: str = "llama") -> PreTrainedModel:
    target = copy.deepcopy(make_target(family, "sdpa"))
    target.generation_config.eos_token_id = None
    return target


PROMPT = {"input_ids": torch.tensor([[5, 9, 23, 7], [0, 12, 4, 31]]), "max_new_tokens": 12, "do_sample": False}
PROMPT["attention_mask"] = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_adapters_on_embeddings_and_head_keep_the_output(method: str, way: str) -> None:
    target = target_of()
    plain = target.generate(**PROMPT)
    drafter = METHODS[method](target)
    if isinstance(drafter, nn.Module):
        drafter.to(torch.float64)
    wrapped = adapted(target, way)
    alone = wrapped.generate(**PROMPT)
    assert alone.tolist() != plain.tolist()
    if method == "mtp" and way == "copies of both":  # it has borrowed the head of the target as it was
        with pytest.raises(ValueError, match="as it was loaded"):
            wrapped.generate(**PROMPT, assistant_model=drafter)
        return
    assert wrapped.generate(**PROMPT, assistant_model=drafter).tolist() == alone.tolist()
    with attach(wrapped, drafter):
        assert wrapped.generate(**PROMPT).tolist() == alone.tolist()
    with wrapped.disable_adapter():
        assert wrapped.generate(**PROMPT, assistant_model=drafter).tolist() == plain.tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_drafters_are_made_for_a_target_that_has_adapters(method: str, way: str) -> None:
    wrapped = adapted(target_of(), way)
    target = wrapped.get_base_model()
    drafter = METHODS[method](target)
    if isinstance(drafter, nn.Module):
        drafter.to(torch.float64)
    assert target.generate(**PROMPT, assistant_model=drafter).tolist() == target.generate(**PROMPT).tolist()


@pytest.mark.filterwarnings("ignore:Draft model")  # with adapters it is the larger one
@pytest.mark.parametrize("way", WAYS)
def test_draft_models_may_have_them_too(way: str) -> None:
    target = target_of()
    drafter = make_causal_lm(target, noise=0.0)
    drafter.model = adapted(drafter.model, way).get_base_model()
    plain = target.generate(**PROMPT)
    assert target.generate(**PROMPT, assistant_model=drafter).tolist() == plain.tolist()
    if "head" not in way and "copies" not in way:
        drafter.restrict_vocabulary(torch.arange(3, 40))
        assert target.generate(**PROMPT, assistant_model=drafter).tolist() == plain.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("way", WAYS)
def test_sizes_are_those_of_the_wrapped_modules(way: str, family: str) -> None:
    plain = target_of(family)
    table, ids = plain.get_input_embeddings().weight, torch.tensor([[3, 41, 63]])
    target = adapted(copy.deepcopy(plain), way).get_base_model()
    embeddings, head = target.get_input_embeddings(), target.get_output_embeddings()
    assert table_shape(target) == table_shape(plain) == tuple(table.shape)
    assert num_tokens(target) == len(table)
    assert not is_quantised(target)
    assert isinstance(core_of(embeddings), nn.Embedding)
    assert isinstance(core_of(head), nn.Linear)
    states = torch.randn(1, 2, table.shape[1])
    assert apply_head(head, states).tolist() == head(states.double()).float().tolist()
    rows = core_of(embeddings).weight[ids] if family == "gemma3" else embeddings(ids)  # Gemma scales its outputs
    assert table_rows(embeddings, ids).tolist() == rows.tolist()


def test_an_embedding_that_states_no_size_is_named() -> None:
    class Hashed(nn.Module):
        """Computes rows from ids."""

    target = target_of()
    target.set_input_embeddings(Hashed())
    with pytest.raises(ValueError, match="Hashed, state no num_embeddings"):
        num_tokens(target)


def test_a_users_own_wrapper_has_the_size_of_what_it_wraps() -> None:
    class Wrapper(nn.Module):
        """Adds a vector to every row."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.inner(ids) + 0.25
            return rows

    target = target_of()
    target.set_input_embeddings(Wrapper(target.get_input_embeddings()))
    plain = target.generate(**PROMPT)
    for method in ("dflash", "eagle3", "causal_lm_tree", "ngram", "specbound"):
        drafter = METHODS[method](target)
        if isinstance(drafter, nn.Module):
            drafter.to(torch.float64)
        assert target.generate(**PROMPT, assistant_model=drafter).tolist() == plain.tolist(), method
