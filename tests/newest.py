"""What a new user does first, without our constraints; `make test-newest` runs it in .venv-newest.

It installs the checkout into a fresh environment with `pip install .`, runs README's ten lines there and compares their
greedy output with plain `generate`. Then it names the packages that are newer than those of constraints.txt, and the
newest transformers if pyproject.toml does not allow it.

    python tests/newest.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import distributions
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[1]
COMPARE = """
plain = model.generate(**inputs, max_new_tokens=64)
assert output.tolist() == plain.tolist(), f"{output.tolist()} with drafts, {plain.tolist()} without"
assert drafter.stats.num_accepted_draft_tokens > 0, drafter.stats
"""


def run_first_lines(folder: Path) -> None:
    """Installs into `folder` and runs README's first Python block outside the checkout.

    Raises:
        subprocess.CalledProcessError: it failed, or wrote another text than plain decoding.
    """
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, str(ROOT)], check=True)
    lines = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert lines is not None
    code = lines[1].replace('"examples/', f'"{ROOT}/examples/') + COMPARE
    subprocess.run([python, "-W", "error::UserWarning:hf_specdec", "-c", code], check=True, cwd=folder)


def newer_than_tested() -> list[str]:
    """The installed packages that are newer than constraints.txt has them."""
    pinned = re.findall(r"^([\w.-]+)==([^ \n]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    tested = {name: max(Version(version) for each, version in pinned if each == name) for name, _ in pinned}
    installed = {each.metadata["Name"]: each.version.partition("+")[0] for each in distributions()}
    return sorted(
        f"{name} {installed[name]} (tested: {version})"
        for name, version in tested.items()
        if name in installed and Version(installed[name]) > version
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_first_lines(Path(folder) / "environment")
    print("README's first lines give the tokens of plain generate in a fresh environment.")
    print("Newer than tested:", "; ".join(newer_than_tested()) or "no package")
    index = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
    print("On the index:", subprocess.run(index, capture_output=True, text=True).stdout.partition("\n")[0] or "unknown")


if __name__ == "__main__":
    main()
