"""Packed weights: the same products and tokens, made anew in each call, and a model that is left as it was."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from hf_specdec.decoding import packed
from hf_specdec.decoding.packed import Trial, packed_linears, trial_of
from hf_specdec.drafters.lookup import NGramDrafter
from hf_specdec.drafters.merged import MergedDrafter
from tests.methods import METHODS, make_ddtree
from tests.targets import PROMPTS, fresh_target, make_target

GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN, so nothing is packed"
)


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor, and for small weights too."""
    monkeypatch.setattr(packed, "trial_of", lambda layers: Trial(packing_s=0.0, saved_s=1.0))
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target("qwen2", "sdpa", torch.float32)  # its projections have biases


def replaced(model: nn.Module) -> list[str]:
    """Names of the layers whose forward is another one at this moment."""
    return [name for name, layer in model.named_modules() if "forward" in layer.__dict__]


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33])
def test_outputs_are_those_of_the_model_within_rounding(target: PreTrainedModel, rows: int) -> None:
    ids = torch.randint(3, 60, (2, rows), generator=torch.Generator().manual_seed(0))
    alone = target(ids).logits
    with packed_linears(target, 100):
        assert replaced(target)
        together = target(ids).logits
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert not replaced(target)
    assert torch.equal(target(ids).logits, alone)


@pytest.mark.parametrize("method", METHODS)
def test_calls_long_enough_to_be_packed_write_the_targets_own_tokens(method: str) -> None:
    target, prompts = make_target("llama", "sdpa", torch.float32), PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    assert torch.equal(
        target.generate(**prompts, **GREEDY, assistant_model=drafter), target.generate(**prompts, **GREEDY)
    )
    assert not replaced(target)


def test_rounds_run_on_the_copies_and_nothing_else_does(target: PreTrainedModel) -> None:
    """What is seen in the layers' hooks: the prefill's forward is the model's own."""
    seen = []
    layer = target.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.append("forward" in module.__dict__))
    drafter, drafting = make_ddtree(target).float(), []
    drafter.fc.register_forward_hook(lambda module, inputs, output: drafting.append("forward" in module.__dict__))
    target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    assert seen[0] is False
    assert len(seen) > 2
    assert all(seen[1:])
    assert drafting
    assert all(drafting)
    assert not replaced(drafter)


def test_networks_of_a_merged_drafter_run_on_copies(target: PreTrainedModel) -> None:
    drafter, drafting = make_ddtree(target).float(), []
    drafter.fc.register_forward_hook(lambda module, inputs, output: drafting.append("forward" in module.__dict__))
    merged = MergedDrafter(drafter, NGramDrafter())
    target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=merged)
    assert drafting
    assert all(drafting)
    assert not replaced(drafter)


@pytest.mark.parametrize("how", ["in place", "by data", "another tensor"])
def test_weights_that_change_between_calls_are_seen(target: PreTrainedModel, how: str) -> None:
    prompts, drafter = PROMPTS["batch of one"](), make_ddtree(target).float()
    before = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    weight = target.lm_head.weight
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if how == "in place":
            weight.copy_(weight[order])
        elif how == "by data":
            weight.data.copy_(weight[order].clone())
        else:
            target.lm_head.weight = nn.Parameter(weight[order])
    after = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert torch.equal(after, target.generate(**prompts, **GREEDY))
    assert not torch.equal(after, before)


def test_an_error_in_a_round_leaves_the_model_as_it_was(target: PreTrainedModel) -> None:
    calls = []

    def fail(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("in a round")

    target.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in a round"):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=make_ddtree(target).float())
    assert not replaced(target)


def test_what_cannot_or_need_not_be_packed_is_left_alone(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_packed(model: nn.Module, num_tokens: int = 100) -> bool:
        with packed_linears(model, num_tokens):
            return bool(replaced(model))

    assert is_packed(target)
    for dtype in (torch.float64, torch.bfloat16):
        assert not is_packed(copy.deepcopy(target).to(dtype))
    with FlopCounterMode(display=False):  # watches every operation, and knows none of oneDNN's
        assert not is_packed(target)
    with monkeypatch.context() as small:
        small.setattr(packed, "LEAST_BYTES", 1 << 20)
        assert not is_packed(target)
    monkeypatch.setattr(packed, "MOST_BYTES", 1000)
    assert not is_packed(target)


def test_shapes_are_packed_where_the_call_is_long_enough_to_save_what_the_copy_takes(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up- and gate-projections save 1 ms a round and take 20 ms to copy; all others are faster as they are."""
    wide = target.model.layers[0].mlp.up_proj.weight.shape

    def trial(layers: list[nn.Linear]) -> Trial:
        assert len({layer.weight.shape for layer in layers}) == 1
        return Trial(packing_s=0.02, saved_s=0.001 if layers[0].weight.shape == wide else -0.001)

    monkeypatch.setattr(packed, "trial_of", trial)
    with packed_linears(target, 20 * packed.TOKENS_PER_ROUND):
        assert not replaced(target)
    with packed_linears(target, 21 * packed.TOKENS_PER_ROUND):
        names = replaced(target)
    assert {name.rsplit(".", 1)[1] for name in names} == {"up_proj", "gate_proj"}


def test_a_trial_is_run_once_for_a_shape_and_number_of_threads(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_trials", {})
    layers = [layer.mlp.up_proj for layer in target.model.layers]
    first = trial_of(layers)
    assert first.packing_s > 0
    assert trial_of(layers[1:]) is first
    assert trial_of([target.model.layers[0].mlp.down_proj]) is not first
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert trial_of(layers) is not first
    finally:
        torch.set_num_threads(threads)


def test_layers_whose_forward_something_else_replaced_keep_it(target: PreTrainedModel) -> None:
    layer, calls = target.model.layers[0].mlp.up_proj, []
    own = layer.forward
    layer.forward = lambda rows: calls.append(1) or own(rows)
    with packed_linears(target, 100):
        target(torch.tensor([[3, 4]]))
    assert calls
    assert "forward" in layer.__dict__


def test_threads_share_a_target(target: PreTrainedModel) -> None:
    prompts = PROMPTS["batch of one"]()
    alone, found = target.generate(**prompts, **GREEDY), []

    def run() -> None:
        drafter = make_ddtree(target).float()
        found.extend(target.generate(**prompts, **GREEDY, assistant_model=drafter) for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    assert all(torch.equal(each, alone) for each in found)
    assert not replaced(target)
