"""Training on conversations: every recipe on what the target answers, and what is refused before it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import load_drafter
from hf_specdec.training import write
from hf_specdec.training.command import main
from hf_specdec.training.recipe import RECIPES
from tests.targets import fresh_target
from tests.training.test_conversation_answers import TEMPLATE, talk

pytest.importorskip("datasets", reason="training needs the extra hf_specdec[train]")

ROOT = Path(__file__).parents[2]
SHAPES = {
    "dflash": ["--layers", "1", "--taps", "1", "2", "--block-size", "4", "--anchors", "4", "--draft-vocab-size", "200"],
    "dspark": [
        "--layers",
        "1",
        "--taps",
        "1",
        "2",
        "--block-size",
        "4",
        "--anchors",
        "4",
        "--draft-vocab-size",
        "200",
        "--markov-rank",
        "8",
    ],
    "specblock": ["--layers", "1", "--taps", "1", "2", "--draft-vocab-size", "200"],
    "specbound": ["--exit-layers", "2", "--lora-rank", "4", "--draft-vocab-size", "200"],
    "eagle3": ["--taps", "0", "1", "2", "--passes", "3", "--draft-vocab-size", "200"],
    "causal_lm": ["--layers", "2", "--draft-vocab-size", "200"],
    "medusa": ["--heads", "2"],
    "parallel_heads": ["--heads", "2"],
    "gated_lora": ["--masks", "2", "--lora-rank", "2", "--markov-rank", "4", "--anchors", "4"],
}
NEW_TOKENS = 12
# Gloo's threads free tensors, which takes the GIL: one that runs when Python ends can abort its process.
COMMAND = """
import sys
from pathlib import Path

from hf_specdec.cli import main

main(sys.argv[1:])
names = [thread.read_text().strip() for thread in Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in names), f"threads of the process group outlive the training: {names}"
"""


@pytest.fixture
def place(tmp_path: Path, chdir: Callable[[Path], None]) -> Path:
    """The current folder, with a target that has a chat template, and conversations of one and two questions."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny-code/target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "target")
    # Few tokens, so that a random target's are covered by a small draft vocabulary.
    target = fresh_target(dtype=torch.float32, attention="sdpa", vocab_size=len(tokenizer))
    target.save_pretrained(tmp_path / "target")
    talks = [talk(f"x = {number}", *(["why"] if number % 3 == 0 else [])) for number in range(60)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    chdir(tmp_path)
    return tmp_path


def arguments(method: str, *options: str) -> list[str]:
    return [
        "--method", method, "--target", "target", "--data", "talks.jsonl", "--work-dir", "work", "--output", "drafter",
        "--new-tokens", str(NEW_TOKENS), "--max-length", "64", "--batch-size", "4", "--steps", "3", "--no-bf16",
        *SHAPES[method], *options,
    ]  # fmt: skip


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "training.json").read_text())


def check_drafts(folder: Path) -> None:
    """The saved drafter loads and leaves the target's output as it is."""
    target = AutoModelForCausalLM.from_pretrained("target")
    drafter = load_drafter(folder).to(torch.float32)
    prompt = AutoTokenizer.from_pretrained("target").apply_chat_template(
        talk("x = 7")["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    settings = {"max_new_tokens": 12, "do_sample": False}
    alone = target.generate(prompt, **settings)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **settings), alone)
    assert drafter.stats.num_draft_tokens > 0 or drafter.method == "specbound"


