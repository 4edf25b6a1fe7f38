"""P-EAGLE against the reference package, see `tests/make_golden_peagle.py`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import load_drafter
from tests.watched import Watched

GOLDEN = Path(__file__).parents[2] / "data" / "peagle.safetensors"


def test_logits_and_drafts_are_those_of_the_reference(tmp_path: Path) -> None:
    with safe_open(GOLDEN, framework="pt") as file:
        described = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    target = LlamaForCausalLM(LlamaConfig(**json.loads(described["target_config"]))).eval()
    target.load_state_dict({name[7:]: value for name, value in tensors.items() if name.startswith("target.")})
    (tmp_path / "config.json").write_text(described["config"])
    save_file(
        {name[11:]: value for name, value in tensors.items() if name.startswith("checkpoint.")},
        tmp_path / "model.safetensors",
    )
    drafter = load_drafter(tmp_path, target, method="dflash")
    watched = Watched(drafter)
    text, expected = tensors["text"], tensors["logits"]
    depths = expected.shape[1]
    assert drafter.config.num_draft_tokens == depths
    first = int(tensors["first_place"])
    output = target.generate(
        text[:, :first], max_new_tokens=text.shape[1] - first, do_sample=False, assistant_model=watched
    )
    assert output.tolist() == text.tolist()
    ids = drafter.to_target_ids(torch.arange(expected.shape[-1]))
    compared = 0
    for each in watched.rounds:
        rows = expected[len(each.text(0)) - 1]
        assert each.logits is not None
        known = rows.isfinite().all(-1)  # near the end the reference has no place for all depths
        torch.testing.assert_close(each.logits[0, known][:, ids], rows[known], rtol=1e-5, atol=1e-5)
        drafted = torch.tensor(each.tree.token_ids[0, 1:].tolist())
        known = known[: len(drafted)]
        assert drafted[known].tolist() == ids[rows.argmax(-1)[: len(drafted)]][known].tolist()
        compared += 1
    assert compared >= 32
