"""The shape of the house: imports run one way, and the shared half knows no method."""

from __future__ import annotations

import ast
import functools
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
from hf_specdec.drafting import registry
from hf_specdec.drafting.registry import FAMILIES, MARGINAL_METHODS, method_of
from hf_specdec.hub.formats.base import Format
from hf_specdec.hub.recognition import known_layouts
from tests.count_lines import total
from tests.method_table import METHODS
from tests.mutations import is_plantable, mistakes

PACKAGE = Path(hf_specdec.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Each part imports those before it; the applications, which are not listed, import all of them.
ORDER = ("decoding", "drafting", "formats", "recipes", "files", "methods", "hub", "training", "adaptation")
# Of hf_specdec.training, what the recipe of a method is made of.
RECIPES = {"features", "losses", "options", "passes", "recipe", "source", "step", "vocabulary"}
# Of hf_specdec.hub: what reads files for whoever asks, and what makes a drafter one that is saved and published.
READERS = {"card", "custom_generate", "files", "pretrained", "publishing", "saving", "target_files", "tensors"}
LEAVES = ("unsafe_keys", "version", "chat_template", "progress")  # modules that anything may import
METHOD_NAMES = {method.name for method in registry._BY_CLASS.values()}  # before tests register others
# The files that register a method: its own file, or the `__init__.py` of its folder.
METHOD_FILES = [
    path
    for path in FILES
    if path.is_relative_to(PACKAGE / "methods") and re.search(r"^register\w*\(", path.read_text(), re.MULTILINE)
]
METHOD_HOMES = sorted(path.parent.name if path.stem == "__init__" else path.stem for path in METHOD_FILES)


def identifier(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_parts(path: Path) -> list[str]:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def part_of(path: Path) -> str:
    return part_of_module(".".join(["hf_specdec", *module_parts(path)]))


def part_of_module(name: str) -> str:
    """The part of the house that a module, or a name in it, belongs to; empty for the package itself."""
    _, *parts = name.split(".")
    if parts[:1] == ["training"] and RECIPES.intersection(parts[1:2]):
        return "recipes"
    if parts[:1] == ["hub"] and READERS.intersection(parts[1:2]):
        return "files"
    return "formats" if parts[:2] == ["hub", "formats"] else parts[0] if parts else ""


def imported_modules(path: Path) -> set[str]:
    """Names of the hf_specdec modules that a file imports, inside functions too."""
    modules = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in modules if name.split(".")[0] == "hf_specdec"}


def test_imports_run_one_way() -> None:
    rank = {part: number for number, part in enumerate(ORDER)}
    for path in FILES:
        own = rank.get(part_of(path), len(ORDER))
        upwards = {
            str(node.module)
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ImportFrom)
            and str(node.module).startswith("hf_specdec.")
            and part_of_module(str(node.module)) not in LEAVES
            and rank.get(part_of_module(str(node.module)), len(ORDER)) > own
        }
        assert not upwards, identifier(path)


def test_only_what_methods_share_is_imported_by_another_method() -> None:
    shared = [path for path in (PACKAGE / "methods").glob("*.py") if path not in METHOD_FILES]
    for path in [*shared, *(PACKAGE / "drafting").glob("*.py")]:  # these know no method
        methods = {name for name in imported_modules(path) for method in METHOD_HOMES if f".{method}." in f"{name}."}
        assert not methods, identifier(path)


def test_the_shared_half_names_no_method_in_its_code() -> None:
    names = "|".join({*METHOD_HOMES, *FAMILIES, *MARGINAL_METHODS})
    for path in (PACKAGE / "decoding").rglob("*.py"):
        code = ast.unparse(without_docstrings(ast.parse(path.read_text()))).lower()
        code = code.replace("merged_adapters", "")  # an attribute of PEFT's layers
        assert not re.findall(rf"\w*(?:{names})\w*", code), identifier(path)


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Docstrings may cite a paper by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def test_lists_of_public_names_are_sorted_and_true() -> None:
    for path, node in ((each, node) for each in FILES for node in tree_of(each).body):
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            module = importlib.import_module(".".join(["hf_specdec", *module_parts(path)]))
            assert module.__all__ == sorted(module.__all__), identifier(path)
            assert all(hasattr(module, name) for name in module.__all__), identifier(path)


def test_modules_and_what_they_offer_are_documented() -> None:
    for path in FILES:
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{identifier(path)} says nothing of itself"
        missing = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]
        assert not missing, identifier(path)


@pytest.mark.parametrize("name", hf_specdec.__all__)
def test_public_names_are_documented_and_annotated(name: str) -> None:
    offered = getattr(hf_specdec, name)
    assert inspect.getdoc(offered)
    signature = inspect.signature(offered)
    assert inspect.isclass(offered) or signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name


def test_every_registered_method_takes_the_shared_tests() -> None:
    # A new method adds a row to METHODS in tests/method_table.py, or several that begin with its name.
    for name in {*MARGINAL_METHODS, *FAMILIES}:
        assert any(row.startswith(name) for row in METHODS), name


# What other parts ask about a method is in the registry: they import no method, and compare with no method's name.
ROOMS = (
    "files",
    "hub",
    "serving",
    "verification",
    "benchmark",
    "adaptation",
    "visualize",
    "integration",
    "cli",
    "commands",
)
EXCEPTIONS = {
    "hub/loading.py": {"merged"},  # a list of drafters means a merged one
}


