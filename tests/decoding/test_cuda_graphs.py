"""Static rounds and captured forwards, with a stand-in for CUDA graphs: a graph that calls its forward again."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_specdec.decoding import devices, loop
from hf_specdec.decoding.devices import Abilities, ToHost
from hf_specdec.decoding.exchange import DraftContext
from hf_specdec.decoding.policies import AutoBudget, BudgetKnowledge
from hf_specdec.decoding.speed import cuda_graphs
from hf_specdec.decoding.speed.cuda_graphs import CudaGraph
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.trace import Trace
from hf_specdec.decoding.tree import DraftTree
from hf_specdec.decoding.upstream import CACHE
from hf_specdec.methods.causal_lm.network import CausalLMDrafter
from hf_specdec.methods.dflash.drafting import DFlashMarginals
from hf_specdec.methods.dflash.network import DFlashDrafter
from hf_specdec.verification import verify_lossless
from tests.decoding.test_finished_rows import prompts as five_prompts
from tests.decoding.test_finished_rows import settings_of
from tests.decoding.test_outputs import assert_same_cache
from tests.method_table import METHODS, STEADY, make_dflash
from tests.scripted import random_trees, right_for
from tests.targets import FAMILIES, PROMPTS, fresh_target, make_target
from tests.watched import unseen

EARLY = ["dflash", "ddtree", "eagle3", "medusa", "medusa_static", "specblock"]  # draft before the outcome is read
GREEDY = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}


class Reads(TorchDispatchMode):
    """Where the tensors lie that a forward reads or writes and has not made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []  # kept, so that no later tensor is put where one of them lay
        self.outside: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage().data_ptr() for tensor in self.made}
        fresh = func.overloadpacket is torch.ops.aten.lift_fresh  # a number that becomes a tensor
        for tensor in (part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor) and not fresh):
            if tensor.untyped_storage().data_ptr() not in known:
                self.outside.setdefault(tensor.untyped_storage().data_ptr(), f"{func}, {list(tensor.shape)}")
        result = func(*args, **(kwargs or {}))
        self.made += [
            part
            for part in tree_leaves(result)
            if isinstance(part, Tensor) and part.untyped_storage().data_ptr() not in self.outside
        ]
        return result


def persistent_storages(workspace: cuda_graphs.Workspace) -> set[int]:
    """Data pointers of storages that outlive a call: all that a captured forward may read but did not make."""
    inputs = [part for captured in workspace._captured.values() for part in captured.inputs]
    slabs = [slab for free in workspace._slabs.values() for slab in free]
    return {part.untyped_storage().data_ptr() for part in (*inputs, *slabs, *workspace._taken)} | workspace._weights


class Replaying:
    """Writes what its forward gives into the same outputs, as a CUDA graph does.

    A graph goes on reading where its tensors lay when it was captured: they must outlast the call that captured it.
    """

    made = 0
    replays = 0
    alive: ClassVar[weakref.WeakSet[Replaying]] = weakref.WeakSet()

    def __init__(self, forward: cuda_graphs.Forward, pool: Any = None) -> None:
        assert pool is None or any(graph.pool is pool for graph in Replaying.alive), "a pool ends with its last graph"
        Replaying.made += 1
        Replaying.alive.add(self)
        self.forward, self.pool = forward, pool or object()
        with Reads() as reads:
            forward()
        lasting: set[int] = set()
        for workspace in cuda_graphs._WORKSPACES.values():
            lasting |= persistent_storages(workspace)
        lost = {where: use for where, use in reads.outside.items() if where not in lasting}
        assert not lost, f"a graph would read tensors that end with the call: {list(lost.values())}"
        outputs = forward()
        with torch.inference_mode(False):  # as those of `CudaGraph`
            self.outputs = tuple(map(torch.empty_like, outputs))

    def replay(self) -> None:
        Replaying.replays += 1
        for goal, new in zip(self.outputs, self.forward(), strict=True):
            assert goal.shape == new.shape
            goal.copy_(new)


def capture_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards on the CPU are captured too, by the stand-in."""
    monkeypatch.setitem(devices.RULES, "cpu", lambda device: Abilities(groups_heads=True))
    monkeypatch.setattr(cuda_graphs, "CudaGraph", Replaying)
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "_WORKSPACES", weakref.WeakKeyDictionary())
    monkeypatch.setattr(cuda_graphs, "_REFUSED", weakref.WeakSet())
    # On a CPU the same option would have torch compile the forward.
    monkeypatch.setattr("hf_specdec.decoding.target.compiled_forward", lambda: cuda_graphs.run)


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buckets, so that prefixes outgrow them."""
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "FIRST_PREFIX", 16)
    Replaying.made = Replaying.replays = 0


