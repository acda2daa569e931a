"""What the GPU's tests and benchmark import is what tools/gpu_check asks a machine for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
GIVEN = {"torch", "numpy"}  # without these nobody would start it


def program() -> ModuleType:
    module = ModuleType("gpu_check")
    module.__file__ = str(ROOT / "tools" / "gpu_check")
    SourceFileLoader("gpu_check", module.__file__).exec_module(module)
    return module


def imported(path: Path) -> Iterator[str]:
    """Modules that are imported as soon as the file is."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def ours(name: str, beside: Path) -> Path | None:
    """The project's file of that name, as a file of the folder `beside` finds it; None: it is somebody else's."""
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
    ]
    seen, foreign = set[Path](), dict[str, Path]()
    while waiting:
        if (path := waiting.pop()) in seen or not path.exists():
            continue
        seen.add(path)
        for name in imported(path):
            if (found := ours(name, path.parent)) is not None:
                waiting.append(found)
            elif ours(name.split(".")[0], path.parent) is None and name.split(".")[0] not in sys.stdlib_module_names:
                foreign.setdefault(name.split(".")[0], path)
    assert len(seen) > 50, "the walk found nothing"
    assert {name: str(path) for name, path in foreign.items() if name not in {*check.NEEDED, *GIVEN}} == {}
    assert set(check.CARRIED) <= set(check.NEEDED.values())
