"""Time spent by the tests: wall and CPU seconds by folder, file, test and fixture.

`pytest --time-table=FILE` writes the table as Markdown. CPU seconds include all processes that a test starts, those
that still live as well; a fixture's seconds are in those of the test that asked for it first.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

_LONGEST = 30


def pytest_addoption(parser):
    parser.addoption("--time-table", metavar="FILE", help="write wall and CPU seconds by folder, file, test, fixture")


def pytest_configure(config):
    if config.getoption("--time-table"):
        config.pluginmanager.register(_Clock(config), "time-table")


class _Clock:
    """Seconds of this process's tests; the controller adds up those of all workers."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._spent: dict[str, list[tuple[str, float, float]]] = {"test": [], "fixture": []}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        before = _now()
        try:
            return (yield)
        finally:
            self._add("test", item.nodeid, before)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef):
        before = _now()
        try:
            return (yield)
        finally:
            self._add("fixture", f"{fixturedef.baseid}::{fixturedef.argname}", before)

    def pytest_sessionfinish(self):
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["time_table"] = json.dumps(self._spent)
        else:
            file = Path(self._config.getoption("--time-table"))
            file.write_text(_as_markdown(self._spent))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        for kind, spent in json.loads(getattr(node, "workeroutput", {}).get("time_table", "{}")).items():
            self._spent[kind] += map(tuple, spent)

    def _add(self, kind: str, name: str, before: tuple[float, float]) -> None:
        wall, cpu = _now()
        self._spent[kind].append((name, wall - before[0], max(cpu - before[1], 0.0)))


def _now() -> tuple[float, float]:
    """The clock, and CPU seconds of this process, of its descendants and of those that they have waited for."""
    used = os.times()
    cpu = used.user + used.system + used.children_user + used.children_system
    for process in _descendants():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        cpu += times.user + times.system + times.children_user + times.children_system
    return time.monotonic(), cpu


def _descendants() -> list[psutil.Process]:
    """Return the processes below this one, without a look at all those of the machine if there are none."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    return psutil.Process().children(recursive=True)


def _as_markdown(spent: dict[str, list[tuple[str, float, float]]]) -> str:
    tests = spent["test"]
    parts = [
        _table("folder", [(name.rpartition("/")[0], wall, cpu) for name, wall, cpu in _by_file(tests)]),
        _table("file", _by_file(tests)),
        _table("test", tests),
        _table("fixture", spent["fixture"]),
    ]
    return "\n".join(parts)


def _by_file(tests: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    return [(name.partition("::")[0], wall, cpu) for name, wall, cpu in tests]


def _table(title: str, spent: list[tuple[str, float, float]]) -> str:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, wall, cpu in [*spent, *(("all", wall, cpu) for _, wall, cpu in spent)]:
        for column, value in enumerate((1, wall, cpu)):
            sums[name][column] += value
    longest = sorted(sums.items(), key=lambda row: -row[1][2])[:_LONGEST]
    lines = [f"| {name} | {count:.0f} | {wall:.1f} | {cpu:.1f} |" for name, (count, wall, cpu) in longest]
    return "\n".join([f"| {title} | count | wall s | CPU s |", "|---|---|---|---|", *lines, ""])