def compiling(drafter: Any) -> Any:
    drafter.set_options(compile_mode="reduce-overhead")
    return drafter


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if "moe" not in name and "mixtral" not in name])
def test_captured_rounds_give_the_targets_tokens_and_cache(family: str, batch: str) -> None:
    attention = FAMILIES[family][2][-1]
    dtype = torch.float32 if attention == "eager" and batch != "batch of one" else torch.float64
    target, prompts = make_target(family, attention, dtype), PROMPTS[batch]()
    if family == "gpt-oss":
        pytest.skip("its experts cannot be captured; see the test of obstacles")
    alone = target.generate(**prompts, **GREEDY)
    for drafter in (right_for([3, 0, 5, 1, 2], alone.sequences), random_trees(alone.sequences)):
        Replaying.replays = 0
        assisted = target.generate(**prompts, **GREEDY, assistant_model=compiling(drafter))
        assert assisted.sequences.tolist() == alone.sequences.tolist()
        assert Replaying.replays == drafter.stats.num_target_forwards
        if attention == "sdpa":  # the other has float32 in it
            assert_same_cache(assisted[CACHE], alone[CACHE])


@pytest.mark.parametrize("method", STEADY)
def test_every_method_drafts_the_same_from_captured_rounds(method: str) -> None:
    target, prompts = make_target("qwen3-mixed", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = METHODS[method](target)
    if isinstance(drafter, torch.nn.Module):
        drafter.to(torch.float64)
    alone = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    drafts = drafter.stats.per_step_accepted
    drafter.forget()
    assisted = target.generate(**prompts, **GREEDY, assistant_model=compiling(drafter))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert drafter.stats.per_step_accepted == drafts
    assert Replaying.replays > 0 or method == "specbound"  # its trees have passed the first layers already


def test_later_calls_reuse_what_earlier_ones_captured() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = compiling(right_for(2, alone.sequences))
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    made = Replaying.made
    assert made >= 2  # the prefix outgrew its first bucket
    first = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert Replaying.made == made
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    # The cache that was handed back is the caller's: no later call writes to it.
    assert_same_cache(first[CACHE], alone[CACHE])


@pytest.mark.parametrize("method", EARLY)
def test_what_a_call_in_inference_mode_captured_serves_calls_outside_of_it(method: str) -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = compiling(METHODS[method](target))
    with torch.inference_mode():
        target.generate(**prompts, **GREEDY, assistant_model=drafter)
    made = Replaying.made
    output = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert output.sequences.tolist() == alone.sequences.tolist()
    assert Replaying.made == made


def test_graphs_of_a_model_share_a_memory_pool() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter: Any = compiling(METHODS["ddtree"](target)).to(torch.float64)
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    pools = {
        model: [captured.graph.pool for captured in cuda_graphs._WORKSPACES[model]._captured.values() if captured.graph]
        for model in (target, drafter)
    }
    assert all(len(own) > 1 and len(set(own)) == 1 for own in pools.values())
    assert pools[target][0] is not pools[drafter][0]  # a drafter may run beside its target


@pytest.mark.usefixtures("whole_batch")  # smaller batches have graphs of their own
@pytest.mark.parametrize("method", ["causal_lm_tree", "causal_lm_chain"])
def test_a_draft_model_has_a_graph_per_level_and_prefix_and_later_calls_make_none(method: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter: Any = compiling(METHODS[method](target, noise=0.02))
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert any(3 in row for row in drafter.stats.per_step_accepted)  # a leaf, which is run with the next root
    own = cuda_graphs._WORKSPACES[drafter.model]._captured
    # The root alone or behind one or two that rows lag, and two levels; 9 + 16 tokens take prefixes of 16 and 32.
    assert len(own) <= 2 * 5
    assert all(captured.graph is not None for captured in own.values())
    made = Replaying.made
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert Replaying.made == made


@pytest.mark.parametrize("batch", PROMPTS)
def test_a_captured_draft_model_draws_what_the_usual_one_draws(batch: str) -> None:
    target, prompts = make_target("qwen3-mixed", "sdpa"), PROMPTS[batch]()
    drafter: Any = METHODS["causal_lm_chain"](target)
    outputs = []
    for mode in ("none", "reduce-overhead"):
        drafter.set_options(compile_mode=mode)
        torch.manual_seed(5)
        sampled = target.generate(**prompts, **(GREEDY | {"do_sample": True}), assistant_model=drafter)
        outputs.append((sampled.sequences.tolist(), drafter.stats.per_step_accepted))
    assert outputs[0] == outputs[1]


def test_draft_model_that_cannot_be_captured_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    experts = CausalLMDrafter(fresh_target("qwen3-moe", "sdpa", num_hidden_layers=1), depth=3)
    alone = target.generate(**prompts, **GREEDY)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assisted = target.generate(**prompts, **GREEDY, assistant_model=compiling(experts))
            assert assisted.sequences.tolist() == alone.sequences.tolist()
    said = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert len(said) == 1
    assert "Qwen3Moe" in said[0]


def test_trees_of_one_bucket_share_a_graph() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **{**GREEDY, "max_new_tokens": 6})
    for num_right in (1, 2):  # trees of 1 + 3 * 2 and 1 + 3 * 3 nodes
        drafter = compiling(right_for(num_right, alone.sequences, siblings=1 if num_right == 2 else 2))
        target.generate(**prompts, **{**GREEDY, "max_new_tokens": 6}, assistant_model=drafter)
    assert Replaying.made == 1


@pytest.mark.parametrize("budget", [4, 8, 16, 32, 64])
def test_usual_budgets_are_captured_without_padding(budget: int) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = compiling(METHODS["ddtree"](target)).to(torch.float64)
    drafter.set_options(tree_budget=budget)
    widths = set()
    hook = target.register_forward_pre_hook(
        unseen(lambda module, args, kwargs: widths.add(kwargs["input_ids"].shape[1])), with_kwargs=True
    )
    with hook:
        target.generate(**prompts, **(GREEDY | {"max_new_tokens": 3}), assistant_model=drafter)
    assert widths == {prompts["input_ids"].shape[1], 1 + budget}
    assert budget in cuda_graphs.DRAFT_SIZES  # the table from which policies choose


@pytest.mark.slow
def test_shapes_that_were_not_used_for_long_leave_and_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_CAPTURED", 2)
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    drafters = [compiling(right_for(count, alone.sequences)) for count in (1, 5, 9)]
    for drafter in (*drafters, *drafters):
        assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
        assert assisted.sequences.tolist() == alone.sequences.tolist()
        gc.collect()
        assert len(Replaying.alive) <= 2
    assert Replaying.made > 4


def test_buffers_of_few_lengths_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_SLAB_SHAPES", 2)
    target, take, taken = fresh_target("llama", "sdpa"), cuda_graphs.Workspace.take, []

    def taking(*arguments: Any) -> Tensor:
        slab = take(*arguments)
        taken.append(weakref.ref(slab))
        return slab

    monkeypatch.setattr(cuda_graphs.Workspace, "take", taking)
    for length in (4, 40, 80, 160):
        ids = torch.full((1, length), 5)
        settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
        alone = target.generate(ids, **settings)
        assert target.generate(ids, **settings, assistant_model=compiling(right_for(2, alone))).equal(alone)
    gc.collect()
    kept = {slab.shape for ref in taken if (slab := ref()) is not None}
    assert len(kept) == 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),  # of the driver, when a graph is made ready
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["allocator", "driver", "cublas"],
)
def test_rounds_are_captured_again_after_a_lack_of_memory(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, prompts, lacking = fresh_target("llama", "sdpa"), PROMPTS["batch of one"](), [error]

    def make_graph(forward: cuda_graphs.Forward, pool: Any) -> Replaying:
        if lacking:
            raise lacking.pop()
        return Replaying(forward, pool)

    alone = target.generate(**prompts, **GREEDY)
    monkeypatch.setattr(cuda_graphs, "CudaGraph", make_graph)
    drafter = compiling(right_for(3, alone.sequences))
    with caplog.at_level(logging.WARNING):
        assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert "no memory to capture" in caplog.text
    assert Replaying.replays < drafter.stats.num_target_forwards
    Replaying.replays = 0
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert Replaying.replays == drafter.stats.num_target_forwards


def test_rows_leave_a_captured_batch() -> None:
    target = make_target("llama", "sdpa")
    settings = settings_of(target)
    alone = target.generate(**five_prompts(), **settings)
    drafter = compiling(METHODS["ddtree"](target))
    for _ in range(2):
        assisted = target.generate(**five_prompts(), **settings, assistant_model=drafter)
        assert assisted.sequences.tolist() == alone.sequences.tolist()
        assert_same_cache(assisted[CACHE], alone[CACHE])


def test_text_longer_than_the_buffers_grows_them() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    settings = {**GREEDY, "max_new_tokens": 100}
    alone = target.generate(**prompts, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_specdec.decoding.target.capacity_for", lambda entries: 24)
        assisted = target.generate(**prompts, **settings, assistant_model=compiling(right_for(3, alone.sequences)))
    assert assisted.sequences.tolist() == alone.sequences.tolist()


def test_forward_that_cannot_be_captured_runs_on_the_same_buffers_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(forward: cuda_graphs.Forward, pool: Any) -> cuda_graphs.CudaGraph:
        raise RuntimeError("operation not permitted when stream is capturing")

    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    outputs: list[list[Tensor]] = []
    for make in (Replaying, fails):
        monkeypatch.setattr(cuda_graphs, "CudaGraph", make)
        cuda_graphs._WORKSPACES.clear()
        seen: list[Tensor] = []
        original = TargetModel.verify

        def keep(self: Any, *arguments: Any, seen: list[Tensor] = seen, verify: Any = original, **options: Any) -> Any:
            output = verify(self, *arguments, **options)
            seen.append(output.logits.clone())
            return output

        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(TargetModel, "verify", keep)
            drafter = compiling(METHODS["ddtree"](target))
            for _ in range(2):
                target.generate(**prompts, **GREEDY, assistant_model=drafter)
        outputs.append(seen)
    for one, other in zip(*outputs, strict=True):  # up to how the BLAS of a CPU treats other alignments
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    said = [record.getMessage() for record in caplog.records if "cannot be captured" in record.getMessage()]
    assert len(said) == 2
    assert any("LlamaForCausalLM" in message for message in said)
    assert any("DFlashDrafter" in message for message in said)
    assert all("stream is capturing" in message for message in said)


def logits_of(drafter: DFlashDrafter, target: Any, prompts: Any, **settings: Any) -> tuple[list[Tensor], Any]:
    """The marginals of every round of a call, and its output."""
    seen: list[Tensor] = []
    original = DFlashMarginals.marginals

    def keep(self: DFlashMarginals, context: DraftContext) -> Tensor:
        logits = original(self, context)
        seen.append(logits.clone())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashMarginals, "marginals", keep)
        output = target.generate(**prompts, **(GREEDY | settings), assistant_model=drafter)
    return seen, output.sequences


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "windows": SLIDING,
    "causal, as JetSpec": {"dflash_config": {"causal_head": True}},
    "anchor, own head": {"dflash_config": {"sample_from_anchor": True, "own_head": True, "own_embeddings": True}},
    "soft cap, window in both directions": {
        "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 3,
        "is_causal": False,
    },
}


