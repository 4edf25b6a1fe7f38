from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdec.decoding import attention
from hf_specdec.decoding.attention import (
    Spans,
    kernel_serves,
    merged_attention,
    tree_attention,
    tree_attention_forward,
    usable,
)
from hf_specdec.decoding.target import TargetModel
from hf_specdec.decoding.tiles import Tile, fitting_tile, shared_bytes, tile_bytes
from tests.scripted import random_trees, right_for
from tests.targets import FAMILIES, PROMPTS, fresh_target, make_target

GREEDY = {"max_new_tokens": 16, "do_sample": False}
SHAPES = {  # batch, heads, kv_heads, nodes, nodes held before them, prefix, head_dim
    "grouped heads": (1, 4, 2, 5, 0, 300, 8),
    "rows of different lengths": (2, 4, 1, 7, 2, 513, 40),
    "nothing but a tree": (3, 6, 3, 3, 0, 0, 16),
}


def random_case(shape: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Spans]:
    """Query, key, value, the whole mask, and the intervals that say the same of the prefix."""
    torch.manual_seed(0)
    batch, heads, kv_heads, nodes, held, prefix, head_dim = SHAPES[shape]
    entries = prefix + held + nodes
    query = torch.randn(batch, nodes, heads, head_dim, dtype=dtype).transpose(1, 2)
    buffers = torch.randn(2, batch, entries + 9, kv_heads, head_dim, dtype=dtype)
    key, value = (buffer.transpose(1, 2)[:, :, :entries] for buffer in buffers)
    tree = torch.rand(batch, nodes, held + nodes) < 0.5
    tree[:, :, held:] |= torch.eye(nodes, dtype=torch.bool)
    stop = torch.randint(0, prefix + 1, (batch,), dtype=torch.int32)
    first = torch.randint(0, prefix // 2 + 1, (batch, nodes), dtype=torch.int32)
    place = torch.arange(prefix)
    seen = torch.cat([(place >= first.unsqueeze(-1)) & (place < stop[:, None, None]), tree], -1)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1)
    return query, key, value, mask, Spans(first, stop, held + nodes)


