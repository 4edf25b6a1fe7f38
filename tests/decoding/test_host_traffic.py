"""How often a round makes the host wait for a device, and that no round mixes devices: on the stand-in for GPUs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specdec.decoding import loop
from hf_specdec.decoding.cache import TreeCache
from hf_specdec.decoding.devices import ToHost
from hf_specdec.decoding.speed import cuda_graphs
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.targets import entries
from tests import stand_in
from tests.decoding.test_cuda_graphs import Replaying
from tests.decoding.test_finished_rows import drafter_of, settings_of
from tests.decoding.test_finished_rows import prompts as five_prompts
from tests.method_table import METHODS, make_dflash
from tests.targets import PROMPTS, fresh_target, make_target

NEW = 8
# Most waits in a round of methods whose drafts need the host, the read of the verdict included. Look-ahead reads what
# the target says to its guesses, a merger and SSD the trees of networks, SpecBranch the class that H-RAD predicts,
# gated LoRA whether the last accepted nodes had masks. A draft model's tree grows by as many nodes as the host chooses.
READS = {"lookahead": 2, "causal_lm_tree": 5, "merged": 2, "merged_three": 10, "specbound": 20, "specbranch": 2,
         "causal_lm_ssd": 5, "eagle3_ssd": 2, "gated_lora": 2}  # fmt: skip
# Most waits of the thread in which they draft: SpecBranch reads each forward, SSD the tree of each of four outcomes.
BESIDE = {"specbranch": 8, "causal_lm_ssd": 16, "eagle3_ssd": 4}
SHARING = ("mtp", "specbound")  # run layers of the target, on its device
EARLY = ["dflash", "ddtree", "medusa", "eagle3", "specblock"]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[stand_in.Host]]:
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Replaying)
    with stand_in.devices() as found:
        yield found


@pytest.fixture
def beside() -> list[list[str]]:
    """Per round, what the host waited for in other threads."""
    return []


@pytest.fixture
def rounds(host: type[stand_in.Host], beside: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Per round, what the host waited for in the round's own thread."""
    seen: list[list[str]] = []
    play = loop.SpeculativeDecoding.round

    def counted(self: Any) -> None:
        host.waits.clear()
        host.beside.clear()
        play(self)
        seen.append(list(host.waits))
        beside.append(list(host.beside))

    monkeypatch.setattr(loop.SpeculativeDecoding, "round", counted)
    return seen


def on_device(prompts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.to("cuda:0") for name, part in prompts.items()}


def placed(method: str, target: PreTrainedModel, device: str = "cuda:0") -> Any:
    """A drafter on a device, for a target that is moved to the first one."""
    drafter = METHODS[method](target)
    stand_in.place(target, "cuda:0")
    return stand_in.place(drafter, device)


def assert_few_waits(rounds: list[list[str]], most: int = 1) -> None:
    """A round may be read while the next one is under way, so that it is the sum that counts."""
    later = rounds[1:]  # the first round runs the prompt through a draft model
    late = not rounds[0]  # then the last round reads two
    assert sum(map(len, later)) <= most * (len(later) + late), rounds
    assert all(len(seen) <= most + 1 for seen in later), rounds


