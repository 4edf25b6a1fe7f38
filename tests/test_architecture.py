"""The shape of the house: imports run one way, and the shared half knows no method."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import io
import pkgutil
import re
import tokenize
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec.drafters.registry import FAMILIES, MARGINAL_METHODS
from tests.methods import METHODS

PACKAGE = Path(hf_specdec.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PARTS = ("decoding", "drafters", "training", "adaptation", "hub", "benchmark", "visualize", "integration", "serving")

# What each part may import of the others; its own files always.
MAY_IMPORT = {
    "decoding": set(),
    "drafters": {"decoding"},
    "integration": {"decoding", "drafters"},
    "training": {"decoding", "drafters"},
    "adaptation": {"decoding", "drafters", "training"},
    "hub": {"decoding", "drafters"},
    "serving": {"drafters", "hub"},
    "visualize": {"decoding"},
    "benchmark": {"decoding", "drafters", "hub", "integration", "visualize"},
}
# The files that register a method: its own file, or the `__init__.py` of its folder.
METHOD_FILES = [
    path
    for path in FILES
    if path.is_relative_to(PACKAGE / "drafters") and re.search(r"^register_\w+\(", path.read_text(), re.MULTILINE)
]
METHOD_NAMES = sorted(path.parent.name if path.stem == "__init__" else path.stem for path in METHOD_FILES)


def identifier(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Names of the hf_specdec modules that a file imports, inside functions too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in modules if name.split(".")[0] == "hf_specdec"}


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in MAY_IMPORT], ids=identifier)
def test_imports_run_one_way(path: Path) -> None:
    part = part_of(path)
    for name in imported_modules(path):
        other = name.split(".")[1] if "." in name else ""
        if other in PARTS:
            assert other == part or other in MAY_IMPORT[part], f"{part} must not import {name}"


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) == "drafters"], ids=identifier)
def test_only_what_methods_share_is_imported_by_another_method(path: Path) -> None:
    inside = path.relative_to(PACKAGE / "drafters").parts
    if len(inside) == 1 and path not in METHOD_FILES:  # base, registry and what else they share: these know no method
        methods = {name for name in imported_modules(path) for method in METHOD_NAMES if f".{method}." in f"{name}."}
        assert not methods


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) == "decoding"], ids=identifier)
def test_the_shared_half_names_no_method_in_its_code(path: Path) -> None:
    code = ast.unparse(without_docstrings(ast.parse(path.read_text()))).lower()
    code = code.replace("merged_adapters", "")  # an attribute of PEFT's layers
    for name in {*METHOD_NAMES, *FAMILIES, *MARGINAL_METHODS}:
        assert not re.search(rf"\b\w*{name}\w*\b", code), f"{path.name} names {name!r}"


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Docstrings may cite a paper by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


@pytest.mark.parametrize("path", FILES, ids=identifier)
def test_lists_of_public_names_are_sorted_and_true(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
            assert names == sorted(names)
            module = importlib.import_module(".".join(["hf_specdec", *module_parts(path)]))
            assert all(hasattr(module, name) for name in names)


def module_parts(path: Path) -> list[str]:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


@pytest.mark.parametrize("path", FILES, ids=identifier)
def test_modules_and_what_they_offer_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module says nothing of itself"
    missing = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not missing


@pytest.mark.parametrize("name", hf_specdec.__all__)
def test_public_names_are_documented_and_annotated(name: str) -> None:
    offered = getattr(hf_specdec, name)
    assert inspect.getdoc(offered)
    signature = inspect.signature(offered)
    assert inspect.isclass(offered) or signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name


def test_every_registered_method_takes_the_shared_tests() -> None:
    # A new method adds a row to METHODS in tests/methods.py, or several that begin with its name.
    for name in {*MARGINAL_METHODS, *FAMILIES}:
        assert any(row.startswith(name) for row in METHODS), name


def test_all_modules_can_be_imported_by_themselves() -> None:
    for module in pkgutil.walk_packages([str(PACKAGE)], "hf_specdec."):
        importlib.import_module(module.name)


@pytest.mark.parametrize("path", FILES, ids=identifier)
def test_no_file_reads_the_environment_or_swallows_all_errors(path: Path) -> None:
    # A switch that changes output is an argument; see the house style.
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in ("environ", "getenv"), f"line {node.lineno}: environment variable"


ROOT = PACKAGE.parent
SOURCES = sorted(path for folder in ("hf_specdec", "tests", "examples") for path in (ROOT / folder).rglob("*.py"))
# Words in backticks that are names elsewhere: a program, formatted keys, names of transformers and of the Hub client.
NAMES_ELSEWHERE = {"CandidateGenerator", "accuracy_2", "accuracy_layer_4", "create_commit", "torchrun"}


def test_names_in_docstrings_and_comments_exist() -> None:
    known, said = {*NAMES_ELSEWHERE, "py", *(part for path in SOURCES for part in (path.stem, *path.parts))}, []
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        said += [
            (path, token.string)
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                said.append((path, ast.get_docstring(node) or ""))
        for node in ast.walk(without_docstrings(tree)):
            for field in ("id", "attr", "arg", "name", "module", "value"):
                if isinstance(text := getattr(node, field, None), str):
                    known.update(re.findall(r"\w+", text))
    missing = [
        f"{path.relative_to(ROOT)}: `{name}`"
        for path, text in said
        if path.name != "host_keys.py"  # which is about names of transformers
        for name in re.findall(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`(?!`)", text)
        if not known.issuperset(name.split("."))
    ]
    assert not missing, "names that exist nowhere in the code"
