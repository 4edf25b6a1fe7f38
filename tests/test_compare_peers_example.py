"""`examples/compare_peers.py`: what it compares where the peers are not installed, and what it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.targets import make_target, tiny_tokenizer

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_peers_that_are_not_installed_are_left_out_and_named(tmp_path: Path) -> None:
    for name, layers in (("target", 4), ("draft-lm", 2)):
        make_target("llama", "sdpa", torch.float32, num_hidden_layers=layers).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "de"}\n')
    command = [
        sys.executable, str(ROOT / "examples/compare_peers.py"), "--target", "target", "--draft-model", "draft-lm",
        "--prompts", "prompts.jsonl", "--drafter", "ngram", "--new-tokens", "12", "--json", "figures.json",
    ]  # fmt: skip
    # Neither peer is a dependency, and in a folder of its own Python finds none that happens to lie around.
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "flashspec is left out" in done.stdout
    assert "economize is left out" in done.stdout
    record = json.loads((tmp_path / "figures.json").read_text())
    names = [row["way"] for row in record["figures"] if row["temperature"] == 0]
    assert names == [
        "plain",
        "plain, packed weights",
        "transformers, prompt look-up",
        "transformers, assisted",
        "hf_specdec, ngram",
    ]
    assert [row["identical"] for row in record["figures"] if row["temperature"] == 0] == ["yes"] * 5
    assert record["figures"][0]["speedup"] == pytest.approx(1)
