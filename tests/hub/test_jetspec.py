"""JetSpec: DFlash's layout with `causal_head`, which makes every layer causal inside the block.

What is drafted is compared with the equations written out over the stored tensors: no module of ours, no cache, no
mask. Source: JetSpec, arXiv 2606.18394; shared facts on formats of 2026, section 3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import inspect_drafter, load_drafter
from tests.hub.layouts import LAYERS, as_zlab, save
from tests.method_table import make_dflash
from tests.targets import make_target, one_prompt
from tests.watched import Watched

TAPS = [1, 5]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("llama", "sdpa", torch.float64, num_hidden_layers=LAYERS)


def save_jetspec(target: PreTrainedModel, folder: Path, **block: Any) -> dict[str, Any]:
    drafter = make_dflash(target, dflash_config={"target_layer_ids": TAPS}).to(torch.float64)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 1:  # norms start as ones, which hides whether they are used
            parameter.data += 0.5 * torch.randn_like(parameter)
        elif name.endswith(("v_proj.weight", "o_proj.weight")):
            parameter.data *= 4
    config, tensors = as_zlab(drafter, block_size=5, dflash_config={"target_layer_ids": TAPS, **block})
    save(folder, config, tensors)
    return config


def plain_logits(config: dict[str, Any], tensors: dict[str, Tensor], target: PreTrainedModel, ids: Tensor) -> Tensor:
    """[block - 1, vocab] logits of slots 1, 2, ... after `ids` [length], whose last token is the root.

    Slot i attends to the whole context and to slots 0 to i.
    """
    eps, head_dim = config["rms_norm_eps"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    block, length = config["block_size"], len(ids) - 1

    def norm(state: Tensor, name: str) -> Tensor:
        return tensors[f"{name}.weight"] * state / (state.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    def turned(vector: Tensor, position: int) -> Tensor:
        half = head_dim // 2
        angles = position * config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = vector[:half], vector[half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])

    states = target(ids[None, :-1], output_hidden_states=True).hidden_states
    tapped = torch.cat([states[layer + 1][0] for layer in TAPS], dim=-1)
    context = norm(tapped @ tensors["fc.weight"].T, "hidden_norm")
    embeddings = target.get_input_embeddings().weight
    mask_token = config["dflash_config"]["mask_token_id"]
    slots = embeddings[torch.tensor([int(ids[-1]), *[mask_token] * (block - 1)])]
    for layer in (f"layers.{index}" for index in range(config["num_hidden_layers"])):
        inputs = norm(slots, f"{layer}.input_layernorm")
        rows = torch.cat([context, inputs])
        attended = []
        for slot in range(block):
            outputs = []
            for head in range(heads):
                own, shared = (slice(n * head_dim, (n + 1) * head_dim) for n in (head, head * kv_heads // heads))
                projected = {
                    name: tensors[f"{layer}.self_attn.{name}_proj.weight"][part]
                    for name, part in (("q", own), ("k", shared), ("v", shared))
                }
                query = norm(inputs[slot] @ projected["q"].T, f"{layer}.self_attn.q_norm")
                query = turned(query, length + slot)
                scores, values = [], []
                for entry in range(length + slot + 1):  # the context, then slots 0 to `slot`
                    key = norm(rows[entry] @ projected["k"].T, f"{layer}.self_attn.k_norm")
                    scores.append(query @ turned(key, entry) / head_dim**0.5)
                    values.append(rows[entry] @ projected["v"].T)
                outputs.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            attended.append(torch.cat(outputs))
        slots = slots + torch.stack(attended) @ tensors[f"{layer}.self_attn.o_proj.weight"].T
        inner = norm(slots, f"{layer}.post_attention_layernorm")
        gate, up = (inner @ tensors[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        slots = slots + (torch.nn.functional.silu(gate) * up) @ tensors[f"{layer}.mlp.down_proj.weight"].T
    logits = norm(slots[1:], "norm") @ target.get_output_embeddings().weight.T
    logits[:, mask_token] = -torch.inf
    return logits


@torch.no_grad()
def test_blocks_are_those_of_the_plain_equations(target: PreTrainedModel, tmp_path: Path) -> None:
    config = save_jetspec(target, tmp_path, causal_head=True)
    assert not inspect_drafter(tmp_path).problems
    watched = Watched(load_drafter(tmp_path, target))
    settings = {"max_new_tokens": 8, "do_sample": False}
    output = target.generate(**one_prompt(), **settings, assistant_model=watched)
    assert output.tolist() == target.generate(**one_prompt(), **settings).tolist()
    assert len(watched.rounds) > 2
    tensors = load_file(tmp_path / "model.safetensors")
    for drafted in watched.rounds[:3]:
        expected = plain_logits(config, tensors, target, torch.tensor(drafted.text(0)))
        torch.testing.assert_close(drafted.logits[0], expected.float(), rtol=1e-4, atol=1e-4)


def test_causal_head_is_saved_where_it_was_read(target: PreTrainedModel, tmp_path: Path) -> None:
    config = save_jetspec(target, tmp_path, causal_head=True)
    load_drafter(tmp_path, target).save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {key: saved[key] for key in config} == config
    assert load_drafter(tmp_path / "again").config.block_is_causal(0)


@pytest.mark.parametrize(
    ("top", "block", "message"),
    [
        ({"is_causal": False}, {"causal_head": True}, "is_causal False, dflash_config.causal_head True"),
        ({}, {"causal_head": False, "causal": True}, "dflash_config.causal True, dflash_config.causal_head False"),
    ],
)
def test_causality_with_two_values_raises(
    top: dict[str, Any], block: dict[str, Any], message: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    config = save_jetspec(target, tmp_path, **block)
    (tmp_path / "config.json").write_text(json.dumps(config | top))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)
    assert message in inspect_drafter(tmp_path).problems[0]


def test_head_of_another_width_than_its_target_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    save_jetspec(target, tmp_path, causal_head=True, target_hidden_size=32)  # its own
    load_drafter(tmp_path, target)
    save_jetspec(target, tmp_path, causal_head=True, target_hidden_size=48)
    message = "dflash_config.target_hidden_size is 48 and hidden_size 32"
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)
    assert message in inspect_drafter(tmp_path).problems[0]
