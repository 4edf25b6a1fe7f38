"""How often a round makes the host wait for the device: counted at the operations that would wait on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_specdec.decoding import devices, loop
from hf_specdec.decoding.devices import Abilities, ToHost
from hf_specdec.decoding.target import TargetModel
from tests.decoding.test_finished_rows import drafter_of, settings_of
from tests.decoding.test_finished_rows import prompts as five_prompts
from tests.decoding.test_graphs import capture_on_cpu
from tests.methods import METHODS, make_dflash
from tests.targets import PROMPTS, fresh_target, make_target

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")


class CountWaits(TorchDispatchMode):
    """Counts operations whose result the host must see; `tolist` of several values is one transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class CountTransfers(TorchFunctionMode):
    """Notes transfers that are no operations. Replaced methods of `Tensor` would leave their traces in its type."""

    def __init__(self, waits: CountWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, seen = kwargs or {}, self.waits.seen
        if func in (Tensor.tolist, Tensor.numpy):
            before = list(seen)
            value = func(*args, **kwargs)
            seen[:] = [*before, func.__name__]  # without the operations of which the transfer consists
            return value
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            seen.append(f"upload by {func.__name__}")  # a copy that is waited for; `from_host` does not
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            key = args[1]
            if isinstance(key, list) or (isinstance(key, tuple) and any(isinstance(part, list) for part in key)):
                seen.append("upload of a list of indices")
        return func(*args, **kwargs)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Per round, the operations and transfers that would wait."""
    rounds: list[list[str]] = []
    play = loop.SpeculativeDecoding.round

    def counted(self: Any) -> None:
        with CountWaits() as mode, CountTransfers(mode):
            play(self)
        rounds.append(mode.seen)

    monkeypatch.setattr(loop.SpeculativeDecoding, "round", counted)
    # A look at host memory is no transfer, so there is none.
    monkeypatch.setitem(devices.RULES, "cpu", lambda device: Abilities(groups_heads=True))
    return lambda: rounds


def assert_one_transfer_each(rounds: list[list[str]]) -> None:
    """A round may be read while the next one is under way, so that it is the sum that counts."""
    assert sum(map(len, rounds)) <= len(rounds), rounds
    assert all(len(seen) <= 2 for seen in rounds), rounds


@pytest.fixture
def target() -> PreTrainedModel:
    return make_target("qwen3-mixed", "sdpa")


ON_DEVICE = ["dflash", "ddtree", "medusa", "eagle3"]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("method", "compile_mode"),
    [
        *((method, "none") for method in ON_DEVICE),
        # Without captured drafts SpecBlock's trees grow in host memory, where there is one.
        *((method, "reduce-overhead") for method in [*ON_DEVICE, "specblock"]),
    ],
)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch", PROMPTS)
def test_a_round_transfers_once_from_the_device(
    target: PreTrainedModel,
    method: str,
    batch: str,
    do_sample: bool,
    compile_mode: str,
    waits: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if compile_mode != "none":
        capture_on_cpu(monkeypatch)
    drafter = METHODS[method](target)
    if isinstance(drafter, torch.nn.Module):
        drafter.to(torch.float64)
    drafter.set_options(compile_mode=compile_mode)
    target.generate(**PROMPTS[batch](), max_new_tokens=10, do_sample=False, assistant_model=drafter)  # makes constants
    waits().clear()
    target.generate(**PROMPTS[batch](), max_new_tokens=10, do_sample=do_sample, assistant_model=drafter)
    assert len(waits()) > 3
    assert_one_transfer_each(waits())


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("method", "compile_mode"),
    [
        *((method, "none") for method in ON_DEVICE),
        *((method, "reduce-overhead") for method in [*ON_DEVICE, "medusa_static", "specblock"]),
    ],
)
def test_rounds_transfer_once_too_when_rows_are_dropped(
    method: str, compile_mode: str, waits: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if compile_mode != "none":
        capture_on_cpu(monkeypatch)
    target = make_target("llama", "sdpa")
    settings = settings_of(target)
    drafter = drafter_of(method, target, compile_mode=compile_mode)
    batches: list[int] = []
    verify = TargetModel.verify

    def watched(self: TargetModel, tree: Any, *arguments: Any, **options: Any) -> Any:
        batches.append(len(tree.token_ids))
        return verify(self, tree, *arguments, **options)

    monkeypatch.setattr(TargetModel, "verify", watched)
    for _ in range(2):  # the first call makes constants
        waits().clear()
        target.generate(**five_prompts(), **settings, assistant_model=drafter)
    assert min(batches) < 5
    assert_one_transfer_each(waits())


def test_the_counter_counts(waits: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("llama", "sdpa")
    drafter = make_dflash(target, method="dflash")
    forward = drafter.forward

    def peeking(*args: Any, **kwargs: Any) -> Tensor:
        logits = forward(*args, **kwargs)
        assert not bool(logits.isnan().any())
        assert float(logits[0, 0, 0]) is not None
        logits[0, 0].nonzero()
        logits[0, 0].tolist()
        logits[[0]]
        return logits

    monkeypatch.setattr(drafter, "forward", peeking)
    target.generate(**PROMPTS["batch of one"](), max_new_tokens=4, do_sample=False, assistant_model=drafter)
    assert all(len(seen) >= 5 for seen in waits())


def test_rounds_do_not_slow_down_with_the_number_of_nodes_in_python(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many tensor operations for 60 nodes as for 6: no loop over nodes in verify, accept or commit.
    counts = []
    for budget in (6, 60):
        drafter = make_dflash(target, method="ddtree", tree_budget=budget)
        operations = 0

        class CountAll(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal operations
                operations += 1
                return func(*args, **(kwargs or {}))

        with CountAll(), torch.no_grad():
            target.generate(**PROMPTS["batch of one"](), max_new_tokens=8, do_sample=False, assistant_model=drafter)
        counts.append(operations / drafter.stats.num_target_forwards)
    assert counts[1] < 1.1 * counts[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU the operations are counted instead")
@pytest.mark.parametrize("method", ON_DEVICE)
def test_only_the_read_of_the_verdict_waits_for_the_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = fresh_target("qwen3-mixed", "sdpa", torch.bfloat16).to("cuda")
    drafter = METHODS[method](target).to("cuda", torch.bfloat16)
    prompts = {name: part.to("cuda") for name, part in PROMPTS["ragged batch of three"]().items()}
    settings = {"max_new_tokens": 10, "do_sample": False, "assistant_model": drafter}
    target.generate(**prompts, **settings)
    play, read = loop.SpeculativeDecoding.round, ToHost.tolist

    def strict(self: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            play(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def reading(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(*args)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(loop.SpeculativeDecoding, "round", strict)
    monkeypatch.setattr(ToHost, "tolist", reading)
    target.generate(**prompts, **settings)
