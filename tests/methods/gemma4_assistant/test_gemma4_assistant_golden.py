"""A Gemma 4 assistant against transformers' own modules; `tests/make_golden_gemma4_assistant.py` made the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_specdec import load_drafter
from hf_specdec.decoding.target import CommittedEntries

FILE = Path(__file__).parents[2] / "data" / "gemma4_assistant.safetensors"
POSITION = 10


@pytest.mark.parametrize("head", ["tied", "clusters"])
@torch.no_grad()
def test_states_and_logits_are_those_of_transformers(head: str, tmp_path: Path) -> None:
    stored = load_file(FILE)
    tensors = {name.removeprefix(f"{head}."): part for name, part in stored.items() if name.startswith(f"{head}.")}
    checkpoint = {
        name.removeprefix("checkpoint."): part for name, part in tensors.items() if name.startswith("checkpoint.")
    }
    save_file(checkpoint, tmp_path / "model.safetensors")
    with safe_open(FILE, "pt") as file:
        config = json.loads(file.metadata()[f"{head}.config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = load_drafter(tmp_path)

    entries = {
        kind: CommittedEntries(keys, tensors[f"{kind}.values"], torch.ones(1, keys.shape[2], dtype=torch.bool))
        for kind in ("sliding_attention", "full_attention")
        for keys in [tensors[f"{kind}.keys"]]
    }
    embeddings, states = tensors["inputs"].unsqueeze(0).chunk(2, dim=-1)
    outputs = drafter(embeddings, states, drafter.rotary(torch.tensor([POSITION])), entries)
    torch.testing.assert_close(drafter.recurrent(outputs)[0], tensors["states"], rtol=1e-5, atol=1e-5)
    logits, expected = drafter.logits(outputs)[0], tensors["logits"]
    if head == "clusters":
        assert (logits > -torch.inf).sum(-1).tolist() == [24, 24]
        # The others are 1 below the least of the scored ones there, over all nodes.
        expected = expected.masked_fill(expected == expected.min(), -torch.inf)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