@pytest.mark.parametrize("place", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_round_waits_once_and_mixes_no_devices(
    method: str, batch: str, place: str, rounds: list[list[str]], beside: list[list[str]]
) -> None:
    target = fresh_target("llama", "sdpa")
    alone = target.generate(**PROMPTS[batch](), max_new_tokens=NEW, do_sample=False)
    drafter = placed(method, target, "cuda:0" if method in SHARING else place)
    prompts = on_device(PROMPTS[batch]())
    for do_sample in (False, True):
        rounds.clear()
        beside.clear()
        text = target.generate(**prompts, max_new_tokens=NEW, do_sample=do_sample, assistant_model=drafter)
        assert do_sample or text.tolist() == alone.tolist()
        assert_few_waits(rounds, READS.get(method, 1))
        assert_few_waits(beside, BESIDE.get(method, 0))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", EARLY)
def test_a_captured_round_waits_once(method: str, batch: str, do_sample: bool, rounds: list[list[str]]) -> None:
    target = fresh_target("qwen3-mixed", "sdpa")
    alone = target.generate(**PROMPTS[batch](), max_new_tokens=NEW, do_sample=False)
    drafter = placed(method, target)
    drafter.set_options(compile_mode="reduce-overhead")
    for _ in range(2):  # the first call captures
        rounds.clear()
        text = target.generate(
            **on_device(PROMPTS[batch]()), max_new_tokens=NEW, do_sample=do_sample, assistant_model=drafter
        )
        assert do_sample or text.tolist() == alone.tolist()
    assert_few_waits(rounds)


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_auto_captures_shapes_that_come_again(method: str, host: type[stand_in.Host]) -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, max_new_tokens=12, do_sample=False)
    drafter = placed(method, target)
    drafter.set_options(compile_mode="auto")
    for new, captures in ((2, False), (12, True)):
        Replaying.made = 0
        text = target.generate(**on_device(prompts), max_new_tokens=new, do_sample=False, assistant_model=drafter)
        assert text.tolist() == alone[:, : text.shape[1]].tolist()
        assert (Replaying.made > 0) == captures


def test_auto_compiles_nothing_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *given, **options: pytest.fail("compiled"))
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = make_dflash(target, method="dflash")
    drafter.set_options(compile_mode="auto")
    alone = target.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    text = target.generate(**prompts, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
    assert text.tolist() == alone.tolist()


@pytest.mark.parametrize("method", ["ddtree", "eagle3"])
def test_a_captured_call_may_follow_one_in_another_stream(method: str, host: type[stand_in.Host]) -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    drafter, prompts = placed(method, target), on_device(prompts)
    drafter.set_options(compile_mode="reduce-overhead")
    streams = [torch.cuda.Stream("cuda:0") for _ in range(2)]
    for stream in streams:  # they wait for the weights and the prompt, and not for each other
        stream.wait_stream(torch.cuda.current_stream("cuda:0"))
    for stream in streams:
        with torch.cuda.stream(stream):
            text = target.generate(**prompts, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
            assert text.tolist() == alone.tolist()
        host.seen.clear()  # as if the host had read nothing at the end of the call


@pytest.mark.slow
@pytest.mark.by_the_clock
@pytest.mark.parametrize("method", ["ddtree", "eagle3"])
def test_captured_rounds_with_automatic_budgets_are_read_when_the_next_one_is_launched(
    method: str, rounds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, max_new_tokens=40, do_sample=False)
    drafter = placed(method, target)
    drafter.set_options(compile_mode="reduce-overhead", tree_budget="auto")
    seen: list[str] = []
    tolist, verify = ToHost.tolist, TargetModel.verify
    monkeypatch.setattr(ToHost, "tolist", lambda self: seen.append("read") or tolist(self))
    monkeypatch.setattr(
        TargetModel, "verify", lambda self, *given, **options: seen.append("verify") or verify(self, *given, **options)
    )
    text = target.generate(**on_device(prompts), max_new_tokens=40, do_sample=False, assistant_model=drafter)
    assert text.tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens > 0
    first = seen.index("verify")
    assert seen[first : first + 3] == ["verify", "verify", "read"], seen
    assert_few_waits([[wait for wait in each if "event" in wait] for each in rounds], most=2)


@pytest.mark.parametrize("compile_mode", ["none", "reduce-overhead"])
@pytest.mark.parametrize("method", [*EARLY, "medusa_static"])
def test_rounds_wait_once_too_when_rows_are_dropped(
    method: str, compile_mode: str, rounds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fresh_target("llama", "sdpa")
    settings = settings_of(target)
    drafter = stand_in.place(drafter_of(method, target, compile_mode=compile_mode), "cuda:0")
    stand_in.place(target, "cuda:0")
    batches: list[int] = []
    verify = TargetModel.verify

    def watched(self: TargetModel, tree: Any, *arguments: Any, **options: Any) -> Any:
        batches.append(len(tree.token_ids))
        return verify(self, tree, *arguments, **options)

    monkeypatch.setattr(TargetModel, "verify", watched)
    for _ in range(2):  # the first call makes constants
        rounds.clear()
        target.generate(**on_device(five_prompts()), **settings, assistant_model=drafter)
    assert min(batches) < 5
    assert_few_waits(rounds)


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"min_new_tokens": 5, "eos_token_id": list(range(0, 64, 3))},
    {"min_length": 14, "repetition_penalty": 0.6, "eos_token_id": list(range(0, 64, 3))},
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "reduce-overhead"])
@pytest.mark.parametrize("settings", PENALTIES, ids=str)
@pytest.mark.parametrize("batch", PROMPTS)
def test_known_processors_that_read_the_text_run_on_the_device_for_all_nodes(
    batch: str, settings: dict[str, Any], mode: str, rounds: list[list[str]]
) -> None:
    target = fresh_target("llama", "sdpa")
    settings = {"max_new_tokens": 16, "do_sample": False} | settings
    alone = target.generate(**PROMPTS[batch](), **settings)
    model = METHODS["causal_lm_chain"](target)  # right often
    for drafter in (placed("ddtree", target), stand_in.place(model, "cuda:0")):
        drafter.set_options(compile_mode=mode)
        for _ in range(2):  # the first call captures
            rounds.clear()
            text = target.generate(**on_device(PROMPTS[batch]()), **settings, assistant_model=drafter)
            assert text.tolist() == alone.tolist()
        assert drafter.stats.num_draft_tokens > 0
        assert_few_waits(rounds, 1 if drafter is not model else 2)
    settings |= {"do_sample": True, "top_k": 1}
    assert (
        target.generate(**on_device(PROMPTS[batch]()), **settings, assistant_model=drafter).tolist() == alone.tolist()
    )


