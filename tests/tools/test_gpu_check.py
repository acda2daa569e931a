"""tools/gpu_check asks a machine for exactly the modules that the GPU's tests and benchmark import."""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
GIVEN = {"torch", "numpy"}  # without these nobody would start it


def program() -> ModuleType:
    module = ModuleType("gpu_check")
    module.__file__ = str(ROOT / "tools" / "gpu_check")
    SourceFileLoader("gpu_check", module.__file__).exec_module(module)
    return module


def imported(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports at its top level."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def ours(name: str, beside: Path) -> Path | None:
    """Returns the project's file of a module, sought from the folder `beside`; None for other projects' modules."""
    for folder in (beside, ROOT, ROOT / "tests"):
        for tail in (".py", "/__init__.py"):
            if (path := folder / (name.replace(".", "/") + tail)).exists():
                return path
    return None


def test_nothing_is_imported_on_a_bare_machine_that_was_not_asked_for() -> None:
    check = program()
    tests = check.gpu_files()
    waiting = [
        *tests,
        *{path.with_name("conftest.py") for path in tests},
        ROOT / "tests/conftest.py",
        ROOT / "tools/bench/gpu.py",
        ROOT / "tools/bench/gpu_link.py",
    ]
    foreign = foreign_modules(waiting)
    assert {name: str(path) for name, path in foreign.items() if name not in {*check.NEEDED, *GIVEN}} == {}


def test_the_daemon_imports_nothing_that_was_not_asked_for() -> None:
    check = program()
    rooms = [path for path in (ROOT / "edgemoe").iterdir() if path.name not in ("cli", "replay", "__pycache__")]
    foreign = foreign_modules(
        [ROOT / "tools/bench/gpu_demo.py", *(file for room in rooms for file in room.rglob("*.py"))]
    )
    assert {"starlette", "llguidance", "zmq"} <= foreign.keys()
    expected = {*check.NEEDED, *check.SERVING, *GIVEN}
    assert {name: str(path) for name, path in foreign.items() if name not in expected} == {}


def foreign_modules(waiting: list[Path]) -> dict[str, Path]:
    """Returns other projects' modules that these files and our modules behind them import, each with one importer."""
    seen, foreign = set[Path](), dict[str, Path]()
    while waiting:
        if (path := waiting.pop()) in seen or not path.exists():
            continue
        seen.add(path)
        for name in imported(path):
            if (found := ours(name, path.parent)) is not None:
                waiting.append(found)
            elif ours(top := name.split(".")[0], path.parent) is None and not (ROOT / top).is_dir():
                foreign.setdefault(top, path)
    assert len(seen) > 50, "the walk found nothing"
    return {name: path for name, path in foreign.items() if name not in sys.stdlib_module_names}


def test_carried_wheels_are_the_needed_ones_and_new_enough() -> None:
    check = program()
    carried = {re.split("[>=]+", name)[0]: re.split("[>=]+", name)[1:] for name in check.CARRIED}
    assert carried.keys() <= {*check.NEEDED.values(), *check.SERVING.values()}
    for name, least in check.LEAST.items():
        assert carried[name] == [".".join(map(str, least))]


def test_a_part_that_is_cut_off_leaves_its_figures_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = program().Check(tmp_path, tmp_path / "out", time.monotonic() + 60)
    told = "import time; print('{\"a\": 1}', flush=True); print('words'); time.sleep(600)"
    (tmp_path / "slow.py").write_text(told)
    checks._env["PYTHONPATH"] = str(tmp_path)
    checks.bench("part", 2.0, "slow")
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[0] == {"part": {"a": 1}}
    assert said[1]["part"]["error"] == "cut off after 2 s"
    assert [json.loads(line) for line in (tmp_path / "out" / "figures.jsonl").read_text().splitlines()] == said
    checks.bench("other", 9.0, "nothing_of_that_name")
    assert "No module named" in json.loads(capsys.readouterr().out.splitlines()[-1])["other"]["said"]


def test_outcomes_of_tests_are_read_from_pytest_s_running_output() -> None:
    check = program()
    lines = (
        "[gw0] [  5%] PASSED tests/a.py::test_b[in memory-1] ",
        "tests/a.py::test_b ",
        "[gw12] [100%] FAILED tests/a.py::test_c",
    )
    found = [match.groups() for line in lines if (match := check.OUTCOME.search(line))]
    assert found == [("PASSED", "tests/a.py::test_b[in memory-1]"), ("FAILED", "tests/a.py::test_c")]
