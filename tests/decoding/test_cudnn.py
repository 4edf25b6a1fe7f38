"""cuDNN's attention is off while this library runs a model, and as before afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hf_specdec import generate_many
from hf_specdec.decoding.speed.cudnn import without_cudnn_attention
from hf_specdec.methods.lookup import NGramDrafter
from tests.method_table import METHODS
from tests.targets import PROMPTS, make_target


class Attentions(TorchFunctionMode):
    """Notes for each attention whether cuDNN could have computed it on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return func(*args, **(kwargs or {}))


@contextmanager
def cudnn(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("method", METHODS)
def test_no_attention_of_a_call_is_cudnns(method: str) -> None:
    target = make_target("llama", "sdpa")
    drafter = METHODS[method](target)
    with cudnn(allowed=True), Attentions() as attentions:
        target.generate(**PROMPTS["batch of one"](), max_new_tokens=6, do_sample=False, assistant_model=drafter)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert attentions.allowed
    assert not any(attentions.allowed)


@pytest.mark.parametrize("assistant_model", [None, NGramDrafter()], ids=["plain", "ngram"])
def test_no_attention_of_shared_rounds_is_cudnns(assistant_model: NGramDrafter | None) -> None:
    target, prompts = make_target("llama", "sdpa"), [[5, 9, 5, 9], [7, 8, 9]]
    with cudnn(allowed=True), Attentions() as attentions:
        for _ in generate_many(target, prompts, assistant_model=assistant_model, max_new_tokens=6, do_sample=False):
            assert torch.backends.cuda.cudnn_sdp_enabled(), "between rounds the caller has its own setting"
    assert attentions.allowed
    assert not any(attentions.allowed)


@pytest.mark.parametrize("allowed", [True, False])
def test_the_last_thread_restores_the_setting(allowed: bool) -> None:
    left, entered = threading.Event(), threading.Event()

    def other() -> None:
        with without_cudnn_attention():
            entered.set()
            left.wait(60)

    with cudnn(allowed):
        thread = threading.Thread(target=other)
        with without_cudnn_attention():
            thread.start()
            entered.wait(60)
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "the other thread still runs a model"
        left.set()
        thread.join()
        assert torch.backends.cuda.cudnn_sdp_enabled() is allowed
