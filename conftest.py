"""What pytest leaves out: combinations of parameters (`--exhaustive`).

A test with many combinations of parameters carries a mark, by which only some of them are run; with `--exhaustive`
(`make test-all`) all are. A combination that is named on the command line is run whatever the mark.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

MARKS = {
    "each_value": "run so many combinations of parameters that each value of each parameter occurs",
    "each_pair": "run so many combinations of parameters that each value meets each value of every other parameter",
    "one_in(n)": "run the first combination of parameters and every n-th after it",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run all combinations of parameters")


def pytest_configure(config: pytest.Config) -> None:
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}; all of them with --exhaustive")
    config.addinivalue_line("markers", "by_the_clock: rounds draft only where that pays, as users have it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("exhaustive"):
        return
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        if mark := cases[0].get_closest_marker("one_in"):
            left_out.update(case for index, case in enumerate(cases) if index % mark.args[0])
        for name, together in (("each_value", 1), ("each_pair", 2)):
            if cases[0].get_closest_marker(name):
                left_out.update(set(cases) - set(covering(cases, together)))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def covering(cases: list[pytest.Function], together: int) -> list[pytest.Function]:
    """Few of the cases of a test in which all the values meet, `together` at a time, that meet in any case."""
    values = {case: [(name, repr(value)) for name, value in sorted(case.callspec.params.items())] for case in cases}
    meetings = {case: set(itertools.combinations(values[case], together)) for case in cases}
    missing, used, chosen = set().union(*meetings.values()), Counter[tuple[str, str]](), []
    while missing:
        # The case that adds most; of several the one whose values were chosen least.
        best = max(cases, key=lambda case: (len(meetings[case] & missing), -sum(used[value] for value in values[case])))
        chosen.append(best)
        used.update(values[best])
        missing -= meetings[best]
    return chosen