def test_a_streamer_gets_its_tokens_from_the_host(rounds: list[list[str]]) -> None:
    class Heard(BaseStreamer):
        tokens: ClassVar[list[int]] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            pass

    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = placed("ddtree", target)
    settings = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": drafter}
    text = target.generate(**on_device(prompts), **settings, streamer=Heard())
    assert text[0].tolist() == Heard.tokens
    assert_few_waits(rounds)


def test_buffers_of_rounds_are_filled_while_earlier_ones_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "SLAB_BYTES", 1)  # one buffer for each layer's keys, and one for its values
    cache = TreeCache(4)
    for layer in cache.layers:
        layer.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8))
    before = [weakref.ref(part) for layer in cache.layers for part in (layer.keys, layer.values)]
    alive: list[int] = []

    class CountBuffers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "zeros":
                alive.append(sum(part() is not None for part in before))
            return func(*args, **(kwargs or {}))

    with CountBuffers():
        cache.begin_rounds(64)
    assert alive == [8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("capacity", [100, 20_000])
def test_a_call_begins_with_room_for_few_tokens(capacity: int) -> None:
    target = TargetModel(make_target("llama", "sdpa"))
    with torch.no_grad():
        target.prefill_alone(torch.tensor([[3, 4, 5]]), max_length=capacity)
        target.begin_rounds(capacity)
    assert target.cache.capacity == min(capacity, 3 + 512)


@pytest.mark.parametrize("method", METHODS)
def test_a_target_that_is_spread_over_two_devices(method: str, host: type[stand_in.Host]) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    alone = target.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    drafter = stand_in.place(METHODS[method](target), "cuda:1")
    stand_in.place(target, "cuda:0")
    layers: Any = target.get_decoder().layers
    for number, layer in enumerate(layers):
        device = f"cuda:{number * stand_in.NUM_DEVICES // len(layers)}"
        hooks.add_hook_to_module(stand_in.place(layer, device), hooks.AlignDevicesHook(execution_device=device))
    for module in (target.get_decoder().norm, target.lm_head):
        hooks.add_hook_to_module(stand_in.place(module, "cuda:1"), hooks.AlignDevicesHook(execution_device="cuda:1"))
    hooks.add_hook_to_module(target, hooks.AlignDevicesHook(execution_device="cuda:0", io_same_device=True))
    text = target.generate(**on_device(prompts), max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
    assert text.tolist() == alone.tolist()
    assert drafter.stats.num_draft_tokens > 0


def spoilt(spoil: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[PreTrainedModel, Any]:
    """A pair on a device whose drafter does something to its outputs."""
    target = fresh_target("llama", "sdpa")
    drafter = placed("dflash", target)
    forward = drafter.forward

    def spoiling(*args: Any, **kwargs: Any) -> Tensor:
        outputs = forward(*args, **kwargs)
        spoil(outputs)
        return outputs

    monkeypatch.setattr(drafter, "forward", spoiling)
    return target, drafter


def test_a_planted_mix_of_devices_fails(host: type[stand_in.Host], monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = spoilt(lambda outputs: outputs + torch.ones(outputs.shape[-1]), monkeypatch)
    prompts = on_device(PROMPTS["batch of one"]())
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        target.generate(**prompts, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)


@pytest.mark.parametrize(
    "wait",
    [
        lambda outputs: outputs[0, 0, 0].item(),
        lambda outputs: outputs[0, 0].tolist(),
        lambda outputs: outputs.cpu(),
        lambda outputs: bool(outputs.isnan().any()),
        lambda outputs: outputs[outputs > 0],
        lambda outputs: outputs[0].nonzero(),
        lambda outputs: outputs[[0]],
        lambda outputs: torch.multinomial(outputs[0].softmax(-1), 1),
        lambda outputs: torch.tensor([1.0], device=outputs.device),
        lambda outputs: torch.cuda.synchronize(),
    ],
    ids=["item", "tolist", "cpu", "bool", "mask", "nonzero", "list", "multinomial", "upload", "synchronize"],
)
def test_a_planted_wait_fails(
    wait: Callable[[Tensor], Any], rounds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = spoilt(wait, monkeypatch)
    prompts = on_device(PROMPTS["batch of one"]())
    target.generate(**prompts, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
    with pytest.raises(AssertionError):
        assert_few_waits(rounds)


def test_a_planted_event_on_another_device_fails(host: type[stand_in.Host], monkeypatch: pytest.MonkeyPatch) -> None:
    target = fresh_target("llama", "sdpa")
    alone = target.generate(**PROMPTS["batch of one"](), max_new_tokens=NEW, do_sample=False)
    drafter, prompts = placed("dflash", target), on_device(PROMPTS["batch of one"]())
    settings = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": drafter}
    assert target.generate(**prompts, **settings).tolist() == alone.tolist()
    record = stand_in.Event.record
    monkeypatch.setattr(
        stand_in.Event, "record", lambda self, stream: record(self, stand_in.Cuda.current_stream("cuda:1"))
    )
    text = None
    with contextlib.suppress(RuntimeError):  # what the host reads of a verdict that has not arrived may be impossible
        text = target.generate(**prompts, **settings).tolist()
    assert text != alone.tolist()


def test_a_copy_from_another_device_than_the_current_one_arrives_before_it_is_read(
    host: type[stand_in.Host],
) -> None:
    for device in ("cuda:0", "cuda:1"):
        copy = ToHost(torch.arange(3).to(device))
        assert copy.tolist() == [0, 1, 2]


def test_a_planted_use_in_a_stream_that_has_not_waited_fails(
    host: type[stand_in.Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    def beside(outputs: Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream(outputs.device)):
            outputs.sum()

    target, drafter = spoilt(beside, monkeypatch)
    prompts = on_device(PROMPTS["batch of one"]())
    with pytest.raises(RuntimeError, match="used in a stream that has not waited"):
        target.generate(**prompts, max_new_tokens=NEW, do_sample=False, assistant_model=drafter)


def test_rounds_do_not_slow_down_with_the_number_of_nodes_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As many tensor operations for 60 nodes as for 6: no loop over nodes in verify, accept or commit.
    counts, target = [], make_target("qwen3-mixed", "sdpa")
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
@pytest.mark.parametrize("method", EARLY)
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
