from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_specdec.benchmark import speed
from hf_specdec.benchmark.scripted import ScriptedDrafter, counting_target, drafter_network, rate_for


def test_target_counts_and_scripted_drafts_are_right_as_often_as_told() -> None:
    target = counting_target("tiny", "cpu", torch.float32)
    prompt = torch.arange(10).unsqueeze(0) + torch.tensor([[0], [400]])
    expected = (torch.arange(410) + torch.tensor([[0], [400]])) % 512
    for rate, low, high in ((0.0, 1.0, 1.0), (0.7, 2.8, 3.6), (1.0, 8.9, 9.0)):
        drafter = ScriptedDrafter(depth=8, tree_budget=20, rate=rate)
        output = target.generate(prompt, max_new_tokens=400, do_sample=False, assistant_model=drafter)
        assert output.tolist() == expected.tolist()
        assert drafter.stats is not None
        # 1 + 0.7 (1 - 0.7^8) / 0.3 = 3.2 and some 250 rounds: 0.4 is 3 sigma, and the seed is fixed.
        assert low <= drafter.stats.mean_acceptance_length <= high
        assert drafter.stats.num_draft_tokens == 20 * drafter.stats.num_spec_steps


def test_rate_gives_the_mean_acceptance_length() -> None:
    rate = rate_for(6.5, 15)
    assert 1 + sum(rate**level for level in range(1, 16)) == pytest.approx(6.5)


def test_network_beside_the_script_changes_no_token() -> None:
    target = counting_target("tiny", "cpu", torch.float32)
    drafter = ScriptedDrafter(drafter_network(target, layers=1), tree_budget=16)
    prompt = torch.arange(12).unsqueeze(0)
    output = target.generate(prompt, max_new_tokens=40, do_sample=False, assistant_model=drafter)
    assert output.tolist() == [list(range(52))]


def test_dry_run_of_every_part_on_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    parts = ["rounds", "batch", "length"]
    small = ["--contexts", "32", "64", "--nodes", "8", "--batches", "1", "2", "--new-tokens", "12", "--repeats", "1"]
    small += ["--length", "90"]
    assert speed.main(["--part", *parts, "--device", "cpu", *small, "--output", str(out)]) == 0
    report = json.loads(out.read_text())
    assert {row["part"] for row in report["rows"]} == set(parts)
    for row in report["rows"]:
        if row["part"] != "length":
            assert row["round_to_floor"] > 0
            assert row["tau"] >= 1
            assert row["drafter_floor_ms"] > 0
    environment = report["environment"]
    assert environment["shape"] == "tiny"
    assert environment["command"].startswith("python -m hf_specdec.benchmark.speed --part rounds")
    assert "round_to_floor" in capsys.readouterr().out