def test_other_parts_ask_for_no_method_by_name() -> None:
    classes = {kind.__name__: registry._BY_CLASS[kind].name for kind in classes_of_methods()}
    homes = {kind.__module__.split(".")[2] for kind in classes_of_methods()}
    names = {*METHOD_HOMES, *homes, *METHOD_NAMES, *MARGINAL_METHODS}
    for path in (path for path in FILES if part_of(path) in ROOMS):
        found = {name for module in imported_modules(path) for name in names if f".methods.{name}." in f"{module}."}
        for node in ast.walk(without_docstrings(ast.parse(path.read_text()))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                found.add(node.value)
            elif isinstance(node, ast.Name | ast.Attribute):
                word = node.id if isinstance(node, ast.Name) else node.attr
                found.update(classes[each] for each in (word,) if each in classes)
        assert found == EXCEPTIONS.get(identifier(path), set()), identifier(path)


def classes_of_methods() -> list[type]:
    """The registered classes of this library; tests and documents register others."""
    return [kind for kind in registry._BY_CLASS if kind.__module__.startswith("hf_specdec.methods.")]


@pytest.mark.parametrize("layout", [each for each in known_layouts() if isinstance(each, Format)], ids=lambda x: x.name)
def test_published_layouts_are_named_by_their_method(layout: Format) -> None:
    assert layout in FAMILIES[layout.family].layouts


def test_methods_either_have_a_layout_for_the_engine_or_say_why_not() -> None:
    for method in map(registry._BY_CLASS.__getitem__, classes_of_methods()):
        written = [layout for layout in method.layouts if layout.write is not None]
        assert method.serving is not None
        assert bool(written) != bool(method.serving.not_exported), method.name


def test_drafters_of_derived_classes_are_of_the_method_of_their_base() -> None:
    for kind, method in list(registry._BY_CLASS.items()):
        derived = type("Derived", (kind,), {})
        assert method_of(object.__new__(derived)) is method
    assert method_of(object()) is None


def test_no_module_sets_attributes_of_a_class() -> None:
    for path in FILES:
        for node in tree_of(path).body:
            set_here = [
                ast.unparse(target)
                for target in (node.targets if isinstance(node, ast.Assign) else ())
                if isinstance(target, ast.Attribute)
            ]
            assert not set_here, identifier(path)


def test_imports_run_in_no_circles() -> None:
    """Every import counts: at the top, inside functions, and for type checkers only; `from a import b` is of a.b."""
    modules = {".".join(["hf_specdec", *module_parts(path)]): path for path in FILES}
    graph = {}
    for name, path in modules.items():
        imported = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {each if each in modules else str(node.module) for each in full}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        graph[name] = imported & modules.keys() - {name}
    reached = {name: reachable(graph, name) for name in graph}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    found = [
        {name.removeprefix("hf_specdec.") for name in circle}
        for circle in circles
        if circle and len({name.split(".")[2] for name in circle if name.split(".")[1] == "methods"}) != 1
    ]
    assert not found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules that a module imports, directly or through others."""
    found: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


# Packages that need not be installed, and what Windows lacks.
OPTIONAL = {"datasets", "fastapi", "imblearn", "lm_eval", "openai", "readline", "rich", "uvicorn"}
# The wraps, which importing a drafter enables; and transformers' server, which needs packages that are optional.
IMPORT_LATE = {
    f"{name}.py"
    for name in (
        "integration", "serving/transformers_server",
    )
}  # fmt: skip


def test_only_optional_packages_are_imported_inside_functions() -> None:
    for path in FILES:
        late = set()
        for function in ast.walk(tree_of(path)):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Import):
                        late |= {alias.name.split(".")[0] for alias in node.names}
                    elif isinstance(node, ast.ImportFrom):
                        late.add(str(node.module).split(".")[0])
        assert bool(late - OPTIONAL) == (identifier(path) in IMPORT_LATE), f"{identifier(path)}: {late}"


def test_every_mistake_of_the_list_can_still_be_planted() -> None:
    assert [right for module, _, right, _ in mistakes() if not is_plantable(module, right)] == []


# A change may lower it; a feature that needs more says so in its commit.
MOST_CODE_LINES = 28_455


def test_the_package_does_not_grow_unnoticed() -> None:
    lines = total(PACKAGE)
    assert lines <= MOST_CODE_LINES, f"{lines} lines of code: remove some, or raise MOST_CODE_LINES and say why"


def test_all_modules_can_be_imported_by_themselves() -> None:
    for module in pkgutil.walk_packages([str(PACKAGE)], "hf_specdec."):
        importlib.import_module(module.name)


def test_no_file_reads_the_environment_or_swallows_all_errors() -> None:
    # A switch that changes output is an argument; see the house style.
    for path, node in ((each, node) for each in FILES for node in ast.walk(tree_of(each))):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{identifier(path)}, line {node.lineno}: bare except"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in ("environ", "getenv"), f"{identifier(path)}, line {node.lineno}: the environment"


ROOT = PACKAGE.parent
SOURCES = sorted(path for folder in ("hf_specdec", "tests", "examples") for path in (ROOT / folder).rglob("*.py"))
# Words in backticks that are names elsewhere: a program, formatted keys, names of transformers and of the Hub client.
NAMES_ELSEWHERE = {"CandidateGenerator", "accuracy_2", "accuracy_layer_4", "create_commit", "torchrun"}


@pytest.mark.slow
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
        if path.name != "unsafe_keys.py"  # which is about names of transformers
        for name in re.findall(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`(?!`)", text)
        if not known.issuperset(name.split("."))
    ]
    assert not missing, "names that exist nowhere in the code"
