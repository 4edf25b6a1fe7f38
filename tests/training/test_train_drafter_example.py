"""`examples/train_drafter.py` from text to a drafter that loads, on a tiny target."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import load_drafter
from hf_specdec.training.command import main
from tests.targets import VOCAB, fresh_target, tiny_tokenizer

pytest.importorskip("datasets")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder with a tiny target and text for it."""
    folder = tmp_path_factory.mktemp("tiny")
    fresh_target(dtype=torch.float32).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    words = [f"{chr(97 + index % 26)}{chr(97 + index * 7 % 26)}" for index in range(60)]
    texts = [{"text": "".join(words[start : start + 20])} for start in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return folder


def arguments(tiny, folder, *options):
    return [
        "--target", str(tiny / "target"), "--output", str(folder / "drafter"), "--work-dir", str(folder / "work"),
        "--text", str(tiny / "text.jsonl"), "--prompt-tokens", "4", "6", "--new-tokens", "8", "--plain-share", "0",
        "--no-bf16", *options,
    ]  # fmt: skip


def train(tiny, folder, *options, launcher=()):
    """Runs the example into `folder`, by itself or through a launcher."""
    command = [
        sys.executable,
        *launcher,
        str(EXAMPLES / "train_drafter.py"),
        *arguments(tiny, folder, *options),
    ]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as process:
        try:
            printed, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher that is killed would leave its processes behind
            raise
    assert process.returncode == 0, errors
    return printed


@pytest.mark.slow
def test_example_writes_text_trains_and_saves_a_drafter(tiny, tmp_path):
    options = ["--rows", "256", "--mask-token-id", "1", "--block-size", "4", "--anchors", "3", "--steps", "4"]
    train(tiny, tmp_path, *options)
    assert len(list((tmp_path / "work").glob("continuations-*/answers-*"))) == 2, "training text, and held-out text"
    (checkpoints,) = (tmp_path / "work").glob("checkpoints-*")
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint-4", "inputs.json", "options.json"}
    weights = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"--resume, but '.*work' holds no checkpoint of a run with these options"):
        main(arguments(tiny, tmp_path, "--resume", "--overwrite", *options, "--learning-rate", "1"))
    main(arguments(tiny, tmp_path, "--resume", "--overwrite", *options))
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == weights, "all steps were done"

    drafter = load_drafter(str(tmp_path / "drafter"))
    assert drafter.dtype == torch.bfloat16
    record = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert record["data"]["rows_written_by_target"] == 256
    assert record["settings"]["steps"] == 4
    assert record["chat_template"] is False
    assert 1 <= record["losses"]["accepted_length"] <= 4
    target = AutoModelForCausalLM.from_pretrained(tiny / "target")
    prompt = torch.randint(3, VOCAB, (1, 6))
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(
        target.generate(prompt, assistant_model=drafter.float(), **settings), target.generate(prompt, **settings)
    )


@pytest.mark.slow
def test_two_processes_train_one_drafter_for_as_many_steps(tiny, tmp_path):
    """SpecBound calls the drafter once per exit head; each process times its own trial steps."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--method", "specbound", "--rows", "128", "--batch-size", "4", "--minutes", "0.02"]
    printed = train(tiny, tmp_path, *options, launcher=launcher)
    record = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert record["data"]["rows_written_by_target"] == 128
    assert record["data"]["rows_trained_on"] == 2 * 4 * record["settings"]["steps"]
    assert "train_runtime" in printed
    assert "train_samples_per_second" not in printed, "it was computed from a bound on the steps"
    assert printed.count('"rows_trained_on"') == 1, "one process alone saves"


def losses(printed):
    """What the trainer logs of the loss, step by step, and at the end of the held-out rows."""
    logged = re.findall(r"'(loss|eval_loss)': '?([\d.]+)", printed)
    assert {name for name, _ in logged} == {"loss", "eval_loss"}
    return [float(value) for _, value in logged]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [["-m", "torch.distributed.run", "--standalone"], ["-m", "accelerate.commands.launch", "--multi_gpu"]],
    ids=["torchrun", "accelerate"],
)
def test_two_processes_have_the_losses_of_one_on_as_many_rows(tiny, tmp_path, launcher):
    options = ["--rows", "256", "--mask-token-id", "1", "--block-size", "4", "--anchors", "8", "--steps", "20"]
    processes = ["--nproc-per-node=2"] if "torch.distributed.run" in launcher else ["--num_processes=2"]
    both = train(tiny, tmp_path, *options, "--batch-size", "16", launcher=[*launcher, *processes])
    one = train(tiny, tmp_path, *options, "--batch-size", "32", "--overwrite")
    assert losses(both) == pytest.approx(losses(one), rel=0.02)


def test_sharding_is_refused_before_anything_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"FSDP is enabled .* each process trains the whole drafter"):
        main(arguments(tiny, tmp_path))
    assert not (tmp_path / "work").exists()
