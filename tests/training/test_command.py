"""What the training command does beside its stages: reading text, going on from an earlier drafter, refusing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from hf_specdec import export_drafter, load_drafter
from hf_specdec.methods.dflash import training as dflash
from hf_specdec.methods.specblock.training import new_drafter
from hf_specdec.methods.specbound import training as specbound
from hf_specdec.training.command import main
from hf_specdec.training.optimizer import MuonWithAdamW
from hf_specdec.training.start_from import initialize_from
from hf_specdec.training.text import read_text
from tests.hub.layouts import as_zlab, save
from tests.hub.test_saving import small_disk
from tests.targets import HYBRIDS, fresh_target, make_target, one_prompt, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return fresh_target(dtype=torch.float32)


def test_training_goes_on_from_the_weights_and_the_vocabulary_of_an_earlier_drafter(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    earlier = new_drafter(target, torch.arange(0, 64, 2))
    earlier.training_record = {
        "command": "train --steps 5",
        "time": {"minutes_training": 2.5},
        "data": {"rows_trained_on": 40},
        "started_from": {"drafter": "first", "minutes_training": 1.0, "rows_trained_on": 24},
    }
    earlier.set_options(tree_budget=7)
    earlier.save_pretrained(tmp_path)
    drafter = new_drafter(target, torch.arange(32))
    record = initialize_from(drafter, tmp_path, target)
    assert drafter.options.tree_budget == 7
    for name, tensor in earlier.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    assert drafter.to_target_ids(torch.arange(3)).tolist() == [0, 2, 4]
    assert record == {"drafter": str(tmp_path), "minutes_training": 3.5, "rows_trained_on": 64}, "no commands of before"


def test_an_earlier_drafter_of_another_shape_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    new_drafter(target, torch.arange(0, 64, 2), layer_wise_shift=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"shift_proj\.0\.weight is missing there .* \(1 differences\)"):
        initialize_from(new_drafter(target, torch.arange(32)), tmp_path, target)


@pytest.mark.parametrize(
    ("field", "there", "here"), [("target_layer_ids", [0, 1], [1, 2]), ("mask_token_id", 1, 5), ("block_size", 4, 8)]
)
def test_an_earlier_drafter_whose_weights_mean_something_else_raises(
    target: PreTrainedModel, tmp_path: Path, field: str, there: Any, here: Any
) -> None:
    settings = {"target_layer_ids": [0, 1], "mask_token_id": 1, "block_size": 4}
    dflash.new_drafter(target, **settings).save_pretrained(tmp_path)
    drafter = dflash.new_drafter(target, **settings | {field: here})
    with pytest.raises(ValueError, match=re.escape(f"{field} is {there} there and {here} here")):
        initialize_from(drafter, tmp_path, target)


@pytest.mark.parametrize("settings", [{}, {"head": "full"}, {"vocabulary": torch.arange(0, 64, 2)}])
def test_training_goes_on_from_exit_heads_that_lie_in_files_of_their_own(
    target: PreTrainedModel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    shape = {"exit_layers": [1, 2], "lora_rank": 4} | settings
    earlier = specbound.new_drafter(target, **shape)
    with torch.no_grad():
        for parameter in earlier.parameters():
            parameter.normal_()
    earlier.save_pretrained(tmp_path)
    drafter = specbound.new_drafter(target, **shape)
    initialize_from(drafter, tmp_path, target)
    for name, tensor in earlier.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name


def test_training_goes_on_with_the_vocabulary_that_lies_beside_the_weights(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    earlier = new_drafter(target, torch.arange(32))
    earlier.save_pretrained(tmp_path)
    ids = torch.arange(0, 64, 2)
    torch.save({"d2t": ids - torch.arange(32), "t2d": torch.arange(64) % 2 == 0}, tmp_path / "vocab_mapping.pt")
    drafter = new_drafter(target, torch.arange(32))
    initialize_from(drafter, tmp_path, target)
    assert drafter.to_target_ids(torch.arange(3)).tolist() == [0, 2, 4]


def test_a_drafter_that_started_from_a_published_one_is_written_in_its_layout(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"target_layer_ids": [0, 1], "mask_token_id": 1, "block_size": 4}
    published = dflash.new_drafter(target, **settings)
    config, tensors = as_zlab(published, block_size=4, dflash_config={"target_layer_ids": [0, 1]})
    config["num_target_layers"] = target.config.num_hidden_layers
    (tmp_path / "source").mkdir()
    save(tmp_path / "source", config, tensors)
    drafter = dflash.new_drafter(target, **settings)
    initialize_from(drafter, tmp_path / "source", target)
    with torch.no_grad():
        drafter.norm.weight += 0.5
    export_drafter(drafter, tmp_path / "out", to="source")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in tensors if not torch.equal(tensors[name], written[name])] == ["norm.weight"]

    other = dflash.new_drafter(target, **settings)
    other.config.rms_norm_eps = 1e-3
    initialize_from(other, tmp_path / "source", target)
    with pytest.raises(ValueError, match="config field rms_norm_eps is 0.001 and was 1e-06"):
        export_drafter(other, tmp_path / "other", to="source")


def test_an_earlier_drafter_of_another_method_raises(target: PreTrainedModel, tmp_path: Path) -> None:
    new_drafter(target, torch.arange(0, 64, 2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds a SpecBlockDrafter, but --method trains a SpecBoundDrafter"):
        initialize_from(specbound.new_drafter(target, exit_layers=[1]), tmp_path, target)


def test_documents_of_a_jsonl_file_may_hold_any_character_that_json_allows(tmp_path: Path) -> None:
    texts = [f"one{mark}two" for mark in "\u2028\u2029\u0085\u000b\n"]
    file = tmp_path / "text.jsonl"
    file.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n\n" for text in texts), encoding="utf-8"
    )
    train, held_out = read_text(file)
    assert held_out + train == texts


@pytest.mark.parametrize(
    ("name", "text", "count"), [("a.txt", "short", 1), ("a.jsonl", '{"text": "one"}\n', 1), ("b.txt", "", 0)]
)
def test_text_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path, name: str, text: str, count: int) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}' holds {count} documents .* nothing is left to train on: give more"):
        read_text(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "one"}\n\n{"words": "two"}',
            r"Line 3 of '.*a\.jsonl' .* \"text\", not {'words': 'two'}",
        ),
        ("a.jsonl", b'{"text": "one"}\n["two"]', r"Line 2 of '.*a\.jsonl' must be a JSON object .*, not \['two'\]"),
        ("a.jsonl", b'{"text": 5}\n{"text": "two"}', r"Line 1 of '.*a\.jsonl' must .*, not {'text': 5}"),
        ("a.jsonl", b'{"text": "one"}\n{"text": ', r"Line 2 of '.*a\.jsonl' is not JSON: Expecting value, column 10"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "caf\xe9"}', r"Line 2 of '.*a\.jsonl' is not UTF-8: byte 0xe9"),
        ("a.txt", b"one\ntwo\ncaf\xe9", r"Line 3 of '.*a\.txt' is not UTF-8: byte 0xe9"),
    ],
)
def test_text_that_cannot_be_read_is_told_with_file_and_line(
    tmp_path: Path, name: str, text: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", __file__], r"^--output '.*test_command\.py' cannot be a folder: '.*test_command\.py' is a file"),
        (["--output", f"{__file__}/new"], r"^--output '.*new' cannot be a folder: '.*test_command\.py' is a file"),
    ],
)
def test_an_output_that_cannot_be_a_folder_is_refused_before_the_target_is_loaded(
    options: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        main(["--target", "no/such", "--output", "no/such", "--text", "no/such.txt", *options])


@pytest.fixture
def place(tmp_path: Path, chdir: Callable[[Path], None]) -> Path:
    """The current folder, with a target and text for it."""
    pytest.importorskip("datasets", reason="training needs the extra hf_specdec[train]")
    make_target("llama", dtype=torch.float32).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    write_text(tmp_path)
    chdir(tmp_path)
    return tmp_path


def write_text(folder: Path, first: int = 0) -> None:
    """120 documents of 60 letters."""
    texts = ["".join(chr(97 + (first + line * 7 + place * place) % 26) for place in range(60)) for line in range(120)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


COMMON = [
    "--target", "target", "--work-dir", "work", "--rows", "64", "--prompt-tokens", "8", "16", "--new-tokens", "16",
    "--batch-size", "4", "--text", "text.jsonl",
]  # fmt: skip
DFLASH = ["--mask-token-id", "1", "--block-size", "4"]
TRAIN = [*COMMON, *DFLASH]


def train(*options: str) -> None:
    main([*TRAIN, "--no-bf16", *options])


def test_too_little_plain_text_is_refused_before_the_target_writes(place: Path) -> None:
    with pytest.raises(ValueError, match="with 64 written rows needs 576 rows of plain text, but there are 219"):
        train("--steps", "2", "--plain-share", "0.9", "--output", "drafter")
    assert not (place / "work").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mask-token-id", "1", "--taps", "0", "9"], r"reads target layers \[0, 9\], but \[9\] are not among"),
        (["--mask-token-id", "64"], "uses mask_token_id 64, but target .* has only 64 embeddings"),
        ([], r"target 'target' has no mask token, its tokens fill all 64 rows .* --mask-token-id"),
        (["--mask-token-id", "1", "--start-from", "earlier"], "block_size is 3 there and 8 here"),
        (
            ["--mask-token-id", "1", "--new-tokens", "5000"],
            r"Texts have up to 5016 tokens \(.* together\), but .* has max_position_embeddings ",
        ),
        (["--mask-token-id", "1", "--text", "held_out.jsonl"], "None of 1 documents has more than 8 tokens"),
        (
            ["--mask-token-id", "1", "--validate", "questions.jsonl"],
            "'target' has no chat template.* Leave --validate 'questions.jsonl' out",
        ),
        (["--method", "specblock", "--window", "2"], "window=2 must be at least 6"),
        (["--method", "specbound", "--exit-layers", "9"], r"exit layers \[9\] must be from 1 to 3"),
        (
            ["--method", "specbound", "--start-from", "earlier"],
            "holds a DFlashDrafter, but --method trains a SpecBoundDrafter",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_target_writes(place: Path, options: list[str], message: str) -> None:
    target = make_target("llama", dtype=torch.float32)
    dflash.new_drafter(target, mask_token_id=1, block_size=3).save_pretrained(place / "earlier")
    lines = (place / "text.jsonl").read_text().splitlines(keepends=True)
    (place / "held_out.jsonl").write_text('{"text": "short"}\n' + "".join(lines[1:50]))
    (place / "questions.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(ValueError, match=message):
        main(["--target", "target", "--text", "text.jsonl", "--work-dir", "work", "--output", "drafter",
              "--prompt-tokens", "8", "16", "--new-tokens", "16", "--plain-share", "0", "--no-bf16",
              *options])  # fmt: skip
    assert not (place / "work").exists()


def test_losses_that_cannot_use_the_target_are_refused_before_it_writes(place: Path) -> None:
    make_target("granite", dtype=torch.float32).save_pretrained(place / "target")  # divides its logits by 3
    with pytest.raises(ValueError, match="GraniteForCausalLM differ by .* it transforms them in a way that is not sup"):
        train("--loss", "kl", "--steps", "2", "--output", "drafter")
    assert not (place / "work").exists()


@pytest.fixture
def trial_finds(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says what the trial of number types finds from now on: whether bfloat16 is the faster one."""
    where = "hf_specdec.training.number_type.computes_bfloat16"
    return lambda found: monkeypatch.setattr(where, lambda device: (found, "of a trial"))


