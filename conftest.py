"""Which tests `make test` runs: not the slow ones, and of those with many combinations of parameters only some.

With `--exhaustive` (`make test-all`, which CI runs) all are run; so is everything if the command line names a test.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

FEW = 6  # combinations of parameters; a test with more of them
COMBINATIONS = 2  # runs only so many


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run slow tests, and all combinations of parameters")
    parser.addoption("--method", help="a file with a method of your own: -k with its name runs the shared tests of it")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than two seconds; run with --exhaustive")
    config.addinivalue_line(
        "markers", "combinations(n): without --exhaustive, run so many combinations of its parameters"
    )
    config.addinivalue_line("markers", "by_the_clock: rounds draft only where that pays, as users have it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (
        config.getoption("exhaustive")
        or config.getoption("method")
        or any("::" in argument for argument in config.args)
    ):
        return
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for cases in tests.values():
        if cases[0].get_closest_marker("slow") is not None:
            continue
        if len(cases) > FEW:
            # By a hash of their names: every method and every target meets many of the tests.
            mark = cases[0].get_closest_marker("combinations")
            cases.sort(key=lambda case: zlib.crc32(case.nodeid.encode()))
            cases = cases[: mark.args[0] if mark else COMBINATIONS]
        chosen.update(cases)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
