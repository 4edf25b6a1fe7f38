"""`examples/aurora.py` and the command of the trainer: two processes, one folder, and the target's own output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import load_drafter
from hf_specdec.adaptation import AuroraDrafter

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny-code"


def run(*command: str, folder: Path) -> str:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_trainer_publishes_what_then_serves(tmp_path: Path) -> None:
    target: Any = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    served = AuroraDrafter(target, load_drafter(TINY / "specblock", target), tmp_path / "rounds", replay_every=2)
    inputs = tokenizer("static int add(int a, int b) {", return_tensors="pt")
    for _ in range(4):
        plain = target.generate(**inputs, assistant_model=served, max_new_tokens=48, do_sample=False)
    told = run(
        "-m", "hf_specdec.adaptation.aurora_trainer", str(tmp_path / "rounds"), "--target", str(TINY / "target"),
        "--drafter", str(TINY / "specblock"), "--minutes", "0.0001", "--fresh", "2", "--steps", "12",
        folder=tmp_path,
    )  # fmt: skip
    assert told.startswith("1: loss ")
    assert torch.equal(target.generate(**inputs, assistant_model=served, max_new_tokens=48, do_sample=False), plain)
    (swap,) = served.swaps
    assert swap.swapped
    assert swap.new_length > swap.length
    served.save_pretrained(tmp_path / "learned")
    record = json.loads((tmp_path / "learned" / "training.json").read_text())
    assert record["adapted"] == "1 of 1 publications of another process in 5 calls"


@pytest.mark.slow
def test_the_example_serves_the_targets_output_and_draws_both_drafters(tmp_path: Path) -> None:
    told = run(
        str(ROOT / "examples/aurora.py"), "--minutes", "0.05", "--new-tokens", "12", "--prompt-tokens", "16",
        "--target", str(TINY / "target"), "--drafter", str(TINY / "specblock"), "--output", str(tmp_path / "out"),
        folder=tmp_path,
    )  # fmt: skip
    assert " 0 with another output" in told
    record = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert record["different_outputs"] == 0
    assert record["topics"]["Python"]["calls"] >= 1
    assert record["topics"]["Python"]["frozen"] >= 1
    picture = ElementTree.parse(tmp_path / "out" / "accepted.svg").getroot()
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
