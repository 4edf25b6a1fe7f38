from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.speed import __main__ as speed
from examples.speed import gpu
from examples.speed.gpu import PARTS, SPEED, Part, run_for, run_parts

SMALL = ["--shape", "tiny", "--device", "cpu", "--contexts", "32", "--nodes", "8", "--batches", "1", "--repeats", "1"]
SMALL += ["--new-tokens", "12", "--length", "60", "--prompts-per-group", "1", "--groups", "python", "--modes", "none"]
SMALL += ["--compile-backend", "eager"]  # building kernels takes minutes


class Runner:
    """Runs parts of the speed suite in this process, and no tests; every command takes `seconds` of its clock."""

    def __init__(self, seconds: float = 1.0, statuses: Sequence[int | None] = ()) -> None:
        self.seconds, self.statuses, self.now = seconds, [*statuses], 0.0
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], limit_s: float) -> int | None:
        self.commands.append([*command])
        self.now += min(self.seconds, limit_s)
        if self.statuses:
            return self.statuses.pop(0)
        return 0 if "pytest" in command else speed.main(command[len(SPEED) :])

    def clock(self) -> float:
        return self.now


@pytest.mark.slow
def test_every_part_runs_and_the_record_compares_with_compiled_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Instead of a shape that does not fit here, and of all drafters.
    for name, options in {"llama": ("--shape", "tiny"), "exact": ("--variants", "ddtree")}.items():
        command = [*PARTS[name].command[: len(SPEED) + 2], *options]
        monkeypatch.setitem(PARTS, name, Part(tuple(command), PARTS[name].limit_s))
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["--folder", str(tmp_path / "parts"), "--", *SMALL], run=Runner()) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["parts"] == dict.fromkeys(PARTS, "done")
    assert {row["of"] for row in record["rows"]} == set(PARTS) - {"tests"}
    assert "`auto` over plain decoding, slowest prompt" in {line["line"] for line in record["judged"]}
    table = (tmp_path / "record.md").read_text()
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| tiny")]
    ways = {cells[1] for cells in lines}
    assert {"plain", "plain compiled", "stock assisted"} <= ways
    assert {"dflash, compile_mode=none", "eagle3, compile_mode=none"} <= ways
    speedups = {cells[1]: float(cells[-1].rstrip(" |")) for cells in lines}
    assert speedups["plain compiled"] == 1
    assert all(f"- {name}: done" in table for name in PARTS)


def test_parts_without_time_are_named_and_run_in_the_next_call(tmp_path: Path) -> None:
    first = Runner(seconds=250, statuses=[0] * 9)
    record = run_parts([], tmp_path, 9 * 60, run=first, clock=first.clock)
    done = [name for name, state in record["parts"].items() if state == "done"]
    assert done == ["tests", "plain"]  # 40 s are left
    assert record["parts"]["dflash"] == "not run: 40 s were left"
    second = Runner(seconds=100, statuses=[None, 3, *[0] * 9])
    record = run_parts([], tmp_path, 9 * 60, run=second, clock=second.clock)
    assert not any("pytest" in command for command in second.commands)
    assert record["parts"]["dflash"] == "stopped after 330 s"
    assert record["parts"]["eagle3"] == "failed, exit status 3"
    assert json.loads((tmp_path / "record.json").read_text()) == record
    third = Runner(statuses=[0])
    record = run_parts(["plain"], tmp_path, 9 * 60, ["--shape", "tiny"], run=third, clock=third.clock)
    (command,) = third.commands  # asked for by name, although it is done
    assert command[len(SPEED) :][:2] == ["--shape", "tiny"]
    assert record["parts"]["eagle3"] == "failed, exit status 3"
    fourth = Runner(statuses=[0] * len(PARTS))
    run_parts([], tmp_path, 10**6, run=fourth, clock=fourth.clock)
    assert run_parts([], tmp_path, 0, run=fourth)["parts"] == dict.fromkeys(PARTS, "done")


def test_first_parts_fit_into_the_time_of_one_run() -> None:
    assert [*PARTS][:4] == ["tests", "plain", "dflash", "eagle3"]
    assert sum(part.limit_s for part in [*PARTS.values()][:4]) <= 25 * 60
    assert all(part.limit_s < 9 * 60 for part in PARTS.values())
    root = Path(gpu.__file__).parents[2]
    assert all((root / word).exists() for word in PARTS["tests"].command if word.startswith("tests/"))


def test_a_command_is_ended_when_its_time_is_over() -> None:
    assert run_for([sys.executable, "-c", "raise SystemExit(4)"], 60) == 4
    assert run_for([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) is None


def test_unknown_parts_are_told_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["eagel3"], run=Runner())
    assert "Unknown part 'eagel3'. Did you mean 'eagle3'" in capsys.readouterr().err
