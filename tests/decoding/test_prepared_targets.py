"""Targets that callers have prepared: quantised by some library or class, offloaded, in another precision per part.

Plain `generate` of the same target decides the right tokens. Weights alone are quantised here, so that they are exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_specdec.decoding.targets.modules import apply_head, home_of, runs_in_inference_mode, table_rows
from tests.method_table import METHODS
from tests.targets import PROMPTS, fresh_target

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
SHARING = [  # methods that run the target's embeddings, head or layers outside of its forward
    "ddtree", "dflash2", "dspark", "eagle3", "medusa", "peagle", "specblock", "specbound", "specbranch",
]  # fmt: skip


class Int8Linear(nn.Module):
    """A linear layer whose weight is a buffer of 8-bit integers, with one scale per row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (weight / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        if rows.dtype != self.scale.dtype:
            raise RuntimeError(f"expected {self.scale.dtype}, got {rows.dtype}")
        return nn.functional.linear(rows, self.weight.to(rows.dtype) * self.scale, self.bias)


class Int8Embedding(nn.Module):
    """A table of 8-bit integers, without a weight that a drafter could read."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        weight = table.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("rows", (weight / self.scale).round().to(torch.int8))

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.rows[token_ids].to(self.scale.dtype) * self.scale[token_ids]


def int8(model: PreTrainedModel) -> PreTrainedModel:
    """All linear layers, head included, and the embeddings."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
    model.set_input_embeddings(Int8Embedding(model.get_input_embeddings()))
    return model


def offloaded(model: PreTrainedModel, folder: Path | None) -> PreTrainedModel:
    accelerate = pytest.importorskip("accelerate")
    if folder is None:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return model


def target_and_drafter(method: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Any]:
    target = fresh_target("llama", "sdpa", dtype)
    drafter = METHODS[method](target)
    return target, drafter


def check(target: PreTrainedModel, drafter: Any, prompts: str = "ragged batch of three") -> None:
    given = PROMPTS[prompts]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about types and kernels
        alone = target.generate(**given, **GREEDY)
        assert target.generate(**given, **GREEDY, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_spec_steps


@pytest.mark.parametrize("method", SHARING)
def test_embeddings_head_and_layers_in_8_bits(method: str) -> None:
    target, drafter = target_and_drafter(method)
    check(int8(target), drafter)


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("method", SHARING)
def test_offloaded_targets(method: str, place: str, tmp_path: Path) -> None:
    target, drafter = target_and_drafter(method)
    check(offloaded(target, None if place == "memory" else tmp_path), drafter)


@pytest.mark.parametrize("method", ["ddtree", "specbound"])
@pytest.mark.parametrize("how", ["offloaded", "8 bits"])
def test_a_drafter_with_its_own_vocabulary_shares_the_head(method: str, how: str) -> None:
    target = fresh_target("llama", "sdpa", torch.float32)
    vocab = target.get_input_embeddings().num_embeddings
    if method == "ddtree":
        drafter = METHODS[method](target, dflash_config={"draft_vocab_size": vocab // 2})
    else:
        drafter = METHODS[method](target, draft_vocab_size=vocab // 2)
    drafter.set_vocabulary(torch.arange(0, vocab // 2 * 2, 2))
    check(offloaded(target, None) if how == "offloaded" else int8(target), drafter)


def torchao_int8(model: PreTrainedModel) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def quanto(bits: str) -> Callable[[PreTrainedModel], None]:
    def quantise(model: PreTrainedModel) -> None:
        library = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
        built = Path(library.__file__).parent / "library/extensions/cpp/build/pytorch_version.txt"
        if bits == "qint4" and not built.is_file():
            pytest.skip("quanto would compile its C++ extension for weights of 4 bits, which takes minutes")
        library.quantize(model, weights=getattr(library, bits))
        library.freeze(model)

    return quantise


def hqq(model: PreTrainedModel) -> None:
    library = pytest.importorskip("hqq.core.quantize", reason="hqq is not installed")
    config = library.BaseQuantizeConfig(nbits=4, group_size=16)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                made = library.HQQLinear(child, config, compute_dtype=child.weight.dtype, device="cpu")
                setattr(module, name, made)


def bitsandbytes(model: PreTrainedModel) -> None:
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                made = library.nn.Linear4bit(
                    child.in_features, child.out_features, bias=child.bias is not None,
                    compute_dtype=child.weight.dtype, quant_type="nf4",
                )  # fmt: skip
                made.load_state_dict(child.state_dict())
                setattr(module, name, made.to("cpu"))


LIBRARIES: dict[str, Callable[[PreTrainedModel], None]] = {
    "torchao int8": torchao_int8,
    "quanto int8": quanto("qint8"),
    "quanto int4": quanto("qint4"),
    "hqq 4 bits": hqq,
    "bitsandbytes 4 bits": bitsandbytes,
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("method", [*SHARING, "causal_lm_tree", "ngram"])
def test_weights_quantised_by_a_library(method: str, library: str) -> None:
    target, drafter = target_and_drafter(method)
    LIBRARIES[library](target)
    check(target, drafter, "batch of one")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_quantised_draft_model(library: str) -> None:
    target, drafter = target_and_drafter("causal_lm_tree")
    LIBRARIES[library](drafter.model)
    check(target, drafter, "batch of one")


class NeedsGradTracking(Tensor):
    """A weight that cannot be used in inference mode."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and torch.is_inference_mode_enabled():
            raise RuntimeError("Cannot set version_counter for inference tensor")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_fail_in_inference_mode(method: str) -> None:
    target, drafter = target_and_drafter(method)
    for layer in target.model.layers:
        weight = layer.mlp.down_proj.weight.detach().as_subclass(NeedsGradTracking)
        layer.mlp.down_proj._parameters["weight"] = weight  # `Parameter` would want a subclass that dispatches
    assert not runs_in_inference_mode(target)
    check(target, drafter)


class SlicesInLinear(TorchFunctionMode):
    """Notes the inputs of linear layers whose outer stride does not fit: torch then copies the weight for each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.num_products = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            rows = args[0]
            self.num_products += 1
            is_slice = rows.dim() == 3 and rows.stride(0) != rows.shape[1] * rows.stride(1)
            if is_slice and len(rows) == 1 and rows.shape[1] > 1:
                self.found.add((tuple(rows.shape), rows.stride()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_no_linear_layer_is_given_a_slice_for_which_it_copies_its_weight(method: str) -> None:
    target, drafter = target_and_drafter(method)
    with SlicesInLinear() as seen:
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    assert seen.num_products > 100
    assert not seen.found


def test_a_head_gets_states_in_the_dtype_that_it_takes() -> None:
    states = torch.randn(2, 3, 8)
    head = nn.Linear(8, 16).to(torch.bfloat16)
    assert apply_head(head, states).dtype == torch.float32
    assert apply_head(head, states).shape == (2, 3, 16)
    packed = Int8Linear(nn.Linear(8, 16)).to(torch.bfloat16)  # only running it shows that it takes bfloat16
    torch.testing.assert_close(apply_head(packed, states), packed(states.bfloat16()).float())


def test_an_offloaded_module_is_at_home_where_it_runs() -> None:
    accelerate = pytest.importorskip("accelerate")
    layer = nn.Linear(4, 4)
    accelerate.cpu_offload(layer, execution_device=torch.device("cpu"))
    assert layer.weight.is_meta
    assert home_of(layer) == torch.device("cpu")


@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the .input_ids.:UserWarning")  # of older versions
def test_scaled_embeddings_that_are_offloaded_are_refused_before_the_first_token() -> None:
    target = fresh_target("gemma3", "sdpa", torch.float32)
    drafter = METHODS["eagle3"](target)
    table = target.get_input_embeddings()
    ids = torch.tensor([[3, 4]])
    torch.testing.assert_close(table_rows(table, ids), nn.functional.embedding(ids, table.weight))
    offloaded(target, None)
    with pytest.raises(ValueError, match="may scale them, and the table itself is offloaded or quantised"):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)


@pytest.mark.parametrize("method", ["ngram", "ddtree", "specbound", "causal_lm_chain"])
def test_checkpointing_in_training_mode_is_refused_with_both_ways_out(method: str) -> None:
    target, drafter = target_and_drafter(method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        target.gradient_checkpointing_enable()
    check(target.eval(), drafter)  # without effect there
    target.train()
    with pytest.raises(ValueError, match=r"model\.eval\(\), or model\.gradient_checkpointing_disable\(\)"):
        target.generate(**PROMPTS["batch of one"](), **GREEDY, assistant_model=drafter)
    target.eval()
