"""Settings that hold for all tests: no network, one thread, a fixed seed per test."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

# Before transformers is imported: no network, and nothing that the user of this machine has downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PIP_NO_INDEX"] = os.environ["PIP_NO_FIND_LINKS"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_specdec-tests-")

import pytest
import torch
from torch import Tensor

from hf_specdec.drafting.drafter import always_drafting
from tests.method_table import FREE, METHODS, STEADY

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Adds the method of `--method`, whose file has `make(target) -> Drafter`, under the name of the file."""
    if file := config.getoption("method"):
        name = Path(file).stem
        sys.path.insert(0, str(Path(file).parent))  # its classes are pickled by the name of their module
        METHODS[name] = importlib.import_module(name).make
        STEADY.append(name)
        FREE.append(name)


atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture
def softmax_in_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention in float64 whose softmax is in float64 too: transformers asks for float32.

    There the lowest float64 number, of its masks, is -inf, and rows with left padding are NaN throughout: two
    runs that give NaN are equal, whatever is wrong with their masks.
    """
    original = torch.nn.functional.softmax

    def softmax(
        input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tensor:
        return original(input, dim, _stacklevel, None if input.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


@pytest.fixture
def chdir(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a folder the current one until the test ends."""
    return monkeypatch.chdir


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[TextIO], None]:
    """Takes a stream as stdin until the test ends."""
    return lambda stdin: monkeypatch.setattr(sys, "stdin", stdin)


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package one that is not installed, until the test ends."""
    return lambda package: monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def drafts_in_every_round(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rounds draft complete trees, where a clock decides by default. `by_the_clock` marks tests of that decision."""
    with nullcontext() if request.node.get_closest_marker("by_the_clock") else always_drafting():
        yield


@pytest.fixture
def whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished rows stay in the batch, for tests that look at rows of it by their number."""
    monkeypatch.setattr("hf_specdec.decoding.loop.SpeculativeDecoding.may_drop_rows", False)


@pytest.fixture
def draws(pytestconfig: pytest.Config) -> int:
    """How often tests of sampling draw that there are many of; a chi-square bound holds for any number."""
    return 6_000 if pytestconfig.getoption("exhaustive") else 2_000
