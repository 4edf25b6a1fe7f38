"""README and `docs/`: what they link to is there, and their code runs as printed."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers.dynamic_module_utils
import transformers.utils.hub

from hf_specdec.cli import main
from hf_specdec.drafting.registry import WEIGHTLESS
from tests.hub.conftest import hub, no_token, token_file  # noqa: F401, fixtures
from tests.hub.loopback_hub import TOKEN, LoopbackHub

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and page.name != "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for place in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        file, _, heading = place.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), place
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings]
            assert heading in slugs, place


def test_the_quick_start_runs_as_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    plain: Any = None
    for block in blocks(ROOT / "docs" / "index.md", "python"):
        exec(block, names)
        if plain is None:
            plain = names["model"].generate(**names["inputs"], max_new_tokens=64, do_sample=False)
        assert names["output"].tolist() == plain.tolist(), block
    assert "def quicksort(" in capsys.readouterr().out
    assert set(names["both"].stats.by_source) == {"ddtree", "suffix"}


@pytest.fixture
def in_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The current folder has the examples, and files that are written go there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def logged_in(hub: LoopbackHub, token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """On a Hub on loopback, whose code goes to a folder of its own."""
    token_file.write_text(TOKEN)
    for module in (transformers.dynamic_module_utils, transformers.utils.hub):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", str(token_file.parent / "modules"), raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])


# Not dependencies: blocks that import them run where they are installed.
FRAMEWORKS = ("langchain_huggingface", "llama_index")


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
@pytest.mark.usefixtures("in_a_checkout", "logged_in")
def test_code_of_the_guide_runs_as_printed(page: Path) -> None:
    names: dict[str, Any] = {}
    if page.name != "README.md":  # pages go on from the first lines of the quick start
        exec(blocks(ROOT / "docs" / "index.md", "python")[0], names)
    try:
        for block in blocks(page, "python"):
            if not any(package in block and find_spec(package) is None for package in FRAMEWORKS):
                exec(block, names)
    finally:
        WEIGHTLESS.pop("echo", None)  # of docs/new-drafter.md


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "py")], ids=lambda page: page.stem)
def test_what_further_code_imports_is_there(page: Path) -> None:
    # These blocks need what is not here, such as answers of a model.
    for block in blocks(page, "py"):
        for node in ast.parse(block).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_specdec"):
                exec(ast.unparse(node))


def test_the_page_on_writing_a_drafter_explains_each_part_of_the_example() -> None:
    page = (ROOT / "docs" / "new-drafter.md").read_text()
    parts = ast.parse((ROOT / "examples" / "custom_drafter.py").read_text()).body
    defined = {part.name for part in parts if isinstance(part, ast.ClassDef | ast.FunctionDef)}
    assert {name for name in defined if f"`{name}`" in page.split("## A method with weights")[1]} == defined


QUICK = re.compile(r"^hf-specdec (?:generate|inspect|export|serve|convert) [^<>\n]*(?<!--run)$", re.MULTILINE)
PRINTED = sorted({line.split("  #")[0] for page in PAGES for line in QUICK.findall("\n".join(blocks(page, "sh")))})


@pytest.mark.parametrize("line", PRINTED)
@pytest.mark.usefixtures("in_a_checkout")
def test_commands_run_as_printed(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "my-drafter" in line:
        (Path("my-drafter")).symlink_to(ROOT / "examples" / "tiny-code" / "dflash")
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


COMMAND = re.compile(r"hf-specdec (\w+)((?:[^\n`|#]|\\\n)*)")


def test_options_of_printed_commands_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    printed = {(name, option) for page in PAGES for name, rest in COMMAND.findall(page.read_text().replace("\\\n", " "))
               for option in re.findall(r"(?<!\S)--[\w-]+", rest)}  # fmt: skip
    assert len(printed) > 20
    known = {}
    for name in {name for name, _ in printed}:
        # These have options of their own.
        more = {"bench": ["--suite=speed"], "train": ["--method=specblock", "--method=specbound", "--method=medusa"]}
        for suite in ([], *([option] for option in more.get(name, []))):
            with pytest.raises(SystemExit):
                main([name, *suite, "--help"])
        known[name] = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    assert {(name, option) for name, option in printed if option not in known[name]} == set()


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