class StoppedError(Exception):
    """Instead of the first step of an optimizer."""


@contextlib.contextmanager
def stopped_at_the_first_step() -> Iterator[list[torch.optim.Optimizer]]:
    """The command ends in front of the first step; gives the optimizer that was to take it."""
    asked: list[torch.optim.Optimizer] = []

    def stop(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        asked.append(optimizer)
        raise StoppedError

    hook = register_optimizer_step_pre_hook(stop)
    try:
        with pytest.raises(StoppedError):
            yield asked
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("found", "options", "bf16"),
    [
        (False, [], False),
        (True, [], True),
        (False, ["--bf16"], True),
        (True, ["--no-bf16"], False),
        # Fusion and head of this drafter are not in its forward.
        (True, ["--method", "eagle3"], True),
    ],
)
def test_the_number_type_is_what_the_device_is_fast_in_unless_one_is_asked_for(
    place: Path,
    found: bool,
    options: list[str],
    bf16: bool,
    trial_finds: Callable[[bool], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_target("llama", dtype=torch.bfloat16).save_pretrained(place / "target")
    trial_finds(found)
    computed: set[torch.dtype] = set()

    def note(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, torch.nn.Linear):
            computed.add(output.dtype)

    hook = register_module_forward_hook(note)
    try:
        with stopped_at_the_first_step() as optimizers:
            method = [] if "--method" in options else DFLASH
            main([*COMMON, *method, "--steps", "2", "--output", "drafter", *options])
    finally:
        hook.remove()
    dtype = torch.bfloat16 if bf16 else torch.float32
    assert optimizers[0].parts[0].dtype == dtype  # of Muon's iteration
    # Drafter and target. The checkpoint is in bfloat16; where that is slow, the target must not compute in it either.
    assert computed == {dtype}
    line = f"dtype: {'bfloat16' if bf16 else 'float32'}, because of a trial; --{'no-' if bf16 else ''}bf16 overrides"
    assert (line in capsys.readouterr().out) == ("bf16" not in str(options))


@pytest.mark.slow
def test_a_run_goes_on_in_its_number_type_whatever_a_new_trial_finds(
    place: Path, trial_finds: Callable[[bool], None]
) -> None:
    for found, resume in ((False, []), (True, ["--resume"])):
        trial_finds(found)
        main([*TRAIN, "--steps", "2", "--output", f"drafter{found}", *resume])
    record = json.loads((place / "drafterTrue/training.json").read_text())
    assert record["settings"]["bf16"] is False
    assert record["settings"]["mask_token_id"] == 1


def test_a_second_drafter_is_trained_on_the_same_answers_whatever_a_new_trial_finds(
    place: Path, trial_finds: Callable[[bool], None]
) -> None:
    for found, seed in ((True, "0"), (False, "1")):
        trial_finds(found)
        main([*COMMON, *DFLASH, "--steps", "2", "--output", f"drafter{seed}", "--learning-rate", f"1e-{seed}"])
    assert len(list((place / "work").glob("continuations-*"))) == 2  # to train on, and held out
    assert json.loads((place / "drafter1/training.json").read_text())["settings"]["bf16"] is True


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["text", "target"])
def test_a_run_whose_text_or_target_changed_is_not_gone_on_with(place: Path, changed: str) -> None:
    train("--steps", "2", "--output", "drafter")
    if changed == "text":
        write_text(place, first=3)
    else:
        make_target("llama", dtype=torch.float32, initializer_range=0.2).save_pretrained(place / "target")
    named = {"text": r"--text 'text\.jsonl'", "target": "--target 'target'"}[changed]
    with pytest.raises(
        ValueError, match=rf"cannot continue the run in 'work/checkpoints-\w+': {named} changed since, .* --resume out"
    ):
        train("--steps", "2", "--output", "other", "--resume")
    train("--steps", "2", "--output", "other")  # anew
    train("--steps", "2", "--output", "again", "--resume")
    assert (place / "again/model.safetensors").read_bytes() == (place / "other/model.safetensors").read_bytes()


def test_a_folder_with_another_drafter_is_refused_before_anything_is_written(place: Path) -> None:
    train("--steps", "2", "--output", "drafter")
    weights = (place / "drafter/model.safetensors").read_bytes()
    refused = r"'drafter' already holds a model or a drafter \(config.json, model.safetensors\), which would be overwr"
    for changed in (["--steps", "3"], ["--steps", "2"], ["--steps", "2", "--seed", "1", "--resume"]):
        with pytest.raises(ValueError, match="holds no checkpoint" if "--seed" in changed else refused):
            train(*changed, "--output", "drafter", "--work-dir", "other")
    train("--steps", "3", "--output", "another")
    with pytest.raises(ValueError, match=refused):  # the drafter there is not of the run that is resumed
        train("--steps", "3", "--output", "drafter", "--resume")
    assert (place / "drafter/model.safetensors").read_bytes() == weights
    assert not (place / "other").exists()
    train("--steps", "2", "--output", "drafter", "--resume")  # the same one
    assert (place / "drafter/model.safetensors").read_bytes() == weights
    train("--steps", "3", "--output", "drafter", "--overwrite")
    assert (place / "drafter/model.safetensors").read_bytes() != weights


def test_outputs_are_tried_before_the_target_is_loaded(place: Path) -> None:
    with (
        small_disk(1000),
        pytest.raises(OSError, match="Nothing can be written to 'drafter': File too large. Make room"),
    ):
        train("--steps", "2", "--output", "drafter", "--target", "absent")
    with pytest.raises(OSError, match="Nothing can be written to '/proc/work': .* or give another folder"):
        train("--steps", "2", "--output", "drafter", "--work-dir", "/proc/work", "--target", "absent")
    assert not (place / "drafter").exists()


@contextlib.contextmanager
def before_step(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Acts before a step of any optimizer."""
    steps: list[int] = []

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps.extend([1] * isinstance(optimizer, MuonWithAdamW))  # which has two others
        if len(steps) == number:
            steps.append(1)
            act()

    hook = register_optimizer_step_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_stop_in_training_says_where_the_weights_are_and_how_they_are_got(place: Path) -> None:
    train("--steps", "4", "--output", "whole")
    weights = (place / "whole/model.safetensors").read_bytes()
    options = ["--steps", "4", "--output", "drafter", "--work-dir", "other"]
    with (
        before_step(1, interrupt),
        pytest.raises(KeyboardInterrupt, match="there is no checkpoint yet; the same command"),
    ):
        train(*options)
    ways_on = r"the weights of step 2 are in other/checkpoints-\w+/checkpoint-2; the same command with --resume goes on"
    with before_step(3, interrupt), pytest.raises(KeyboardInterrupt, match=ways_on):
        train(*options)
    with (
        contextlib.ExitStack() as disk,
        before_step(1, lambda: disk.enter_context(small_disk(600))),
        pytest.raises(OSError, match=rf"Nothing was saved to 'other/checkpoints-\w+': .*; {ways_on}"),
    ):
        train(*options, "--resume")
    (place / "drafter/model.safetensors").mkdir(parents=True)  # the last weights cannot get their name
    with pytest.raises(OSError, match=r"Nothing was saved to 'drafter': .*; the weights of step 4 are in other"):
        train(*options, "--resume", "--overwrite")
    assert [file.name for file in (place / "drafter").iterdir()] == ["model.safetensors"]
    train(*options, "--resume", "--output", "elsewhere")
    assert (place / "elsewhere/model.safetensors").read_bytes() == weights


def test_an_online_run_learns_from_the_same_states_and_keeps_none(place: Path) -> None:
    train("--steps", "4", "--loss", "kl", "--output", "online", "--online")
    assert not list(place.glob("work/states-*"))
    train("--steps", "4", "--loss", "kl", "--output", "offline")
    assert list(place.glob("work/states-*/*"))
    online, offline = (json.loads((place / name / "training.json").read_text()) for name in ("online", "offline"))
    # Cached states are rounded to bfloat16.
    assert online["losses"]["loss"] == pytest.approx(offline["losses"]["loss"], rel=1e-2)
    assert online["losses"] == pytest.approx(offline["losses"], abs=0.05)


def test_a_run_that_does_not_tell_its_text_and_target_is_not_gone_on_with(place: Path) -> None:
    train("--steps", "2", "--output", "drafter")
    next(place.glob("work/checkpoints-*/inputs.json")).unlink()
    with pytest.raises(ValueError, match=r": it has no inputs\.json, so its inputs are unknown, .* leave --resume out"):
        train("--steps", "2", "--output", "drafter", "--resume")


@pytest.mark.slow
def test_checkpoints_of_another_text_are_not_taken_for_those_of_a_run_that_was_begun_anew(place: Path) -> None:
    train("--steps", "2", "--output", "drafter")
    write_text(place, first=3)
    with stopped_at_the_first_step():  # before its first checkpoint
        train("--steps", "2", "--output", "drafter", "--overwrite")
    with pytest.raises(ValueError, match="--resume, but 'work' holds no checkpoint of a run with these options"):
        train("--steps", "2", "--output", "drafter", "--resume", "--overwrite")


def test_no_time_to_write_is_an_error_that_names_the_option(place: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no answers yet: give more time than --write-minutes 0\."):
        train("--steps", "2", "--write-minutes", "0", "--plain-share", "0", "--output", "drafter")


@pytest.mark.slow
def test_ctrl_c_ends_writing_in_a_word(place: Path) -> None:
    program = (
        "import signal, sys; from hf_specdec.cli import main\n"
        # As in a terminal: a shell's background jobs, whose children these tests may be, are deaf to Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    options = ["--target", "target", "--output", "drafter", "--work-dir", "work", "--text", "text.jsonl",
               "--rows", "1000000", "--prompt-tokens", "8", "16", "--new-tokens", "16", "--plain-share", "0",
               "--mask-token-id", "1"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", program, "train", *options],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        start_new_session=True,  # a group of its own, which gets the signal as from a terminal
        text=True,
    )
    try:
        until = time.monotonic() + 600
        while not list(place.glob("work/continuations-*/answers-*.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=600)[1]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
    kept = "what the target has written is kept in work, and the same command goes on from there"
    assert errors.endswith(f"hf-specdec: stopped: {kept}\n"), errors[-2000:]


# Families of which two layers make no model: one reads what another keeps, or none of them attends.
ALONE_OF_NO_USE = {
    "gemma4": "(The set of layer types|Error.s. in loading)",
    "nemotron-h": "In a trial, .* only contain LinearAttention",
}


@pytest.mark.parametrize("family", ["qwen3.5", "granite-hybrid", "gemma4", "llama4", "mamba2", "nemotron-h", "bloom"])
@pytest.mark.parametrize("method", ["causal_lm", "dflash", "eagle3", "specblock"])
def test_drafters_are_trained_for_targets_of_every_kind_of_layer(method: str, family: str, place: Path) -> None:
    target = make_target(family, HYBRIDS[family][2][-1], dtype=torch.float32)
    target.save_pretrained(place / "target")
    if method == "causal_lm" and family in ALONE_OF_NO_USE:
        with pytest.raises(ValueError, match=f"do not make a model that drafts: {ALONE_OF_NO_USE[family]}"):
            main([*COMMON, "--method", method, "--steps", "2", "--output", "drafter"])
        assert not (place / "work").exists()
        return
    options = DFLASH if method == "dflash" else []
    main([*COMMON, "--method", method, "--steps", "2", "--no-bf16", "--output", "drafter", *options])
    drafter, prompts = load_drafter(place / "drafter", target), one_prompt()
    alone = target.generate(**prompts, max_new_tokens=12, do_sample=False)
    assert target.generate(**prompts, max_new_tokens=12, do_sample=False, assistant_model=drafter).equal(alone)
    assert drafter.stats.num_draft_tokens > 0
