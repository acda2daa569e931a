"""A pytest plugin that runs the tests of a room that fit into a time budget, and names the ones it leaves out.

Durations of earlier runs lie in pytest's cache; a test that was never timed is run. The option is `--budget-s`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

CALLS, SETUPS = "edgemoe/call_s", "edgemoe/setup_s"  # by test; by file, for fixtures that its tests share
SHOWN = 5


def chosen(
    tests: Iterable[str], call_s: dict[str, float], setup_s: dict[str, float], budget_s: float
) -> tuple[set[str], dict[str, float]]:
    """Returns the tests to run, the shortest first until the budget is spent, and the others with their times."""
    files = defaultdict[str, list[str]](list)
    for test in tests:
        files[test.partition("::")[0]].append(test)
    cost_s = {
        test: call_s.get(test, 0.0) + setup_s.get(file, 0.0) / len(inside)
        for file, inside in files.items()
        for test in inside
    }
    run, opened, spent_s = set[str](), set[str](), 0.0
    for test in sorted(cost_s, key=lambda each: (cost_s[each], each)):
        file = test.partition("::")[0]
        more_s = call_s.get(test, 0.0) + (0.0 if file in opened else setup_s.get(file, 0.0))
        if spent_s + more_s <= budget_s or not more_s:
            spent_s += more_s
            run.add(test)
            opened.add(file)
    return run, {test: seconds for test, seconds in cost_s.items() if test not in run}


class TimeBudget:
    """Times every test, and with `--budget-s` deselects the longest."""

    def __init__(self, config: pytest.Config) -> None:
        assert config.cache is not None
        self.cache = config.cache
        self.is_worker = hasattr(config, "workerinput")
        self.budget_s: float | None = config.getoption("--budget-s")
        self.call_s: dict[str, float] = self.cache.get(CALLS, {})
        self.setup_s: dict[str, float] = self.cache.get(SETUPS, {})
        self.left_out: dict[str, float] = {}
        self.setups_now_s = dict[str, float]()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.budget_s is None:
            return
        run, self.left_out = chosen([item.nodeid for item in items], self.call_s, self.setup_s, self.budget_s)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in run])
        items[:] = [item for item in items if item.nodeid in run]
        if self.is_worker:
            config.workeroutput["left_out"] = self.left_out  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.left_out = getattr(node, "workeroutput", {}).get("left_out", self.left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.when == "call":
            self.call_s[report.nodeid] = round(report.duration, 3)
        elif report.when == "setup":
            self.setups_now_s[file] = max(self.setups_now_s.get(file, 0.0), round(report.duration, 3))

    def pytest_sessionfinish(self) -> None:
        if not self.is_worker:
            self.cache.set(CALLS, self.call_s)
            self.cache.set(SETUPS, {**self.setup_s, **self.setups_now_s})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out:
            total_s = sum(self.left_out.values())
            terminalreporter.write_line(
                f"left out for time: {len(self.left_out)} tests of {total_s:.0f} s, the longest:"
            )
            for test in sorted(self.left_out, key=lambda each: -self.left_out[each])[:SHOWN]:
                terminalreporter.write_line(f"  {self.left_out[test]:6.1f} s  {test}")
