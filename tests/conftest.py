"""Fixtures and settings that all test folders share."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import io
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.examples import register_profiles
from support.power import Disk
from support.time_budget import TimeBudget

from edgemoe.heap import freeze_objects
from edgemoe.jit.env import WORKER_ENV

# Tests multiply small matrices, often on a busy box. OpenBLAS's threads wait by spinning, from NumPy's import on.
SPINS = {"GOMP_SPINCOUNT": "2000", "OPENBLAS_NUM_THREADS": "1"}
for _name, _value in {**WORKER_ENV, **SPINS}.items():  # before anything loads NumPy or torch
    os.environ.setdefault(_name, _value)

register_profiles()
gc.disable()  # until the tests are collected, which makes many objects and no garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget-s", type=float, help="run the shortest tests, as many as this number of seconds allows")


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("cacheprovider"):
        config.pluginmanager.register(TimeBudget(config), "time-budget")


COLLECT_S = 120.0  # that other workers wait for the first one


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Has the first of several workers collect alone: on a fresh clone it compiles every source, and keeps the result.

    A room with a time budget has few files, and its workers collect at once.
    """
    worker: dict[str, str] | None = getattr(session.config, "workerinput", None)
    if worker is None or session.config.getoption("--budget-s") is not None:
        return (yield)
    collected = Path(tempfile.gettempdir()) / f"edgemoe-collected-{worker['testrunuid']}"
    end_s = time.monotonic() + COLLECT_S
    if worker["workerid"] != "gw0":
        while not collected.exists() and time.monotonic() < end_s:
            time.sleep(0.1)
        return (yield)
    session.config.add_cleanup(lambda: collected.unlink(missing_ok=True))
    try:
        return (yield)
    finally:
        collected.touch()


SLOW_TIMEOUT_S = 3600  # of slow tests that state none themselves


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives slow tests their timeout, and sorts files marked `early` to the front, so that none of them runs alone."""
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leaves all modules to no garbage collection, of which one over their objects takes half a second."""
    freeze_objects()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Reports the stacks of all tasks after a time-out, for the traceback ends in the loop's select."""
    report = yield
    if call.excinfo is not None and "Timeout" in str(call.excinfo.value):
        for task in (one for one in gc.get_objects() if issubclass(type(one), asyncio.Task) and not one.done()):
            task.print_stack(file=(text := io.StringIO()))
            report.sections.append((task.get_name(), text.getvalue()))
    return report


def pytest_unconfigure() -> None:
    """Dumps every thread and exits if a thread that a test left behind keeps this process alive.

    Workers of xdist are exempt: after their tests they wait for each other. A starved machine takes minutes to end.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        faulthandler.dump_traceback_later(600, exit=True)


@pytest.fixture(autouse=True)
def _logging_is_put_back() -> Iterator[None]:
    """Detaches the log handlers of commands run in this process, whose stream closes when their test ends."""
    root, ours = logging.getLogger(), logging.getLogger("edgemoe")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before
    logging.captureWarnings(False)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Records all writes from here on, and the files that a power loss would leave."""
    return Disk(monkeypatch)
