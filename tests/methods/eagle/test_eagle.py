"""EAGLE-1 and 2: the layer equals the paper's equations on whole texts, and drafts what they give step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.methods.eagle import EagleDrafter
from tests.method_table import make_eagle
from tests.targets import make_target, one_prompt
from tests.watched import Watched

VARIANTS: dict[str, dict[str, Any]] = {
    "a bias of fc": {},
    "no bias": {"bias": False},
    "biases of queries, keys and values": {"attention_bias": True, "output_bias": False},
    "a norm before the attention": {"norm_before_attention": True},
    "own embeddings": {"own_embeddings": True},
    "two layers": {"num_hidden_layers": 2},
}


def rms(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(heads: Tensor, base: float) -> Tensor:
    """[heads, seq, dim], position by position."""
    _, seq, dim = heads.shape
    half = dim // 2
    angles = torch.arange(seq)[:, None].double() * base ** (-torch.arange(half).double() * 2 / dim)
    cos, sin = angles.cos(), angles.sin()
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def equations(drafter: EagleDrafter, embeddings: Tensor, states: Tensor) -> Tensor:
    """EAGLE's layer on a whole text, without a cache: [seq, hidden] twice -> [seq, hidden]."""
    config, weights = drafter.config, drafter.state_dict()
    hidden = torch.cat([embeddings, states], -1) @ weights["fc.weight"].T + weights.get("fc.bias", 0)
    seq, dim = len(hidden), config.head_dim
    causal = torch.ones(seq, seq, dtype=torch.bool).tril()
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}."
        inputs = hidden
        if f"{name}input_layernorm.weight" in weights:
            inputs = rms(hidden, weights[f"{name}input_layernorm.weight"], config.rms_norm_eps)
        parts = []
        for part in "qkv":
            whole = inputs @ weights[f"{name}self_attn.{part}_proj.weight"].T
            parts.append(
                (whole + weights.get(f"{name}self_attn.{part}_proj.bias", 0)).view(seq, -1, dim).transpose(0, 1)
            )
        groups = config.num_attention_heads // config.num_key_value_heads
        queries, keys, values = parts[0], parts[1].repeat_interleave(groups, 0), parts[2].repeat_interleave(groups, 0)
        base = config.rope_parameters["rope_theta"]
        scores = rotate(queries, base) @ rotate(keys, base).transpose(1, 2) / dim**0.5
        attended = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ values
        hidden = hidden + attended.transpose(0, 1).reshape(seq, -1) @ weights[f"{name}self_attn.o_proj.weight"].T
        normed = rms(hidden, weights[f"{name}post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up, down = (weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        hidden = hidden + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    return hidden


def random_eagle(target: PreTrainedModel, variant: str, **settings: Any) -> EagleDrafter:
    drafter = make_eagle(target, **VARIANTS[variant], **settings).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in drafter.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return drafter


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_the_equations(variant: str) -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    drafter = random_eagle(target, variant, depth=4, top_k=1, tree_budget=4)
    watched = Watched(drafter)
    target.generate(**prompt, max_new_tokens=10, do_sample=False, assistant_model=watched)
    table = drafter.embed_tokens if drafter.config.own_embeddings else target.get_input_embeddings()
    for each in watched.rounds:
        text = torch.tensor(each.text(0))
        states = target.model(text[None, :-1]).last_hidden_state[0]
        for token in each.tree.token_ids[0, 1:].tolist():
            outputs = equations(drafter, table(text[1:]), states)
            assert int(target.lm_head(outputs[-1]).argmax()) == token
            states = torch.cat([states, outputs[-1:]])
            text = torch.cat([text, torch.tensor([token])])


def test_outputs_equal_the_equations() -> None:
    target = make_target("llama", "sdpa", torch.float64)
    drafter = random_eagle(target, "a bias of fc")
    generator = torch.Generator().manual_seed(0)
    embeddings, states = (torch.randn(1, 9, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    found = drafter(embeddings, states, torch.arange(9)[None], is_causal=True)[0]
    torch.testing.assert_close(
        found, equations(drafter, embeddings[0], states[0]), rtol=1e-3, atol=5e-5
    )  # transformers rotates in float32


@torch.no_grad()
def test_the_tree_is_eagle_2s() -> None:
    # Each level extends the likeliest nodes of the one above; the likeliest of all of them are verified.
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    watched = Watched(random_eagle(target, "a bias of fc", depth=3, top_k=2, tree_budget=5))
    target.generate(**prompt, max_new_tokens=4, do_sample=False, assistant_model=watched)
    drafter: Any = watched.drafter
    each = watched.rounds[0]
    text = torch.tensor(each.text(0))
    first_states = target.model(text[None, :-1]).last_hidden_state[0]
    table = target.get_input_embeddings()

    def after(path: tuple[int, ...]) -> Tensor:
        states, ids = first_states, text
        outputs = equations(drafter, table(ids[1:]), states)
        for token in path:
            states, ids = torch.cat([states, outputs[-1:]]), torch.cat([ids, torch.tensor([token])])
            outputs = equations(drafter, table(ids[1:]), states)
        return target.lm_head(outputs[-1]).log_softmax(-1)

    level, everything = {(): 0.0}, {}
    for _ in range(3):
        found = {
            (*path, int(token)): score + float(value)
            for path, score in level.items()
            for value, token in zip(*after(path).topk(2), strict=True)
        }
        everything |= found
        level = dict(sorted(found.items(), key=lambda pair: -pair[1])[:2])
    expected = {path for path, _ in sorted(everything.items(), key=lambda pair: -pair[1])[:5]}
    parents, tokens = each.tree.parents[0].tolist(), each.tree.token_ids[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        paths.append((*paths[parents[node]], tokens[node]))
    assert set(paths[1:]) == expected


def test_a_target_of_another_size_raises() -> None:
    drafter = make_eagle(make_target("llama", "sdpa", torch.float64))
    other = make_target("llama", "sdpa", torch.float64, hidden_size=16)
    with pytest.raises(ValueError, match="hidden_size 16"):
        other.generate(**one_prompt(), max_new_tokens=2, assistant_model=drafter)


def test_its_vocabulary_can_be_restricted() -> None:
    target, prompt = make_target("llama", "sdpa", torch.float64), one_prompt()
    drafter = make_eagle(target).double()
    drafter.restrict_vocabulary(list(range(0, 64, 3)))
    watched = Watched(drafter)
    text = target.generate(**prompt, max_new_tokens=12, do_sample=False, assistant_model=watched)
    assert torch.equal(text, target.generate(**prompt, max_new_tokens=12, do_sample=False))
    drafted = {int(token) for each in watched.rounds for token in each.tree.token_ids[0, 1:]}
    assert drafted <= set(range(0, 64, 3))
