"""Whether `make test` notices mistakes: plants those of `mutations.txt` one at a time and expects the tests to fail.

Run by `make test-mutations`. A paragraph of that file names a module of `hf_specdec` and the tests that should notice.
Then come its mistakes: after `-` the text as it is, which occurs once, and after `+` what is put in its place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "model_cards")


def first_failure(module: str, tests: list[str], right: str, wrong: str) -> str:
    """The first test that fails in a copy of the project with the mistake in it; "" if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        source = copy / "hf_specdec" / module
        source.write_text(source.read_text().replace(right, wrong))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    failures = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or bool(failures) != bool(run.returncode):
        raise SystemExit(f"pytest ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
    return failures[0] if failures else ""


def mistakes() -> Iterator[tuple[str, list[str], str, str]]:
    """The module of each mistake, the tests that must notice it, the right lines and the wrong ones."""
    for paragraph in Path(__file__).with_suffix(".txt").read_text().strip().split("\n\n"):
        head, planted = paragraph.split("\n", 1)
        module, *tests = head.split()
        for sides in re.findall(r"((?:^- .*\n?)+)((?:^\+ .*\n?)+)", planted, re.MULTILINE):
            right, wrong = ("\n".join(line[2:] for line in side.splitlines()) for side in sides)
            yield module, tests, right, wrong


def is_plantable(module: str, right: str) -> bool:
    """Whether the source still has these lines, once."""
    return (ROOT / "hf_specdec" / module).read_text().count(right) == 1


def main(parts: list[str]) -> None:
    """Plants all mistakes, or those of modules whose path contains one of `parts`."""
    missed = 0
    for module, tests, right, wrong in mistakes():
        if not parts or any(part in module for part in parts):
            failure = first_failure(module, tests, right, wrong) if is_plantable(module, right) else ""
            missed += not failure
            print(f"{module}\n- {right}\n+ {wrong}\n    {failure or 'MISSED'}", flush=True)
    raise SystemExit(f"{missed} mistakes were not noticed." if missed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