def test_every_recipe_is_tried() -> None:
    assert set(SHAPES) == set(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("method", SHAPES)
def test_a_drafter_is_trained_on_answers_and_drafts(method: str, place: Path) -> None:
    main(arguments(method))
    found = record(place / "drafter")
    assert found["data"]["data"] == "talks.jsonl"
    assert found["data"]["rows_written_by_target"] == 80
    assert found["data"]["temperatures"] == [0.0]
    assert found["chat_template"] is True
    if "--draft-vocab-size" in SHAPES[method]:
        assert found["settings"]["draft_vocab_size"] == 200
    check_drafts(place / "drafter")
    answers = sorted((place / "work").glob("answers-*/answers-*.jsonl"))
    written = [file.stat().st_mtime_ns for file in answers]
    weights = (place / "drafter/model.safetensors").read_bytes()
    main(arguments(method, "--resume"))
    assert [file.stat().st_mtime_ns for file in answers] == written, "what was written is not written again"
    assert (place / "drafter/model.safetensors").read_bytes() == weights, "all steps were done"
    main([*arguments(method, "--start-from", "drafter", "--output", "further", "--target-id", "us/target")])
    assert record(place / "further")["started_from"]["drafter"] == "drafter"
    assert load_drafter(place / "further").target_name_or_path == "us/target"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dflash", "specblock", "specbound", "causal_lm"])
def test_the_state_with_the_longest_drafts_in_real_rounds_is_kept(method: str, place: Path) -> None:
    questions = [talk(f"y = {number}", *(["why"] if number else [])) for number in range(3)]
    (place / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    main(arguments(method, "--validate", "questions.jsonl", "--steps", "30"))
    found = record(place / "drafter")
    lengths = {step: row["mean_acceptance_length"] for step, row in found["validation"].pop("by_step").items()}
    assert list(lengths) == ["10", "20", "30"]
    kept = found["validation"]["kept"].removeprefix("step ")
    assert lengths[kept] == max(lengths.values()) == pytest.approx(found["losses"]["mean_acceptance_length"], abs=1e-3)
    assert found["validation"] == {
        "conversations": "3 of questions.jsonl", "kept": f"step {kept}", "command": found["command"],
    }  # fmt: skip
    # The saved drafter is the one that was measured.
    target = AutoModelForCausalLM.from_pretrained("target")
    drafter, accepted, rounds = load_drafter(place / "drafter").to(torch.float32), 0, 0
    for question in questions:
        prompt = AutoTokenizer.from_pretrained("target").apply_chat_template(
            question["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        target.generate(prompt, assistant_model=drafter, max_new_tokens=48, do_sample=False)
        accepted += drafter.stats.num_accepted_draft_tokens
        rounds += drafter.stats.num_spec_steps
    assert 1 + accepted / rounds == pytest.approx(lengths[kept], rel=0.05)  # it is saved in bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("method", SHAPES)
def test_two_processes_share_the_answers_and_train_one_drafter(method: str, place: Path) -> None:
    # Without --multi_gpu it starts one process on a CPU, whatever their number. Port 0: tests run beside each other.
    (place / "command.py").write_text(COMMAND)
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0",
              "command.py", "train"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, *arguments(method)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = record(place / "drafter")
    assert found["data"]["rows_written_by_target"] == 80
    assert found["data"]["rows_trained_on"] == 2 * 4 * 3
    check_drafts(place / "drafter")


def test_answers_that_were_written_before_are_trained_on_and_told_apart(place: Path) -> None:
    for temperature in ("0", "0.7"):
        write.main(["--target", "target", "--data", "talks.jsonl", "--output", f"answers{temperature}", "--no-bf16",
                    "--temperature", temperature, "--max-new-tokens", str(NEW_TOKENS)])  # fmt: skip
    folders = ["--data", "answers0", "answers0.7"]
    options = arguments("dflash")
    options[options.index("--data") : options.index("--data") + 2] = folders
    main(options)
    found = record(place / "drafter")["data"]
    assert (found["rows_written_by_target"], found["temperatures"]) == (160, [0.0, 0.7])
    assert not list((place / "work").glob("answers-*")), "nothing is written"

    fresh_target(dtype=torch.float32, attention="sdpa", vocab_size=2048, seed=5).save_pretrained("target")
    with pytest.raises(ValueError, match=r"answers in 'answers0' were not written by target 'target'"):
        main([*options, "--work-dir", "other", "--output", "another"])
    assert not (place / "other").exists()


def test_sources_are_mixed_in_the_shares_that_are_asked_for(place: Path) -> None:
    """60 old conversations of 80 turns, of which 3 are held out, and 12 new ones."""
    (place / "new.jsonl").write_text("".join(json.dumps(talk(f"while {number}:")) + "\n" for number in range(12)))
    write.main(["--target", "target", "--data", "new.jsonl", "--output", "new", "--no-bf16",
                "--max-new-tokens", str(NEW_TOKENS)])  # fmt: skip
    for mix, new_share in ((["0.7", "0.3"], 0.3), (["3", "7"], 0.7)):
        options = arguments("medusa")
        options[options.index("--data") + 1 : options.index("--data") + 2] = ["talks.jsonl", "new", "--mix", *mix]
        main([*options, "--overwrite"])
        found = record(place / "drafter")["data"]
        assert found["mix"] == [float(share) for share in mix]
        new = 11 - sum(found["rows_left_out"].values())  # all but the one held out are trained on, none of them twice
        assert new > 8
        assert found["rows_after_mixing"] == new + round(new / new_share * (1 - new_share))
    with pytest.raises(SystemExit):
        main([*options, "--mix", "1", "2", "3"])
    with pytest.raises(ValueError, match="--mix 1.0 1000.0 leaves a source without rows to train on; there are 'talks"):
        main([*options, "--mix", "1", "1000", "--overwrite"])


def test_card_names_the_datasets_of_the_hub_that_the_target_answered(place: Path, monkeypatch: Any) -> None:
    talks = [json.loads(line) for line in (place / "talks.jsonl").read_text().splitlines()]
    datasets = {"owner/talks": talks[:30], "owner/more": talks[30:]}
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: datasets[name])
    write.main(["--target", "target", "--data", "owner/talks", "--output", "answers", "--no-bf16",
                "--max-new-tokens", str(NEW_TOKENS)])  # fmt: skip
    options = arguments("dflash")
    options[options.index("--data") : options.index("--data") + 2] = ["--data", "answers", "owner/more"]
    main(options)
    assert record(place / "drafter")["datasets"] == ["owner/talks", "owner/more"]
    assert ModelCard.load(place / "drafter" / "README.md").data.datasets == ["owner/talks", "owner/more"]


def test_conversations_with_the_same_opening_are_held_out_together(place: Path) -> None:
    """Of 60 conversations the first and the 51st are held out: of the first both turns, of the other its one."""
    main(arguments("causal_lm"))
    per_file = [len(load_file(file)) for file in (place / "work").glob("states-*/last-hidden-*")]
    assert sorted(per_file) == [2 + 1, 80 - 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft-vocab-size", "5000"], "--draft-vocab-size 5000 is more than the 2048 tokens of target 'target'"),
        (["--max-length", "100000"], r"Texts have up to 100000 tokens \(--max-length\), but 'target' has max_position"),
        (["--data", "no.jsonl"], "no file 'no.jsonl'. Give a JSONL file, or the id of a dataset"),
        (["--data", "robot.jsonl"], "line 1, message 0: role 'robot' is unknown"),
        (["--data", "silent.jsonl"], "line 1 has no user message, so there is no answer to write"),
        (["--layers", "9"], "--layers 9 is more than the 4 layers of target 'target'"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_target_answers(place: Path, options: list[str], message: str) -> None:
    (place / "robot.jsonl").write_text('{"messages": [{"role": "robot", "content": "x"}]}\n')
    (place / "silent.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    with pytest.raises((ValueError, OSError), match=message):
        main(arguments("causal_lm", *options))
    assert not (place / "work").exists()


def test_one_conversation_leaves_nothing_to_train_on(place: Path) -> None:
    (place / "talks.jsonl").write_text(json.dumps(talk("x = 1", "why")) + "\n")
    with pytest.raises(ValueError, match=r"talks.jsonl holds 1 conversation\. .* nothing is left to train on: give "):
        main(arguments("dflash"))


def test_a_target_without_a_chat_template_is_told_to_train_on_text(place: Path) -> None:
    AutoTokenizer.from_pretrained(ROOT / "examples/tiny-code/target").save_pretrained("target")
    (place / "target/chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="has no chat template, .* Train on text instead"):
        main(arguments("dflash"))
    assert not (place / "work").exists()


def test_rows_like_excluded_conversations_are_not_trained_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "def area(width, height, unit='m'): return width * height, unit  # of a room"
    with open("talks.jsonl", "a") as file:
        file.write(json.dumps(talk(words)) + "\n")
    Path("held_out.jsonl").write_text(json.dumps(talk(words)) + "\n")
    main(arguments("dflash", "--exclude", "held_out.jsonl"))
    assert record(place / "drafter")["data"]["rows_left_out"]["held_out"] == 1
    assert "1 held_out" in capsys.readouterr().out