@pytest.mark.usefixtures("whole_batch")  # an early tree has the rows of the round before
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_blocks_have_the_logits_of_the_eager_forward(variant: str, batch: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    drafter = make_dflash(target, **VARIANTS[variant]).to(torch.float64)
    with torch.no_grad():  # drafts that are kept now and then, so that rounds commit different numbers of tokens
        drafter.layers[0].mlp.down_proj.weight.mul_(0.1)
    usual, alone = logits_of(drafter, target, prompts)
    for _ in range(2):
        captured, output = logits_of(compiling(drafter), target, prompts)
        assert output.tolist() == alone.tolist()
        assert len(captured) == len(usual) + 1  # drafted before the last outcome was read
        for one, other in zip(captured, usual, strict=False):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("whole_batch")  # an early tree has the rows of the round before
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", [*EARLY, "causal_lm_tree", "causal_lm_chain"])
def test_captured_drafts_equal_those_of_the_eager_forward(method: str, batch: str) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    drafter: Any = METHODS[method](target).to(torch.float64)
    make = type(drafter).candidate_generator

    active: list[list[bool]] = []

    def trees() -> list[list[Any]]:
        seen: list[list[Any]] = []

        def watched(self: Any, bound: TargetModel) -> Any:
            generator = make(self, bound)
            draft = generator.draft

            def noting(context: DraftContext) -> Any:
                tree = draft(context)
                seen.append([tree.token_ids.tolist(), tree.parents.tolist()])
                active.append(context.active)
                return tree

            generator.draft = noting
            return generator

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(drafter), "candidate_generator", watched)
            target.generate(**prompts, **GREEDY, assistant_model=drafter)
        return seen

    usual = trees()
    rows = [[row for row, going in enumerate(round_) if going] for round_ in active]

    def of_active(found: list[list[Any]]) -> list[Any]:
        # A tree that was drafted before the last outcome was read is one more, and nobody asks for it.
        return [[[part[row] for row in kept] for part in tree] for tree, kept in zip(found, rows, strict=False)]

    compiling(drafter)
    assert of_active(trees()) == of_active(usual)
    replays = Replaying.replays
    assert of_active(trees()) == of_active(usual)  # from what the first call captured
    rounds = drafter.stats.num_target_forwards
    per_round = {"dflash": 2, "ddtree": 3, "eagle3": 4, "medusa": 3, "medusa_static": 2, "specblock": 3}
    per_round |= {"causal_lm_tree": 4, "causal_lm_chain": 4}  # verify, the root, and two levels
    assert Replaying.replays - replays >= per_round[method] * rounds - 1  # the prompt is taken in as it comes


