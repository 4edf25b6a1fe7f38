from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdec.decoding import devices
from hf_specdec.decoding.devices import Abilities
from hf_specdec.decoding.targets.attention import TREE_ATTENTION, tree_attention, tree_attention_forward, usable
from tests.method_table import METHODS
from tests.scripted import random_trees
from tests.targets import FAMILIES, PROMPTS, fresh_target, make_target

SHAPES = {  # batch, heads, kv_heads, nodes, nodes held before them, prefix, head_dim
    "two heads a group": (1, 4, 2, 5, 0, 300, 8),
    "rows of different lengths": (2, 4, 1, 7, 2, 513, 40),
    "nothing but a tree": (3, 6, 3, 3, 0, 0, 16),
}


def random_case(shape: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and mask."""
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
    return query, key, value, mask


@pytest.mark.parametrize("shape", SHAPES)
def test_grouped_heads_without_copies_equal_the_host_bitwise(shape: str) -> None:
    query, key, value, mask = random_case(shape, torch.float32)
    layer = nn.Module()
    layer.num_key_value_groups = query.shape[1] // key.shape[1]
    expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    found, _ = tree_attention_forward(layer, query, key, value, mask, scaling=0.3)
    assert torch.equal(found, expected)


@pytest.fixture
def folding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as on CUDA."""
    monkeypatch.setitem(devices.RULES, "cpu", lambda device: Abilities(host_memory=True, folds_heads=True))


@pytest.mark.usefixtures("folding")
@pytest.mark.parametrize("shape", SHAPES)
def test_folded_heads_equal_the_host_and_copy_no_keys(shape: str) -> None:
    query, key, value, mask = random_case(shape, torch.float64)
    layer = nn.Module()
    layer.num_key_value_groups = query.shape[1] // key.shape[1]
    repeated = mask.shape[0] * layer.num_key_value_groups * mask.shape[2] * (mask.shape[3] + 15)
    with Sizes() as sizes:
        expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    assert (sizes.largest > max(query.numel(), repeated)) == (shape == "two heads a group")
    for _ in range(2):  # the second layer of a forward
        with Sizes() as sizes:
            found, _ = tree_attention_forward(layer, query, key, value, mask, scaling=0.3)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert sizes.largest <= max(query.numel(), repeated)


class Sizes(TorchDispatchMode):
    """The number of elements of the largest tensor that was made, views excluded."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {part.untyped_storage().data_ptr() for part in tree_leaves(args) if isinstance(part, Tensor)}
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, Tensor) and part.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, part.numel())
        return result


@pytest.mark.usefixtures("folding")
@pytest.mark.parametrize("batch", PROMPTS)
@pytest.mark.parametrize("family", ["llama", "qwen3-mixed", "gemma3", "mistral-sliding"])
def test_rounds_with_folded_heads_give_the_targets_tokens(family: str, batch: str) -> None:
    target, prompts = make_target(family, "sdpa"), PROMPTS[batch]()
    assert usable(target)
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    alone = target.generate(**prompts, **settings)
    drafter = random_trees(alone)
    assert target.generate(**prompts, **settings, assistant_model=drafter).tolist() == alone.tolist()
    assert drafter.stats.num_target_forwards < 16


@pytest.mark.usefixtures("folding")
@pytest.mark.parametrize("method", ["ddtree", "eagle3", "gemma4_assistant"])
def test_drafters_with_folded_heads_draft_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = make_target("llama", "sdpa"), PROMPTS["ragged batch of three"]()
    drafter: Any = METHODS[method](target).to(torch.float64)
    outputs = []
    for folds in (True, False):
        monkeypatch.setitem(devices.RULES, "cpu", lambda device, folds=folds: Abilities(True, folds_heads=folds))
        output = target.generate(**prompts, max_new_tokens=12, do_sample=False, assistant_model=drafter)
        outputs.append((output.tolist(), drafter.stats.per_step_accepted))
        drafter.forget()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_rule_of_use_is_sdpa_without_soft_caps_and_sinks(family: str) -> None:
    for kind in FAMILIES[family][2]:
        # The older three have no grouped heads, whose copies are what there is to save.
        expected = kind == "sdpa" and family not in ("gpt2", "gpt-neox", "opt")
        assert usable(make_target(family, kind)) == expected


def test_implementation_is_restored_after_an_error() -> None:
    target = fresh_target("llama", "sdpa")

    def fails() -> None:
        with tree_attention(target.config.get_text_config(decoder=True)):
            assert target.config._attn_implementation == TREE_ATTENTION
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        fails()
    assert target.config._attn_implementation == "sdpa"
