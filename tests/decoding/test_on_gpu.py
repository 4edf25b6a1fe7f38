"""What only a GPU can show of the parts that are tested by stand-ins elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdec.decoding.speed.cuda_graphs import CudaGraph
from hf_specdec.decoding.targets.attention import tree_attention_forward
from hf_specdec.decoding.targets.masks import additive
from tests.method_table import METHODS
from tests.targets import PROMPTS, fresh_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = {"max_new_tokens": 48, "do_sample": False}


@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed"])
def test_captured_rounds_give_the_tokens_of_plain_decoding(family: str, method: str, batch: str) -> None:
    target = fresh_target(family, "sdpa", torch.float64).to("cuda")
    prompts = {name: part.to("cuda") for name, part in PROMPTS[batch]().items()}
    drafter: Any = METHODS[method](target)
    if hasattr(drafter, "to"):
        drafter.to("cuda", torch.float64)
    alone = target.generate(**prompts, **GREEDY)
    # The host reads rounds late: a text that ends unforeseen has one round too many.
    unforeseen = GREEDY | {"eos_token_id": alone[:, prompts["input_ids"].shape[1] + 19].tolist()}
    for settings in (GREEDY, unforeseen):
        alone = target.generate(**prompts, **settings)
        for mode in ("none", "reduce-overhead", "reduce-overhead"):
            drafter.set_options(compile_mode=mode)
            assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist(), mode


@pytest.mark.filterwarnings("ignore:.* rounds fell back to plain decoding")
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 1}], ids=str)
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("method", METHODS)
def test_drafts_with_nan_logits_change_no_token(method: str, batch: str, sampling: dict[str, Any]) -> None:
    target = fresh_target("llama", "sdpa", torch.float64).to("cuda")
    prompts = {name: part.to("cuda") for name, part in PROMPTS[batch]().items()}
    drafter: Any = METHODS[method](target)
    if hasattr(drafter, "to"):
        drafter.to("cuda", torch.float64)
    settings = {**prompts, **GREEDY, **sampling}
    alone = target.generate(**settings)
    target.generate(**settings, assistant_model=drafter)  # pairs are tried once, on whatever tokens
    unseen = sorted(set(range(64)) - set(alone.flatten().tolist()))
    target.get_input_embeddings().weight.data[unseen[::4]] = torch.nan
    for mode in ("none", "reduce-overhead", "reduce-overhead"):
        drafter.set_options(compile_mode=mode)
        assert target.generate(**settings, assistant_model=drafter).tolist() == alone.tolist(), mode


def test_a_capture_that_fails_leaves_stream_and_random_numbers_as_they_were() -> None:
    values, stream = torch.rand(3, device="cuda"), torch.cuda.current_stream()
    torch.manual_seed(0)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(0)
    with pytest.raises(RuntimeError):
        CudaGraph(lambda: (values + values.sum().item(),))
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_graphs_that_share_a_pool_keep_their_outputs() -> None:
    inputs = [torch.empty(size, device="cuda", dtype=torch.int64) for size in (1 << 20, 1 << 10, 1 << 20)]
    made: list[CudaGraph] = []
    for each in inputs:
        # The temporary tensors of a later graph lie where those of an earlier one lay.
        made.append(CudaGraph(lambda each=each: ((each * 2).cumsum(0) + each,), made[0].pool if made else None))
    assert len({graph.pool for graph in made}) == 1
    for number, each in enumerate(inputs):
        each.fill_(number + 1)
    for graph in made:
        graph.replay()
    for graph, each in zip(made, inputs, strict=True):
        assert torch.equal(graph.outputs[0], (each * 2).cumsum(0) + each)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_folded_heads_copy_no_keys_and_are_as_near_to_float64_as_transformers_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, length, 128) for heads, length in ((32, 65), (8, 4160), (8, 4160)))
    seen = torch.rand(1, 65, 4160) < 0.9
    layer = torch.nn.Module()
    layer.num_key_value_groups = 4
    cuda, exact = ([part.to("cuda", kind) for part in (query, key, value)] for kind in (dtype, torch.float64))
    masks = [additive(seen.cuda(), kind) for kind in (dtype, torch.float64)]
    expected, _ = sdpa_attention_forward(layer, *exact, masks[1])
    errors = []
    for attention in (sdpa_attention_forward, tree_attention_forward):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found, _ = attention(layer, *cuda, masks[0])
        peak = torch.cuda.max_memory_allocated() - before
        errors.append(float((found.double() - expected).abs().max()))
    assert errors[1] <= 2 * errors[0]
    assert peak < cuda[1].nbytes  # of the second, which copies neither keys nor values


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["none", "reduce-overhead"])
def test_a_target_need_not_be_on_the_current_device(mode: str) -> None:
    target = fresh_target("llama", "sdpa", torch.float32).to("cuda:1")
    prompts = {name: part.to("cuda:1") for name, part in PROMPTS["ragged batch of three"]().items()}
    drafter: Any = METHODS["ddtree"](target).to("cuda:1")
    drafter.set_options(compile_mode=mode)
    alone = target.generate(**prompts, **GREEDY)
    for _ in range(2):
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