@pytest.mark.usefixtures("whole_batch")  # rows that are about to leave the batch are read at once
def test_round_is_three_launches_after_the_prompt() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter = compiling(METHODS["ddtree"](target)).to(torch.float64)
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    rounds = drafter.stats.num_target_forwards
    # Blocks, trees, verify; the first block comes with the prompt, and after the last round one is drafted in vain.
    assert Replaying.replays == 3 * rounds - 1 + 2


@pytest.mark.usefixtures("whole_batch")  # rows that are about to leave the batch are read at once
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", EARLY)
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_next_tree_is_drafted_before_the_verdict_is_read(
    method: str, batch: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    drafter: Any = compiling(METHODS[method](target)).to(torch.float64)
    events: list[str] = []
    tolist, draft = ToHost.tolist, loop.SpeculativeDecoding.draft
    monkeypatch.setattr(ToHost, "tolist", lambda self: events.append("read") or tolist(self))
    monkeypatch.setattr(
        loop.SpeculativeDecoding, "draft", lambda self, *arguments: events.append("draft") or draft(self, *arguments)
    )
    torch.manual_seed(0)
    target.generate(**prompts, **(GREEDY | {"do_sample": do_sample}), assistant_model=drafter)
    rounds = drafter.stats.num_target_forwards
    assert events == ["read", "draft"] + ["draft", "read"] * rounds  # the prefill, the first draft, then the rounds


@pytest.mark.usefixtures("whole_batch")  # an early tree has the rows of the round before
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", EARLY)
def test_early_trees_equal_those_drafted_after_the_read(method: str, batch: str) -> None:
    # Drafts that are kept now and then: the target's own tokens, planted in some of the trees.
    target, prompts = make_target("llama", "sdpa"), PROMPTS[batch]()
    drafter: Any = compiling(METHODS[method](target)).to(torch.float64)
    alone = target.generate(**prompts, **GREEDY).sequences
    make = type(drafter).candidate_generator

    def trees() -> tuple[list[list[Any]], list[list[int]]]:
        seen: list[list[Any]] = []

        def planting(self: Any, bound: TargetModel) -> Any:
            generator = make(self, bound)
            draft = generator.draft

            def planted(context: DraftContext) -> Any:
                tree = draft(context)
                seen.append([part.clone() for part in (tree.token_ids, tree.parents, tree.valid)])
                # What follows the root in the text; rows that have ended draft on, for nobody.
                places = (context.root_positions + (prompts["attention_mask"] == 0).sum(1) + 1).unsqueeze(1)
                right = alone.gather(1, places.clamp(max=alone.shape[1] - 1))
                below = (tree.depths == 1) & (len(seen) % 3 > 0)
                token_ids = tree.token_ids.where(~below | (tree.token_ids == right), right)
                return DraftTree.from_parents(token_ids, tree.parents, tree.max_depth, valid=tree.valid)

            generator.draft = planted
            return generator

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(drafter), "candidate_generator", planting)
            output = target.generate(**prompts, **GREEDY, assistant_model=drafter).sequences
        assert output.tolist() == alone.tolist()
        assert drafter.stats.num_accepted_draft_tokens > 0
        return seen, drafter.stats.per_step_accepted

    early, accepted = trees()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.SpeculativeDecoding, "lag", lambda self: 0)
        waiting, same = trees()
    assert accepted == same
    assert len(early) == len(waiting) + 1
    for one, other in zip(early, waiting, strict=False):
        for part, expected in zip(one, other, strict=True):
            assert part.tolist() == expected.tolist()


