"""`examples/train_drafter.py` from text to a drafter that loads, on a tiny target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import load_drafter
from tests.targets import VOCAB, fresh_target, tiny_tokenizer

pytest.importorskip("datasets")

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_example_writes_text_trains_and_saves_a_drafter(tmp_path):
    fresh_target(dtype=torch.float32).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    words = [f"{chr(97 + index % 26)}{chr(97 + index * 7 % 26)}" for index in range(60)]
    texts = [{"text": "".join(words[start : start + 20])} for start in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    command = [
        sys.executable, str(EXAMPLES / "train_drafter.py"), "--target", str(tmp_path / "target"),
        "--output", str(tmp_path / "drafter"), "--work-dir", str(tmp_path / "work"),
        "--text", str(tmp_path / "text.jsonl"), "--rows", "256", "--writers", "2",
        "--prompt-tokens", "4", "6", "--new-tokens", "8", "--plain-share", "0",
        "--mask-token-id", "1", "--block-size", "4", "--anchors", "3", "--steps", "4", "--no-bf16",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert len(list((tmp_path / "work").glob("continuations-*/part-*"))) == 2 + 1, "two of training text, one held out"
    assert {path.name for path in (tmp_path / "work" / "checkpoints").iterdir()} == {"checkpoint-4"}

    drafter = load_drafter(str(tmp_path / "drafter"))
    assert drafter.dtype == torch.bfloat16
    record = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert record["data"]["rows_written_by_target"] == 256
    assert record["settings"]["steps"] == 4
    assert record["chat_template"] is False
    assert 1 <= record["losses"]["accepted_length"] <= 4
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    prompt = torch.randint(3, VOCAB, (1, 6))
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(
        target.generate(prompt, assistant_model=drafter.float(), **settings), target.generate(prompt, **settings)
    )
