"""Meta's checkpoints with parallel heads: all heads as the equations of Llama's original code give them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_specdec import load_drafter
from hf_specdec.methods.parallel_heads import load_with_heads

HEADS, KV_HEADS, WIDTH, INNER, VOCAB, LAYERS, FURTHER = 4, 2, 32, 48, 61, 3, 2
SIZES = {
    "attention.wq": (WIDTH, WIDTH), "attention.wk": (WIDTH // 2, WIDTH), "attention.wv": (WIDTH // 2, WIDTH),
    "attention.wo": (WIDTH, WIDTH), "feed_forward.w1": (INNER, WIDTH), "feed_forward.w2": (WIDTH, INNER),
    "feed_forward.w3": (INNER, WIDTH), "attention_norm": (WIDTH,), "ffn_norm": (WIDTH,),
}  # fmt: skip


def checkpoint(folder: Path, **params: object) -> dict[str, Tensor]:
    """Writes a random one in Meta's layout, in float64; returns its tensors."""
    numbers = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=numbers, dtype=torch.float64)
        return 0.2 * drawn if len(shape) > 1 else 1 + 0.1 * drawn

    stored = {f"{kind}.weight": draw(*size) for kind, size in (
        ("tok_embeddings", (VOCAB, WIDTH)), ("norm", (WIDTH,)), ("output", (VOCAB, WIDTH))
    )}  # fmt: skip
    for kind, count in (("layers", LAYERS), ("extra_heads", FURTHER)):
        for index in range(count):
            stored |= {f"{kind}.{index}.{part}.weight": draw(*size) for part, size in SIZES.items()}
    stored["rope.freqs"] = torch.ones(4)
    torch.save(stored, folder / "consolidated.pth")
    settings = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "norm_eps": 1e-5}
    (folder / "params.json").write_text(json.dumps(settings | {"n_future_tokens": 1 + FURTHER} | params))
    return stored


def logits_of_all_heads(stored: dict[str, Tensor], ids: Tensor) -> list[Tensor]:
    """[seq, vocab] of the head for the next token, and of each further one, from the equations."""
    length, size = len(ids), WIDTH // HEADS
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2).double() / size)
    rotation = torch.polar(torch.ones_like(angles), angles)  # [seq, size / 2], of pairs of neighbours

    def normed(states: Tensor, weight: Tensor) -> Tensor:
        return states * (states.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def rotated(states: Tensor) -> Tensor:  # [heads, seq, size]
        pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * rotation).flatten(-2)

    def layer(states: Tensor, name: str) -> Tensor:
        part = {kind: stored[f"{name}.{kind}.weight"] for kind in SIZES}
        inner = normed(states, part["attention_norm"])
        queries, keys, values = (
            (inner @ part[f"attention.{kind}"].T).unflatten(-1, (-1, size)).transpose(0, 1)
            for kind in ("wq", "wk", "wv")
        )
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (rotated(keys), values))
        scores = rotated(queries) @ keys.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        states = states + (scores.softmax(-1) @ values).transpose(0, 1).flatten(1) @ part["attention.wo"].T
        inner = normed(states, part["ffn_norm"])
        gate = torch.nn.functional.silu(inner @ part["feed_forward.w1"].T)
        return states + (gate * (inner @ part["feed_forward.w3"].T)) @ part["feed_forward.w2"].T

    states = stored["tok_embeddings.weight"][ids]
    for index in range(LAYERS - 1):
        states = layer(states, f"layers.{index}")
    names = [f"layers.{LAYERS - 1}", *(f"extra_heads.{index}" for index in range(FURTHER))]
    return [normed(layer(states, name), stored["norm.weight"]) @ stored["output.weight"].T for name in names]


@torch.no_grad()
def test_every_head_is_that_of_the_equations_and_drafts(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path)
    target, drafter = load_with_heads(tmp_path)
    ids = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(1))
    first, *further = logits_of_all_heads(stored, ids)
    torch.testing.assert_close(target(ids[None]).logits[0], first, rtol=1e-5, atol=1e-5)
    trunk = target.model(ids[None], output_hidden_states=True).hidden_states[LAYERS - 1]
    outputs = drafter(None, trunk, torch.arange(9)[None], is_causal=True)[0].unflatten(-1, (FURTHER, -1))
    for index, expected in enumerate(further):
        torch.testing.assert_close(target.lm_head(outputs[:, index]), expected, rtol=1e-5, atol=1e-5)

    arguments = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    alone = target.generate(ids[None], **arguments)
    assert torch.equal(target.generate(ids[None], assistant_model=drafter, **arguments), alone)
    drafter.save_pretrained(tmp_path / "drafter")
    again = load_drafter(tmp_path / "drafter", target)
    assert torch.equal(again.heads[1].mlp.up_proj.weight, drafter.heads[1].mlp.up_proj.weight)


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path)
    (tmp_path / "consolidated.01.pth").write_bytes((tmp_path / "consolidated.pth").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"has 2 files consolidated\*\.pth; it must have one"):
        load_with_heads(tmp_path)
    (tmp_path / "consolidated.01.pth").unlink()
    torch.save({name: tensor for name, tensor in stored.items() if "extra" not in name}, tmp_path / "consolidated.pth")
    with pytest.raises(ValueError, match=r"has no tensors extra_heads\.\*"):
        load_with_heads(tmp_path)
    torch.save(stored | {"layers.0.feed_forward.w4.weight": torch.ones(1)}, tmp_path / "consolidated.pth")
    with pytest.raises(ValueError, match=r"has a tensor 'layers\.0\.feed_forward\.w4\.weight' \[1\]"):
        load_with_heads(tmp_path)