def test_generators_that_need_the_verdict_do_not_draft_early() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    lag, lags = loop.SpeculativeDecoding.lag, []
    for extra in ({"output_scores": True}, {"no_repeat_ngram_size": 2}, {"trace": True}):
        drafter: Any = compiling(METHODS["ddtree"](target)).to(torch.float64)
        if "trace" in extra:
            drafter.trace, extra = Trace(), {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.SpeculativeDecoding, "lag", lambda self, lag=lag: lags.append(lag(self)) or lags[-1])
            alone = target.generate(**prompts, **GREEDY, **extra)
            assisted = target.generate(**prompts, **GREEDY, **extra, assistant_model=drafter)
        assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert set(lags) == {0}


@pytest.mark.parametrize("waits", [True, False])
def test_drafts_after_skipped_rounds_equal_those_of_the_eager_forward(waits: bool) -> None:
    class Resting(AutoBudget):
        """Rests for longer than what a captured block is wide for."""

        def note(self, *arguments: Any) -> None:
            self.rounds = getattr(self, "rounds", 0) + 1
            self.knowledge.sizes_to_try = []
            self.knowledge.pauses.drafting = self.rounds % 12 in (0, 1, 3)

        def best_size(self, gains: list[float], sizes: Sequence[int]) -> int:
            return sizes[-1]  # no round was timed

    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter: Any = METHODS["ddtree"](target).to(torch.float64)
    found: list[dict[tuple[int, int], list[int]]] = []
    draft = type(drafter.candidate_generator(TargetModel(target))).draft

    def noting(self: Any, context: DraftContext) -> DraftTree:
        tree = draft(self, context)
        for row, position in enumerate(context.root_positions.tolist()):
            found[-1].setdefault((row, position), tree.token_ids[row, tree.valid[row]].tolist()[:6])
        return tree

    Resting.waits = waits  # otherwise the host has not read what the joined rounds committed
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(drafter.candidate_generator(TargetModel(target))), "draft", noting)
        for rests in (False, True):
            if rests:
                compiling(drafter)
                patch.setattr(
                    type(drafter), "drafting_policy", lambda self, of, batch, stats: Resting(BudgetKnowledge(), stats)
                )
            found.append({})
            texts.append(target.generate(**prompts, max_new_tokens=40, do_sample=False, assistant_model=drafter))
    assert texts[0].tolist() == texts[1].tolist()
    always, resting = found
    both = always.keys() & resting.keys()
    assert len(both) >= 6
    assert {where: always[where] for where in both} == {where: resting[where] for where in both}


