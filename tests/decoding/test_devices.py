"""Devices that are not at hand, by a stand-in for the rule of the CPU: what a device lacks is not asked of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_specdec.decoding import devices
from hf_specdec.decoding.accept import follow
from hf_specdec.decoding.devices import Abilities, abilities
from hf_specdec.decoding.targets import attention
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.drafting.growth import level_tree
from hf_specdec.hub.loading import usable_device
from tests.method_table import METHODS
from tests.targets import PROMPTS, make_target
from tests.trees import heap_tree

APPLE = Abilities(float64=False)  # and nothing else: transformers' attention, no streams, no memory that NumPy reads


class NoFloat64(TorchDispatchMode):
    """Answers float64 as an Apple GPU does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor) and value.dtype == torch.float64:
                raise TypeError(f"{func}: this device has no float64")
        return result


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(devices.RULES, "cpu", lambda device: APPLE)
    with NoFloat64():
        yield


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_no_method_needs_float64_or_host_memory(method: str, sampling: dict[str, Any], apple: None) -> None:
    target, prompts = make_target("llama", "sdpa", torch.float32), PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    settings = {**prompts, **sampling, "max_new_tokens": 12}
    assisted = target.generate(**settings, assistant_model=drafter)
    assert assisted.tolist() == target.generate(**settings).tolist()
    assert not attention.usable(target), "attention that was measured on other devices only"


def test_trees_are_those_of_the_papers_algorithm_where_there_is_no_float64(apple: None) -> None:
    logits = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1))
    roots = torch.tensor([3, 4])
    level, heap = level_tree(roots, logits, 24), heap_tree(roots, logits, 24)
    for name in ("token_ids", "parents", "depths", "ancestor_mask", "valid"):
        assert torch.equal(getattr(level, name), getattr(heap, name)), name


def test_a_node_that_is_none_is_not_accepted_on_a_device_either() -> None:
    tree = DraftTree.from_parents(torch.tensor([[7, 1, 1]]), torch.tensor([[-1, 0, 0]]), max_depth=1)
    tree = dataclasses.replace(tree, valid=torch.tensor([[True, False, True]]))
    path, num_accepted, bonus_ids = follow(tree, torch.tensor([[1, 9, 5]]))
    assert (path.tolist(), num_accepted.tolist(), bonus_ids.tolist()) == ([[0, 2]], [1], [5])


def test_a_device_without_a_rule_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(devices.RULES, "cpu")
    assert abilities(torch.device("cpu")) == Abilities(float64=True)
    assert abilities(torch.device("meta")) == Abilities(float64=False)


def test_the_default_device_is_the_accelerator_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    assert usable_device(None).type == "meta"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert usable_device(None).type == "cpu"
    assert usable_device("cpu").type == "cpu"
