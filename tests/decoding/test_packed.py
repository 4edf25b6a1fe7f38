"""Packed weights: the same products and tokens, copies only where they have paid, a model left as it was."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from hf_specdec.decoding.speed import packed
from hf_specdec.decoding.speed.packed import PackedLinears, Trial, trial_of
from hf_specdec.methods.lookup import NGramDrafter
from hf_specdec.methods.merged import MergedDrafter
from tests.method_table import METHODS, make_ddtree
from tests.scripted import right_for
from tests.targets import PROMPTS, fresh_target, make_target
from tests.watched import unseen

GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN, so nothing is packed"
)


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor, and for small weights too."""
    monkeypatch.setattr(packed, "trial_of", lambda weights: Trial(packing_s=0.5, saved_s=1.0))
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)


@pytest.fixture(autouse=True)
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of all copies that products have used."""
    used: list[int] = []
    multiply = packed._multiply

    def noting(copied: Any, bias: Any, rows: Any) -> Any:
        used.append(id(copied))
        return multiply(copied, bias, rows)

    monkeypatch.setattr(packed, "_multiply", noting)
    return used


@pytest.fixture
def target() -> PreTrainedModel:
    return fresh_target("qwen2", "sdpa", torch.float32)  # its projections have biases


@pytest.fixture
def drafter(target: PreTrainedModel) -> Any:
    return make_ddtree(target).float()


def replaced(model: nn.Module) -> list[str]:
    """Names of the layers whose forward is another one at this moment."""
    return [name for name, layer in model.named_modules() if "forward" in layer.__dict__]


def with_copy(model: nn.Module) -> set[str]:
    """Names of the layers that have a copy."""
    return {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and packed._COPIES.get(layer._parameters.get("weight")) is not None
    }


def generate(target: PreTrainedModel, drafter: Any = None, **settings: Any) -> torch.Tensor:
    return target.generate(**PROMPTS["batch of one"](), **{**GREEDY, **settings}, assistant_model=drafter)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33])
@torch.no_grad()
def test_outputs_are_those_of_the_model_within_rounding(
    target: PreTrainedModel, rows: int, multiplied: list[int]
) -> None:
    ids = torch.randint(3, 60, (2, rows), generator=torch.Generator().manual_seed(0))
    alone = target(ids).logits
    context = PackedLinears([target])
    context.pack_all()
    with context:
        assert replaced(target)
        together = target(ids).logits
    assert multiplied
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert not replaced(target)
    assert torch.equal(target(ids).logits, alone)


@pytest.mark.parametrize("method", METHODS)
def test_calls_long_enough_to_be_packed_write_the_targets_own_tokens(method: str, multiplied: list[int]) -> None:
    target, prompts = make_target("llama", "sdpa", torch.float32), PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    alone = target.generate(**prompts, **GREEDY)
    for _ in range(2):  # the second one finds the copies of the first
        multiplied.clear()
        drafter.forget()
        assert torch.equal(target.generate(**prompts, **GREEDY, assistant_model=drafter), alone)
        assert multiplied
    assert not replaced(target)


def test_first_rounds_and_the_prefill_run_on_the_weights_and_later_rounds_on_copies(
    target: PreTrainedModel, drafter: Any, multiplied: list[int]
) -> None:
    forwards = []
    target.model.layers[0].mlp.up_proj.register_forward_hook(unseen(lambda *_: forwards.append(len(multiplied))))
    generate(target, drafter)
    assert forwards[: 1 + packed.FIRST_ROUNDS] == [0] * (1 + packed.FIRST_ROUNDS)
    assert len(forwards) > 2 + packed.FIRST_ROUNDS
    later = forwards[1 + packed.FIRST_ROUNDS :]
    assert later == sorted(set(later)), "every later round uses copies"
    assert with_copy(drafter)
    assert not replaced(drafter)
    forwards.clear()
    multiplied.clear()
    generate(target, drafter)
    assert forwards[0] == 0
    assert forwards[1:] == sorted({*forwards[1:]} - {0}), "a later call uses them in every round"


def test_networks_of_a_merged_drafter_run_on_copies(target: PreTrainedModel, drafter: Any) -> None:
    generate(target, MergedDrafter(drafter, NGramDrafter()))
    assert with_copy(drafter)
    assert not replaced(drafter)


def test_slices_of_a_target_that_drafts_for_itself_run_on_copies(multiplied: list[int]) -> None:
    target = fresh_target("llama", "sdpa", torch.float32)
    drafter = METHODS["specbound"](target)
    generate(target, drafter)
    first = len(multiplied)
    assert with_copy(target)
    assert drafter.stats is not None
    assert first > 0


def test_a_call_with_few_tokens_left_packs_nothing(
    target: PreTrainedModel, drafter: Any, multiplied: list[int]
) -> None:
    generate(target, drafter, max_new_tokens=packed.LEAST_TOKENS)
    assert not with_copy(target)
    assert not multiplied


def test_a_weight_is_packed_only_if_the_tokens_left_pay_for_it(
    target: PreTrainedModel, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "trial_of", lambda weights: Trial(packing_s=30.0, saved_s=1.0))
    generate(target, drafter)
    assert not with_copy(target)
    generate(target, drafter, max_new_tokens=80)
    assert with_copy(target)


def test_copies_are_kept_for_later_calls(
    target: PreTrainedModel, drafter: Any, monkeypatch: pytest.MonkeyPatch, multiplied: list[int]
) -> None:
    before = generate(target, drafter)
    assert with_copy(target)
    monkeypatch.setattr(packed, "_pack", lambda weight: pytest.fail("packed again"))
    multiplied.clear()
    assert torch.equal(generate(target, drafter), before)
    assert multiplied


@pytest.mark.parametrize("how", ["in place", "by data", "another tensor"])
def test_weights_that_change_between_calls_are_seen(target: PreTrainedModel, drafter: Any, how: str) -> None:
    before = generate(target, drafter)
    weight = target.lm_head.weight
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if how == "in place":
            weight.copy_(weight[order])
        elif how == "by data":
            weight.data.copy_(weight[order].clone())
        else:
            target.lm_head.weight = nn.Parameter(weight[order])
    after = generate(target, drafter)
    assert torch.equal(after, generate(target))
    assert not torch.equal(after, before)


def test_an_error_in_a_round_leaves_the_model_as_it_was(target: PreTrainedModel, drafter: Any) -> None:
    calls = []

    def fail(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("in a round")

    target.model.layers[1].register_forward_pre_hook(unseen(fail))
    with pytest.raises(RuntimeError, match="in a round"):
        generate(target, drafter)
    assert not replaced(target)


def test_what_cannot_or_need_not_be_packed_is_left_alone(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, multiplied: list[int]
) -> None:
    def is_packed(model: PreTrainedModel) -> bool:
        multiplied.clear()
        alone = generate(model)
        generate(model, right_for(2, alone))
        return bool(multiplied)

    assert is_packed(target)
    assert not is_packed(copy.deepcopy(target).to(torch.float64))
    other = copy.deepcopy(target)
    with FlopCounterMode(display=False):  # watches every operation, and knows none of oneDNN's
        assert not is_packed(other)
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_packed(other)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_packed(other)
    with monkeypatch.context() as small:
        small.setattr(packed, "LEAST_BYTES", 1 << 20)
        assert not is_packed(other)
    monkeypatch.setattr(packed, "MOST_BYTES", 1000)
    assert not is_packed(other)


def test_only_shapes_that_a_trial_finds_faster_are_packed(
    target: PreTrainedModel, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = target.model.layers[0].mlp.up_proj.weight.shape

    def trial(weights: list[torch.Tensor]) -> Trial:
        assert len({weight.shape for weight in weights}) == 1
        return Trial(packing_s=0.02, saved_s=1.0 if weights[0].shape == wide else -1.0)

    monkeypatch.setattr(packed, "trial_of", trial)
    generate(target, drafter)
    assert {name.rsplit(".", 1)[1] for name in with_copy(target)} == {"up_proj", "gate_proj"}


def test_a_trial_is_run_once_for_a_shape_and_number_of_threads(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_trials", {})
    weights = [layer.mlp.up_proj.weight for layer in target.model.layers]
    first = trial_of(weights)
    assert first.packing_s > 0
    assert trial_of(weights[1:]) is first
    assert trial_of([target.model.layers[0].mlp.down_proj.weight]) is not first
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert trial_of(weights) is not first
    finally:
        torch.set_num_threads(threads)


def test_layers_whose_forward_something_else_replaced_keep_it(target: PreTrainedModel, drafter: Any) -> None:
    layer, calls = target.model.layers[0].mlp.up_proj, []
    own = layer.forward
    layer.forward = lambda rows: calls.append(1) or own(rows)
    generate(target, drafter)
    assert len(calls) > 5
    assert "forward" in layer.__dict__
    assert "model.layers.0.mlp.up_proj" not in with_copy(target)


def prune_weights(layer: nn.Linear) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.5)


@pytest.mark.parametrize(
    "change",
    [
        prune_weights,
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
    ],
    ids=["prune", "weight_norm", "spectral_norm", "parametrized weight_norm", "parametrized spectral_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_layers_that_compute_their_weight_are_not_packed(target: PreTrainedModel, drafter: Any, change: Any) -> None:
    """Registered after a call that packed the layer; copies of the weight that it had must not be used."""
    generate(target, drafter)
    layer = target.model.layers[1].mlp.down_proj
    assert "model.layers.1.mlp.down_proj" in with_copy(target)
    change(layer)
    target.eval()
    assert torch.equal(generate(target, drafter), generate(target))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forward", "compile()", "a layer", "a module wrapped by torch.compile"])
def test_a_compiled_forward_is_not_traced_with_copies(target: PreTrainedModel, how: str, multiplied: list[int]) -> None:
    torch._dynamo.reset()
    alone = generate(target)
    if how == "forward":
        target.forward = torch.compile(target.forward, backend="eager")
    elif how == "compile()":
        target.compile(backend="eager")
    elif how == "a layer":
        for layer in target.model.layers:
            layer.compile(backend="eager")
    else:
        target.lm_head = torch.compile(target.lm_head, backend="eager")
    assert torch.equal(generate(target, right_for(2, alone)), alone)
    names = with_copy(target)
    if how == "a layer":
        assert names == {"lm_head"}
    elif how == "a module wrapped by torch.compile":
        assert "model.layers.0.mlp.up_proj" in names
        assert not any("lm_head" in name for name in names)
    else:
        assert not names
    torch._dynamo.reset()


def test_layers_that_rounds_do_not_run_are_not_packed(target: PreTrainedModel, drafter: Any) -> None:
    target.vision_tower = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    generate(target, drafter)
    assert with_copy(target)
    assert not [name for name in with_copy(target) if "vision_tower" in name]


def test_replaced_layers_and_weights_are_freed_with_their_copies(target: PreTrainedModel, drafter: Any) -> None:
    generate(target, drafter)
    layer, other = target.model.layers[0].mlp.up_proj, target.model.layers[1].mlp.up_proj
    copies = [packed._COPIES[each.weight].packed for each in (layer, other)]
    gone = [weakref.ref(each) for each in (layer, layer.weight, other.weight, *copies)]
    target.model.layers[0].mlp.up_proj = nn.Linear(layer.in_features, layer.out_features, bias=False)
    other.weight = nn.Parameter(other.weight.detach().clone())
    del layer, copies
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


class Pausing:
    """Lets another thread run in the middle of a round that uses copies."""

    def __init__(self, multiplied: list[int]) -> None:
        self.multiplied = multiplied
        self.inside, self.done = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if self.multiplied and not self.inside.is_set():
            self.inside.set()
            assert self.done.wait(60)


def test_a_thread_that_trains_the_model_during_a_round_gets_all_gradients(
    target: PreTrainedModel, drafter: Any, multiplied: list[int]
) -> None:
    target.requires_grad_(True)
    pausing = Pausing(multiplied)
    hook = target.model.layers[1].register_forward_pre_hook(pausing)
    thread = threading.Thread(target=generate, args=(target, drafter))
    thread.start()
    try:
        assert pausing.inside.wait(60), "no round used a copy"
        assert replaced(target)
        ids = torch.tensor([[5, 6, 7, 8]])
        target(ids, labels=ids).loss.backward()
        found = {name for name, parameter in target.named_parameters() if parameter.grad is not None}
        assert replaced(target)
    finally:
        pausing.done.set()
        thread.join()
        hook.remove()
    assert found == {name for name, _ in target.named_parameters()}


def test_a_thread_that_writes_to_the_weights_during_a_round_is_seen(target: PreTrainedModel) -> None:
    context = PackedLinears([target])
    context.pack_all()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), context:
        target.lm_head.weight.mul_(2)
        expected = nn.functional.linear(target.model(ids).last_hidden_state, target.lm_head.weight)
        torch.testing.assert_close(target(ids).logits, expected)


def test_threads_share_a_target(target: PreTrainedModel) -> None:
    alone, found = generate(target), []

    def run() -> None:
        drafter = make_ddtree(target).float()
        found.extend(generate(target, drafter) for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    assert all(torch.equal(each, alone) for each in found)
    assert not replaced(target)
