"""hf-specdec serve: the command it prints and runs, one line for what is wrong, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hf_specdec.cli import main
from tests.method_table import make_dflash
from tests.serving.fake_engine import make_engine
from tests.targets import make_target

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are ended as a group")
FOREVER = "time.sleep(600)"


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Folders of a target and a drafter, as arguments, and where an export goes."""
    target = make_target("llama", "sdpa", torch.float32)
    target.save_pretrained(tmp_path / "target")
    make_dflash(target).save_pretrained(tmp_path / "drafter")
    return [str(tmp_path / "target"), str(tmp_path / "drafter"), "--output", str(tmp_path / "out")]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


def is_running(process: int) -> bool:
    """Whether there is such a process, one that has ended and was not waited for left aside."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started(engine: Path) -> tuple[int, int]:
    """Ids of a fake server and of the process that it started, as soon as they are there."""
    for _ in range(600):
        if (file := engine.parent / "server").is_file() and file.read_text():
            return int(file.read_text()), int((engine.parent / "child").read_text())
        time.sleep(0.1)
    raise AssertionError("it was not started")


def is_over(*processes: int) -> bool:
    for _ in range(100):
        if not any(map(is_running, processes)):
            return True
        time.sleep(0.1)
    return False


def test_command_is_printed_for_any_machine(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *pair, "--dtype", "bfloat16", "--", "--max-model-len", "4096"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"vllm serve {pair[0]} --dtype bfloat16 --speculative-config '{{")
    assert printed.out.endswith("--host 127.0.0.1 --port 8000 --max-model-len 4096\n")
    assert "It drafts 4 tokens per round" in printed.err


def test_engine_is_run_with_that_command_and_ends_with_it(
    pair: list[str], port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(tmp_path / "engine", server="print('ready')")
    options = ["--run", "--engine", str(engine), "--port", str(port), "--", "--enforce-eager"]
    assert main(["serve", *pair, *options]) == 0
    printed = capsys.readouterr()
    assert "ready" in printed.err
    arguments = json.loads((tmp_path / "engine" / "arguments.json").read_text())
    assert arguments[:2] == ["--model", pair[0]]
    assert arguments[-3:] == ["--port", str(port), "--enforce-eager"]
    assert json.loads(arguments[arguments.index("--speculative-config") + 1])["method"] == "dflash"
    assert is_over(*started(engine)), "a process that it started is left"


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "vLLM was ended by SIGKILL. All of its processes have ended."),
        ("raise ValueError('no memory')", "vLLM ended with exit status 1: ValueError: no memory"),
        (  # as vLLM's first process tells of what happened in another
            "print('(Worker-0 pid=7) ERROR 11-24 04:59:40 [b.py:9] ValueError: a cause\\n  in detail\\n  more'); "
            "print('(Server pid=8) WARNING 11-24 04:59:40 [a.py:9] such as `OSError: files`'); raise RuntimeError('x')",
            "vLLM ended with exit status 1: ValueError: a cause in detail more",
        ),
        ("sys.exit(3)", "vLLM ended with exit status 3: see its output"),
    ],
)
def test_server_that_ends_by_itself_is_one_line_and_leaves_nothing(
    server: str, message: str, pair: list[str], port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(tmp_path / "engine", server=f"import signal; {server}")
    assert main(["serve", *pair, "--run", "--engine", str(engine), "--port", str(port)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"hf-specdec: {message}"
    assert is_over(*started(engine))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_command_stops_the_server(how: signal.Signals, pair: list[str], port: int, tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "engine", server=FOREVER)
    command = [sys.executable, "-m", "hf_specdec.cli", "serve", *pair, "--run", "--engine", str(engine)]
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    running = started(engine)
    process.send_signal(how)
    assert process.communicate(timeout=60)[1].splitlines()[-1] == "hf-specdec: stopped"
    assert process.returncode == 130
    assert is_over(*running)


def test_no_engine_is_one_line_before_anything_is_exported(
    pair: list[str], port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--run", "--port", str(port), "--engine"]
    assert main(["serve", *pair, *options, str(tmp_path / "absent")]) == 1
    assert f"There is no command {tmp_path / 'absent'}: install vLLM" in capsys.readouterr().err
    broken = make_engine(tmp_path / "broken")
    (tmp_path / "broken" / "site" / "vllm" / "__init__.py").write_text("raise ImportError('no such library')")
    assert main(["serve", *pair, *options, str(broken)]) == 1
    assert "cannot be imported: ImportError: no such library." in capsys.readouterr().err
    broken.write_bytes(b"\x7fELF")
    assert main(["serve", *pair, *options, str(broken)]) == 1
    assert "is not the command that vLLM installs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_port_in_use_is_one_line(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(tmp_path / "engine")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", *pair, "--run", "--engine", str(engine), "--port", str(port)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert f"No server can listen on 127.0.0.1:{port} (Address already in use): give another --port" in errors[0]


def test_target_that_the_engine_does_not_know_is_one_line_and_nothing_runs(
    pair: list[str], port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(tmp_path / "engine", architectures=("GPT2LMHeadModel",))
    assert main(["serve", *pair, "--run", "--engine", str(engine), "--port", str(port)]) == 1
    assert "vLLM 0.32.0 does not support LlamaForCausalLM, the class of the target" in capsys.readouterr().err
    assert not (tmp_path / "engine" / "server").exists()


def test_engine_of_another_version_is_named_and_one_that_is_too_old_refused(
    pair: list[str], port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--run", "--port", str(port), "--engine"]
    newer = make_engine(tmp_path / "newer", version="0.33.1")
    assert main(["serve", *pair, *options, str(newer)]) == 0
    assert "This is vLLM 0.33.1; the command was tested with 0.32.0." in capsys.readouterr().err
    older = make_engine(tmp_path / "older", version="0.27.2")
    assert main(["serve", *pair, *options, str(older)]) == 1
    assert "vLLM 0.27.2 masks the layers of dflash drafters wrongly" in capsys.readouterr().err
    assert not (tmp_path / "older" / "server").exists()
