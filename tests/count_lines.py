"""Counts lines of code, without docstrings, comments and blank lines: `python tests/count_lines.py [folder ...]`."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.INDENT, tokenize.NEWLINE,
    tokenize.NL,
}  # fmt: skip


def code_lines(path: Path) -> int:
    """The lines of a Python file that hold code."""
    source = path.read_text(encoding="utf-8")
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                assert first.end_lineno is not None
                lines -= set(range(first.lineno, first.end_lineno + 1))
    return len(lines)


def total(folder: Path) -> int:
    """The lines of code of all Python files in a folder."""
    return sum(map(code_lines, folder.rglob("*.py")))


if __name__ == "__main__":
    package = Path(__file__).parents[1] / "hf_specdec"
    for folder in map(Path, sys.argv[1:]) if sys.argv[1:] else (package, *sorted(package.iterdir())):
        if folder.is_dir() and any(folder.rglob("*.py")):
            print(f"{total(folder):7,}  {folder}")
