"""A stand-in for an installed vLLM: a command whose Python finds a package `vllm` that does what it is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_PACKAGE = """
import json, os
SETTINGS = json.load(open(os.path.join(os.path.dirname(__file__), "settings.json")))
__version__ = SETTINGS["version"]
class ModelRegistry:
    @staticmethod
    def get_supported_archs():
        return SETTINGS["architectures"]
"""
# Starts a process of its own, as vLLM does, which goes on when the first one is killed.
_SERVER = """
import os, pathlib, subprocess, sys, time
from vllm import SETTINGS
here = pathlib.Path(SETTINGS["folder"])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(here / "arguments.json").write_text(__import__("json").dumps(sys.argv[1:]))
(here / "child").write_text(str(child.pid))
(here / "server").write_text(str(os.getpid()))
exec(SETTINGS["server"])
"""


def make_engine(
    folder: Path, *, version: str = "0.32.0", architectures: tuple[str, ...] = ("LlamaForCausalLM",), server: str = ""
) -> Path:
    """Installs it into a folder.

    Args:
        folder: must be empty or new.
        version: that it says it has.
        architectures: that it says it knows.
        server: Python code that its server runs.

    Returns:
        Its command `vllm`.
    """
    package = folder / "site" / "vllm"
    (package / "entrypoints" / "openai").mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE)
    settings = {"version": version, "architectures": architectures, "server": server, "folder": str(folder)}
    (package / "settings.json").write_text(json.dumps(settings))
    (package / "entrypoints" / "openai" / "api_server.py").write_text(_SERVER)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = folder / "vllm"
    command.write_text(f"#!{python}\n")
    command.chmod(0o755)
    return command
