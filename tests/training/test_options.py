"""Options of the training commands: spelling, types, and refusals, before anything is loaded."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.methods.dspark import DSparkTrainOptions as DSparkOptions
from hf_specdec.training.hrad import HRADOptions
from hf_specdec.training.options import CommandOptions, TrainOptions, parse
from hf_specdec.training.recipe import RECIPES
from hf_specdec.training.write import WriteOptions

EXAMPLES = Path(__file__).parents[2] / "examples"
REQUIRED = ["--target", "model", "--output", "build/no", "--text", "text.txt"]


def options_of(kind: type[CommandOptions], *argv: str, required: bool = True) -> Any:
    return parse(kind, argv, "train", None, required=required)


def recorded_commands() -> list[str]:
    """The commands in the training records of the bundled drafters."""
    found = []
    for file in sorted(EXAMPLES.glob("*/*/training.json")):
        found.append(json.loads(file.read_text()).get("command", ""))
    return [command for command in found if command.startswith(("hf-specdec train", "python examples/train_"))
            and "tiny_code" not in command]  # fmt: skip


@pytest.mark.parametrize("command", recorded_commands())
def test_recorded_commands_are_still_accepted(command: str) -> None:
    """Every option that a record names has the recorded value."""
    argv = shlex.split(command)[2:]
    method = argv[argv.index("--method") + 1] if "--method" in argv else "dflash"
    kind = HRADOptions if "train_hrad.py" in command else RECIPES[method].options
    options = options_of(kind, *argv, required="train_" not in command)
    for index, name in enumerate(argv):
        if name.startswith("--"):
            rest = [each.startswith("--") for each in [*argv[index + 1 :], "--"]]
            values = argv[index + 1 : index + 1 + rest.index(True)]
            value = getattr(options, name[2:].replace("-", "_"))
            if values:
                found = [str(each) for each in value] if isinstance(value, list) else [value]
                assert found == [type(each)(text) for each, text in zip(found, values, strict=True)]
            else:
                assert value is True


def test_values_have_the_annotated_types() -> None:
    options = options_of(
        DSparkOptions, *REQUIRED, "--taps", "1", "2", "--prompt-tokens", "8", "16", "--learning-rate", "1e-3",
        "--work-dir", "work", "--loss", "kl", "--resume",
    )  # fmt: skip
    assert (options.taps, options.prompt_tokens, options.learning_rate) == ([1, 2], [8, 16], 1e-3)
    assert (options.work_dir, options.loss, options.resume) == (Path("work"), "kl", True)
    assert (options.block_size, options.layers, options.steps, options.data) == (7, 2, None, None)


@pytest.mark.parametrize(
    ("given", "value"),
    [([], None), (["--bf16"], True), (["--no-bf16"], False), (["--bf16", "--no-bf16"], False)],
)
def test_bf16_is_on_off_or_left_to_a_trial(given: list[str], value: bool | None) -> None:
    assert options_of(TrainOptions, *REQUIRED, *given).bf16 is value
    assert options_of(WriteOptions, *REQUIRED[:4], "--questions", "5", *given).bf16 is value


def test_switches_that_are_on_by_default_have_a_no() -> None:
    kind = RECIPES["specblock"].options
    options = options_of(kind, *REQUIRED, "--no-valid-prefix", "--no-prefix-broadcast", "--warm-start")
    assert (options.valid_prefix, options.prefix_broadcast, options.layer_wise_shift) == (False, False, True)
    assert options.warm_start is True


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*REQUIRED, "--gamma", "4"], "unrecognized arguments: --gamma 4"),
        ([*REQUIRED, "--step", "5"], "unrecognized arguments: --step 5"),
        ([*REQUIRED, "--optimizer", "sgd"], "argument --optimizer: invalid choice: 'sgd'"),
        ([*REQUIRED, "--rows", "many"], "argument --rows: invalid int value: 'many'"),
        ([*REQUIRED, "--data", "chats"], "argument --data: not allowed with argument --text"),
        (REQUIRED[:4], "one of the arguments --text --data is required"),
        (REQUIRED[2:], "the following arguments are required: --target"),
        ([*REQUIRED[:4], "--data", "chats", "--rows", "5"],
         "argument --rows: has no effect with --data, only with --text: leave it out"),
        ([*REQUIRED[:4], "--data", "chats", "--prompt-tokens", "5", "9"],
         "argument --prompt-tokens: has no effect with --data, only with --text: leave it out"),
        ([*REQUIRED, "--temperature", "0.5"],
         "argument --temperature: has no effect with --text, only with --data: leave it out"),
    ],
)  # fmt: skip
def test_options_that_are_not_valid_end_with_usage_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        options_of(TrainOptions, *argv)
    printed = capsys.readouterr().err
    assert printed.startswith("usage: train ")
    assert f"train: error: {message}" in printed


def test_ranges_are_checked_in_python_too() -> None:
    with pytest.raises(ValueError, match="^argument --batch-size: 0 must be at least 1$"):
        TrainOptions(target="model", output=Path("no"), batch_size=0)
