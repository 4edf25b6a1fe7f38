"""Texts for requests such as "Summarize ...": documentation of the installed packages with permissive licences.

    python examples/smollm2-135m/gather_texts.py texts.jsonl
    hf-specdec write --questions 20000 --texts texts.jsonl ...

Docstrings, and the paragraphs of long descriptions. Each line has `text` and `package`; the order is random, with a
fixed seed, so that the first thousand lines already come from many packages.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation)\b")
LEAST, MOST = 200, 1500  # characters
MOST_PER_PACKAGE = 1500


def is_permissive(package: Distribution) -> bool:
    """Whether the package's metadata names a permissive licence, and no GPL."""
    fields = [package.metadata.get(name) or "" for name in ("License-Expression", "License")]
    named = " ".join([*fields, *(package.metadata.get_all("Classifier") or [])])
    return bool(PERMISSIVE.search(named)) and "GPL" not in named


def texts_of(package: Distribution) -> Iterator[str]:
    """Docstrings and descriptions of a package."""
    description = str(package.metadata.get_payload())
    yield from (part.strip() for part in re.split(r"\n#+ |\n\n\n", description))
    for file in package.files or []:
        if file.suffix != ".py" or "test" in str(file):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(Path(str(file.locate())).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue  # not installed, or written for another Python
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield ast.get_docstring(node) or ""


def main(output: Path) -> None:
    """Writes the texts."""
    rows: dict[str, str] = {}
    for package in sorted(distributions(), key=lambda each: each.name):
        if is_permissive(package):
            found = [text for text in texts_of(package) if LEAST <= len(text) <= MOST and "http" not in text]
            random.Random(0).shuffle(found)
            rows |= dict.fromkeys(found[:MOST_PER_PACKAGE], package.name)
    lines = [json.dumps({"text": text, "package": name}) for text, name in rows.items()]
    random.Random(0).shuffle(lines)
    output.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{output}: {len(lines):,} texts of {len(set(rows.values()))} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