@pytest.mark.parametrize("shape", SHAPES)
def test_merged_parts_equal_attention_over_everything(shape: str) -> None:
    query, key, value, mask, spans = random_case(shape, torch.float64)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    found = merged_attention(query, key, value, mask, spans, 0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_grouped_heads_without_copies_give_the_hosts_bits(shape: str) -> None:
    query, key, value, mask, _ = random_case(shape, torch.float32)
    layer = nn.Module()
    layer.num_key_value_groups = query.shape[1] // key.shape[1]
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    found, _ = tree_attention_forward(layer, query, key, value, mask, scaling=0.3)
    assert torch.equal(found, expected)


def test_spans_travel_with_the_mask_and_are_lost_with_it() -> None:
    query, key, value, mask, spans = random_case("rows of different lengths", torch.float64)
    layer = nn.Module()
    alone, _ = tree_attention_forward(layer, query, key, value, mask, scaling=0.3)
    wrong = Spans(spans.first, spans.stop * 0, spans.nodes)
    followed, _ = tree_attention_forward(layer, query, key, value, attention.attach(mask, wrong), scaling=0.3)
    assert not torch.allclose(followed, alone)
    changed, _ = tree_attention_forward(layer, query, key, value, mask.clone(), scaling=0.3)
    assert torch.equal(changed, alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_rule_of_use_is_sdpa_without_soft_caps_and_sinks(family: str) -> None:
    for kind in FAMILIES[family][2]:
        # The older two have no grouped heads, whose copies are what there is to save.
        expected = kind == "sdpa" and family not in ("gpt2", "gpt-neox")
        assert usable(make_target(family, kind)) == expected


@pytest.mark.each_value
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", [name for name, (_, _, kinds) in FAMILIES.items() if "sdpa" in kinds])
def test_prefix_without_a_mask_changes_no_token(family: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS[batch]()
    if not usable(target):
        pytest.skip("this family keeps the host's attention")
    calls = 0

    def counting(*arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return merged_attention(*arguments)

    original = TargetModel.__init__

    def splitting(self: TargetModel, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.splits_prefix = True

    monkeypatch.setattr(TargetModel, "__init__", splitting)
    monkeypatch.setattr(attention, "merged_attention", counting)
    alone = target.generate(**prompts, **GREEDY)
    for drafter in (right_for([3, 0, 5, 1, 2], alone), random_trees(alone)):
        calls = 0
        assert target.generate(**prompts, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
        assert calls >= target.config.num_hidden_layers * drafter.stats.num_target_forwards


def test_gaps_in_the_mask_are_left_to_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    prompts["attention_mask"][0, 4] = 0
    model = TargetModel(target)
    model.splits_prefix = True
    config = target.generation_config
    config.max_length = 40
    model.prefill(prompts["input_ids"], config, {"attention_mask": prompts["attention_mask"], "use_cache": True})
    assert model.prompt_starts is None


def test_implementation_is_put_back_after_an_error() -> None:
    target = fresh_target("llama", "sdpa")

    def fails() -> None:
        with tree_attention(target.config.get_text_config(decoder=True)):
            assert target.config._attn_implementation == attention.TREE_ATTENTION
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        fails()
    assert target.config._attn_implementation == "sdpa"


SHARED_BYTES = {"H200": 232448, "sm_86": 101376, "unknown": 65536}


@pytest.mark.parametrize("available", SHARED_BYTES.values(), ids=SHARED_BYTES)
@pytest.mark.parametrize("itemsize", [2, 4], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_a_tile_is_the_largest_that_the_device_has_room_for(head_dim: int, itemsize: int, available: int) -> None:
    tile = fitting_tile(124, head_dim, itemsize, available)
    assert tile is not None
    assert tile_bytes(tile, head_dim, itemsize) <= available
    larger = tile._replace(stages=tile.stages + 1)
    assert tile.stages == 3 or tile_bytes(larger, head_dim, itemsize) > available
    assert fitting_tile(5, head_dim, itemsize, available) == fitting_tile(16, head_dim, itemsize, available)


def test_heads_of_256_fit_where_three_stages_of_them_do_not() -> None:
    assert tile_bytes(Tile(64, 64, 3), 256, 2) > SHARED_BYTES["H200"]
    assert fitting_tile(124, 256, 2, SHARED_BYTES["H200"]) == Tile(64, 64, 2)
    assert fitting_tile(124, 128, 2, SHARED_BYTES["H200"]) == Tile(64, 64, 3)
    assert fitting_tile(124, 1024, 4, SHARED_BYTES["sm_86"]) is None


def test_tiles_of_float32_are_small_enough_to_be_compiled_in_seconds() -> None:
    for head_dim in (64, 128, 256):
        tile = fitting_tile(124, head_dim, 4, SHARED_BYTES["H200"])
        assert tile is not None
        assert (tile.queries, tile.keys) == (16, 32)


@pytest.mark.parametrize("known", [{"shared_memory_per_block_optin": 232448}, {}], ids=["told", "not told"])
def test_a_device_is_asked_for_its_room_once(known: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def properties(device: torch.device) -> Any:
        asked.append(device)
        return SimpleNamespace(major=9, **known)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    shared_bytes.cache_clear()
    for _ in range(2):
        assert shared_bytes(torch.device("cuda:1")) == known.get("shared_memory_per_block_optin", 65536)
    assert asked == [torch.device("cuda:1")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=7))
    assert shared_bytes(torch.device("cuda:2")) == 0
    shared_bytes.cache_clear()


def test_kernel_serves_heads_of_one_size_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_triton", lambda: True)
    monkeypatch.setattr("hf_specdec.decoding.tiles.shared_bytes", lambda device: SHARED_BYTES["sm_86"])

    def serves(head_dim: int, value_dim: int, dtype: torch.dtype, device: str = "cuda") -> bool:
        with FakeTensorMode():
            query = torch.empty(1, 8, 31, head_dim, dtype=dtype, device=device)
            key, value = (torch.empty(1, 2, 90, dim, dtype=dtype, device=device) for dim in (head_dim, value_dim))
            return kernel_serves(query, key, value)

    assert serves(128, 128, torch.bfloat16)
    assert not serves(192, 128, torch.bfloat16)  # as in DeepSeek-V3
    assert not serves(1024, 1024, torch.float32)
    assert not serves(128, 128, torch.float64)
    assert not serves(128, 128, torch.bfloat16, "cpu")


def test_merged_parts_take_values_of_another_size_than_keys() -> None:
    query, key, value, mask, spans = random_case("rows of different lengths", torch.float64)
    value = value[..., :24]
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    found = merged_attention(query, key, value, mask, spans, 0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-12, atol=1e-13)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"
)

INTERPRETED = """
import torch
from hf_specdec.decoding.attention_kernel import merged_attention_kernel
from tests.decoding.test_attention import SHAPES, merged_attention, random_case
for shape in SHAPES:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
        query, key, value, mask, spans = random_case(shape, dtype)
        exact = merged_attention(*(part.double() for part in (query, key, value, mask)), spans, 0.3)
        found = merged_attention_kernel(query, key, value, mask, spans, 0.3)
        assert found.dtype == dtype
        error = (found.double() - exact).abs().max().item()
        assert error < tolerance, (shape, dtype, error)
"""


@needs_triton
def test_kernel_equals_the_formula_in_tritons_interpreter() -> None:
    # The interpreter is chosen when Triton is imported, so it runs in a process of its own.
    ran = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def compile_for_9(kernel: Any, constants: dict[str, Any], stages: int = 3) -> Any:
    """A kernel for compute capability 9.0, from bfloat16."""
    import triton  # type: ignore[import-not-found, unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]
    from triton.compiler import ASTSource  # type: ignore[import-not-found, unused-ignore]

    pointers = dict.fromkeys(("query", "key", "value", "mask", "out"), "*bf16")
    pointers |= dict.fromkeys(("first", "stop"), "*i32") | dict.fromkeys(("partial", "sums"), "*fp32")
    types = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32"} | pointers
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    # As at a launch: rows of keys and values begin at multiples of 16, which is what lets them come in stages.
    aligned = [name for name in types if name in pointers or name.startswith(("query_", "key_", "value_"))]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in signature}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": stages})


@needs_triton
def test_merge_compiles_for_a_gpu_of_compute_capability_9() -> None:
    from hf_specdec.decoding import attention_kernel

    compiled = compile_for_9(attention_kernel._merge, {"head_dim": 128, "dim": 128, "max_splits": 8})
    assert "cubin" in compiled.asm


@needs_triton
@pytest.mark.parametrize(("head_dim", "gpu"), [(128, "H200"), (256, "H200"), (256, "sm_86")])
def test_the_chosen_tile_takes_no_more_memory_than_counted(head_dim: int, gpu: str) -> None:
    from hf_specdec.decoding import attention_kernel

    tile = fitting_tile(124, head_dim, 2, SHARED_BYTES[gpu])
    assert tile is not None
    constants = {"groups": 4, "head_dim": head_dim, "dim": head_dim, "split_size": 256}
    constants |= {"block_queries": tile.queries, "block_keys": tile.keys}
    compiled = compile_for_9(attention_kernel._attend_split, constants, tile.stages)
    assert compiled.metadata.shared <= tile_bytes(tile, head_dim, 2)


@needs_triton
def test_kernels_are_not_compiled_anew_for_each_round() -> None:
    from hf_specdec.decoding import attention_kernel

    split: Any = attention_kernel._attend_split
    merge: Any = attention_kernel._merge
    for kernel, names in (
        (split, {"mask_batch", "mask_node", "nodes", "tree_nodes", "prefix"}),
        (merge, {"nodes", "num_splits"}),
    ):
        assert {part.name for part in kernel.params if part.do_not_specialize} == names
