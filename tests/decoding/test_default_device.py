"""A default device other than the model's, as programs set for their own tensors: every tensor names its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_specdec.hub.loading import load_drafter
from tests.chains import assisted_loop
from tests.method_table import METHODS
from tests.targets import PROMPTS, fresh_target, one_prompt
from tests.verdicts import BUNDLED


@contextmanager
def default_device(device: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(before)


OTHER = ["specbound", "causal_lm_ssd"]  # do not run on recurrent states
CASES = [(method, "llama") for method in METHODS] + [
    (method, "qwen3-next") for method in METHODS if method not in OTHER
]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("method", "family"), CASES)
def test_calls_do_not_depend_on_the_default_device(method: str, family: str, do_sample: bool) -> None:
    target = fresh_target(family, "sdpa")
    drafter = METHODS[method](target)
    if isinstance(drafter, nn.Module):
        drafter.to(torch.float64)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": do_sample}
    for prompts in (PROMPTS["ragged batch of three"](), one_prompt()):
        outputs = []
        for device in ("cpu", "meta"):  # which stands for any other: on it nothing can be computed
            drafter.forget()
            torch.manual_seed(0)
            with default_device(device):
                outputs.append(target.generate(**prompts, **settings, assistant_model=drafter).tolist())
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("method", METHODS)
def test_chains_do_not_either(method: str) -> None:
    target = fresh_target("llama", "sdpa")
    drafter = METHODS[method](target)
    if isinstance(drafter, nn.Module):
        drafter.to(torch.float64)
    settings: dict[str, Any] = {**one_prompt(), "max_new_tokens": 12, "do_sample": False}
    alone = target.generate(**settings)
    with default_device("meta"), assisted_loop(), pytest.warns(UserWarning, match="drafts chains|Nothing is drafted"):
        assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist()


@pytest.mark.parametrize("name", ["dflash", "dspark", "specblock", "specbound", "specbranch", "draft-lm"])
def test_loading_does_not_either(name: str) -> None:
    target: Any = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype="float32")
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    prompt = torch.tensor([[5, 9, 23, 7]])
    alone = target.generate(prompt, **settings)
    with default_device("meta"):
        drafter = load_drafter(BUNDLED / name, target)
        assert {weight.device for network in drafter.networks for weight in network.parameters()} <= {target.device}
        assert target.generate(prompt, **settings, assistant_model=drafter).tolist() == alone.tolist()