def test_weights_that_have_moved_are_captured_anew() -> None:
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = compiling(METHODS["ddtree"](target)).to(torch.float64)
    settings = {**GREEDY, "max_new_tokens": 8}
    target.generate(**prompts, **settings, assistant_model=drafter)
    made = Replaying.made
    target.get_output_embeddings().weight.data = -target.get_output_embeddings().weight  # the drafter's head as well
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=drafter)
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert Replaying.made == 2 * made


CHANGES: dict[str, Callable[[Any], object]] = {
    "adapter disabled": lambda adapted: adapted.base_model.disable_adapter_layers(),
    "another adapter": lambda adapted: adapted.set_adapter("other"),
    "adapter merged in place": lambda adapted: adapted.merge_adapter(),
    "adapter scaled": lambda adapted: [
        part.scale_layer(3.0) for part in adapted.modules() if hasattr(part, "scale_layer")
    ],
    "hook": lambda adapted: adapted.get_decoder().norm.register_forward_hook(lambda module, args, out: -out),
    "hook before": lambda adapted: adapted.lm_head.register_forward_pre_hook(lambda module, args: (-args[0],)),
    "training": lambda adapted: adapted.train(),
    "attention": lambda adapted: adapted.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_forward_depends_on_besides_weights_is_captured_anew(change: str) -> None:
    peft = pytest.importorskip("peft")
    target, prompts = fresh_target("llama", "sdpa"), PROMPTS["batch of one"]()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(target, config).eval()
    adapted.add_adapter("other", config)
    script = target.generate(**prompts, **GREEDY).sequences
    drafter = compiling(make_dflash(target)).to(torch.float64)  # which taps two layers
    settings = {**GREEDY, "max_new_tokens": 6}

    def made_by_two_calls() -> list[int]:
        made = []
        for _ in range(2):
            before = Replaying.made
            target.generate(**prompts, **settings, assistant_model=compiling(right_for(2, script)))
            target.generate(**prompts, **settings, assistant_model=drafter)
            made.append(Replaying.made - before)
        return made

    assert made_by_two_calls()[1] == 0
    CHANGES[change](adapted)
    first, second = made_by_two_calls()
    assert first > 0
    assert second == 0
    alone = target.generate(**prompts, **settings).sequences
    assert target.generate(**prompts, **settings, assistant_model=drafter).sequences.tolist() == alone.tolist()


def test_buffers_of_a_call_that_failed_serve_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    drafter = compiling(METHODS["ddtree"](target)).to(torch.float64)
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    made = Replaying.made

    class Broken(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.generate(
            **prompts, **GREEDY, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([Broken()])
        )
    target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert Replaying.made == made


def test_rounds_after_an_interrupt_are_captured_although_its_traceback_is_kept() -> None:
    """A notebook keeps the latest traceback, and with it the state of the call."""
    target, prompts = make_target("llama", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY).sequences

    class Broken(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if input_ids.shape[1] < prompts["input_ids"].shape[1] + 3:
                return torch.zeros(len(input_ids), dtype=torch.bool)
            raise KeyboardInterrupt

    drafter = compiling(right_for(2, alone))
    with pytest.raises(KeyboardInterrupt) as kept:
        target.generate(
            **prompts, **GREEDY, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([Broken()])
        )
    before = Replaying.replays
    target.generate(**prompts, **GREEDY, assistant_model=compiling(right_for(2, alone)))
    assert Replaying.replays > before
    assert kept.tb is not None


def test_obstacles_known_in_advance_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    target, prompts = fresh_target("qwen3-moe", "sdpa"), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            drafter = compiling(right_for(2, alone.sequences))
            assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
            assert assisted.sequences.tolist() == alone.sequences.tolist()
    said = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert len(said) == 1
    assert "experts" in said[0]
    assert Replaying.made == 0


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_length_are_not_captured(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target, prompts = fresh_target("llama", "sdpa", rope_parameters=rope), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    with caplog.at_level(logging.WARNING):
        assisted = target.generate(**prompts, **GREEDY, assistant_model=compiling(right_for(2, alone.sequences)))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert Replaying.made == 0
    assert f"rope_type='{kind}'" in caplog.text


def test_rotary_embeddings_are_checked_for_each_type_of_layer() -> None:
    target, cpu = fresh_target("gemma3", "sdpa"), torch.device("cpu")
    assert cuda_graphs.obstacle(target, cpu) is None
    target.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"
    assert "rope_type='dynamic'" in str(cuda_graphs.obstacle(target, cpu))


def test_calls_under_autocast_are_not_captured() -> None:
    target, prompts = make_target("llama", "sdpa", torch.float32), PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    drafter = compiling(METHODS["ddtree"](target))
    for enabled in (True, False, True):
        Replaying.replays = 0
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            target.generate(**prompts, **GREEDY, assistant_model=drafter)
        assert (Replaying.replays > 0) is not enabled
    assisted = target.generate(**prompts, **GREEDY, assistant_model=drafter)
    assert assisted.sequences.tolist() == alone.sequences.tolist()


class FakeCuda:
    """What `CudaGraph` asks of `torch.cuda`: streams by name, random numbers, a capture that may fail where it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
        self.current, self.fails, self.state = "default", fails, "drawing"
        self.captures: list[dict[str, Any]] = []
        for name, stand_in in {
            "Stream": lambda device: FakeStream(f"captures on {device}"),
            "current_stream": lambda: FakeStream(self.current),
            "current_device": lambda: 1,
            "default_generators": (None, self),
            "stream": self.stream,
            "graph": self.graph,
            "CUDAGraph": lambda: self,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, **options: Any) -> Iterator[None]:
        self.captures.append(options)
        self.current, self.state = options["stream"].name, "capturing"
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current, self.state = "default", "drawing"

    def pool(self) -> str:
        return "pool of the graph"

    def clone_state(self) -> str:
        return self.state

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        assert other.name != self.name


@pytest.mark.parametrize("fails", [False, True])
def test_capture_uses_its_own_stream_and_restores_the_current_one(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_graphs.capture_stream.cache_clear()
    cuda = FakeCuda(monkeypatch, fails=fails)
    seen: list[str] = []

    made: list[Tensor] = []

    def forward() -> tuple[Tensor, ...]:
        seen.append(cuda.current)
        made.append(torch.tensor([len(seen)]))
        return (made[-1],)

    with pytest.raises(RuntimeError, match="during capture") if fails else nullcontext():
        graph = CudaGraph(forward, pool="shared")
        assert graph.outputs[0].tolist() == [3]
        assert graph.outputs[0].data_ptr() != made[-1].data_ptr()  # which lies in the pool
        assert graph.pool == "pool of the graph"
    cuda_graphs.capture_stream.cache_clear()
    assert seen == ["captures on 1"] * 3
    assert cuda.captures[0]["pool"] == "shared"
    assert cuda.captures[0]["capture_error_mode"] == "thread_local"  # other threads draft and learn meanwhile
    assert (cuda.current, cuda.state) == ("default", "drawing")


def test_threads_capture_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the stream of captures, on which the warm-up of one would become a part of the other's graph."""
    cuda_graphs.capture_stream.cache_clear()
    FakeCuda(monkeypatch, fails=False)
    inside, met = threading.Semaphore(1), []

    def forward() -> tuple[Tensor, ...]:
        met.append(not inside.acquire(timeout=0))
        time.sleep(0.01)  # for the other thread to arrive
        inside.release()
        return ()

    threads = [threading.Thread(target=CudaGraph, args=(forward,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cuda_graphs.capture_stream.cache_clear()
    assert met == [False] * 6


def test_second_call_at_the_same_time_is_not_captured() -> None:
    target = make_target("llama", "sdpa")
    workspace = cuda_graphs.workspace_of(target, torch.device("cpu"), "reduce-overhead")
    assert workspace is not None
    owner = TargetModel(target)
    assert workspace.claim(owner, target)
    prompts = PROMPTS["batch of one"]()
    alone = target.generate(**prompts, **GREEDY)
    assisted = target.generate(**prompts, **GREEDY, assistant_model=compiling(right_for(2, alone.sequences)))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert Replaying.replays == 0
    del owner
    target.generate(**prompts, **GREEDY, assistant_model=compiling(right_for(2, alone.sequences)))
    assert Replaying.replays > 0


def test_gaps_in_the_mask_keep_a_call_from_being_captured() -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    prompts["attention_mask"][0, 4] = 0
    alone = target.generate(**prompts, **GREEDY)
    assisted = target.generate(**prompts, **GREEDY, assistant_model=compiling(right_for(2, alone.sequences)))
    assert assisted.sequences.tolist() == alone.sequences.tolist()
    assert Replaying.replays == 0


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"compile_mode='fast' must be one of \['none', 'auto', 'reduce-overhead'\]"):
        METHODS["ddtree"](make_target("llama")).set_options(compile_mode="fast")


def test_compiled_forward_gives_the_targets_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # Traced as for kernels, without making any.
    compiled = torch.compile(cuda_graphs.run, dynamic=True, backend="eager")
    monkeypatch.setattr("hf_specdec.decoding.target.compiled_forward", lambda: compiled)
    monkeypatch.setattr(cuda_graphs, "can_capture", lambda device: False)
    target, prompts = fresh_target("llama", "sdpa", num_hidden_layers=2), PROMPTS["batch of one"]()
    settings = {**GREEDY, "max_new_tokens": 5}
    alone = target.generate(**prompts, **settings)
    assisted = target.generate(**prompts, **settings, assistant_model=compiling(right_for([1, 0], alone.sequences)))
    assert assisted.sequences.tolist() == alone.sequences.tolist()


@pytest.mark.parametrize("method", ["ddtree", "specblock"])
def test_self_test_of_a_pair_checks_the_rounds_of_captured_drafts(method: str) -> None:
    target = make_target("llama", "sdpa")
    drafter: Any = compiling(METHODS[method](target)).to(torch.float64)
    report = verify_lossless(target, drafter, [PROMPTS["batch of one"]()["input_ids"]], verbose=False)
    assert report.lossless, str(report)
    assert max(replay.rounding for replay in report.replays) < 1e-6
    assert report.left_out == ["logits of forwards with compile_mode='reduce-overhead': they are compared without it"]
