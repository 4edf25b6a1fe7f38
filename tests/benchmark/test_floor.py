from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hf_specdec.benchmark.floor import copy_bandwidth, weight_bytes
from tests.method_table import make_dflash
from tests.targets import fresh_target, make_target


def bytes_of(*parameters: torch.Tensor) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def test_embeddings_of_their_own_are_not_counted() -> None:
    target = make_target("llama")
    everything = bytes_of(*target.parameters())
    assert weight_bytes(target) == everything - bytes_of(target.get_input_embeddings().weight)


def test_tied_embeddings_are_counted_once() -> None:
    target = fresh_target("llama", tie_word_embeddings=True)
    target.tie_weights()
    assert target.get_input_embeddings().weight is target.get_output_embeddings().weight
    assert weight_bytes(target) == bytes_of(*set(target.parameters()))


def test_position_tables_are_not_counted() -> None:
    target = make_target("gpt2")
    tables = [target.transformer.wte.weight, target.transformer.wpe.weight]
    assert weight_bytes(target) == bytes_of(*target.parameters()) - bytes_of(*tables)


def test_half_precision_halves_the_bytes() -> None:
    assert weight_bytes(fresh_target("llama", dtype=torch.bfloat16)) * 4 == weight_bytes(make_target("llama"))


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral-sliding", "gpt-oss"])
def test_only_the_experts_of_one_token_are_counted(family: str) -> None:
    target = make_target(family)
    experts = [weight for name, weight in target.named_parameters() if ".experts." in name]
    assert experts
    others = bytes_of(*target.parameters()) - bytes_of(*experts) - bytes_of(target.get_input_embeddings().weight)
    assert weight_bytes(target) == others + bytes_of(*experts) // 2  # 2 of 4


def test_experts_without_a_count_raise() -> None:
    model = nn.ModuleDict({"experts": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="ModuleDict has experts, but its config gives num_experts_per_tok=None"):
        weight_bytes(model)


def test_a_drafter_reads_the_head_it_borrows() -> None:
    target = make_target("llama")
    drafter = make_dflash(target)
    head = target.get_output_embeddings()
    assert weight_bytes(drafter, borrowed=[head]) == weight_bytes(drafter) + bytes_of(head.weight)


def test_copy_bandwidth_counts_reads_and_writes() -> None:
    ticks = itertools.count()
    assert copy_bandwidth("cpu", num_bytes=1000, clock=lambda: float(next(ticks))) == 2000.0  # one second per copy
