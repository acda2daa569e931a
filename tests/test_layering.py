"""The house's rules of who may import whom, read from the sources."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "edgemoe"
FILES = sorted(PACKAGE.rglob("*.py"))

# Who may import whom, by room; a room may always import itself.
NOUNS = {"bounds", "types", "errors", "config"}
LAYERS: dict[str, set[str]] = {
    "bounds": set(),
    "types": {"bounds"},
    "errors": set(),
    "config": {"errors"},
    "units": {"errors"},
    "config_load": {"config", "errors", "units"},
    "pace": set(),
    "durable": set(),
    "budgets": NOUNS | {"telemetry", "units"},
    "policy": {"types", "errors"},
    "telemetry": NOUNS | {"units"},
    "kernels": set(),
    "cluster.wire": {"bounds", "types", "errors"},
    "cluster.control": {"cluster.wire", "policy", "durable"} | NOUNS,
    "cluster.data": {"cluster.wire", "pace", "bounds", "types", "errors"},
    "model": {"types", "errors", "kernels"},
    "experts": {"policy", "telemetry", "kernels", "pace", "units", "durable"} | NOUNS,
    "engine": {"model", "experts", "policy", "telemetry", "units"} | NOUNS,
    "pack": {"model", "experts", "units", "durable"} | NOUNS,
    "models": {"pack", "experts", "model", "units"} | NOUNS,
    "api": NOUNS,
    "front": {"api", "cluster.wire", "cluster.control", "policy", "telemetry"} | NOUNS,
    "demo": {"errors"},
    "service": {"errors"},
    "cluster": set(),
    "guard": {"errors"},
}
COMPOSERS = {"", "__main__", "cli", "daemon", "worker", "replay"}  # put rooms together, so may import any
ONLY_IN = {  # module -> the room or file that may import it
    "zmq": "cluster",
    "aiofiles": "experts/store.py",
    "psutil": "telemetry/probes.py",
    "pynvml": "telemetry/probes.py",
}
NOWHERE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "transformers", "lightning", "pytorch_lightning"}
TORCH_FREE = (
    "edgemoe.front.main",
    "edgemoe.cli",
    "edgemoe.config.loading",
    "edgemoe.config.budgets",
    "edgemoe.families.spec",
)


def room_of(module: str) -> str:
    """The room of "edgemoe.store.reader" is "experts", that of "edgemoe.cluster.rpc.ipc" is "cluster.wire"."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[:1] == ["cluster"] else parts[0] if parts else ""


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


ROOMS = {room_of(module_of(file)) for file in FILES} - {""}


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that `file` imports, anywhere in it, with its line."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            yield node.module or "", node.lineno
            if node.module and node.module.startswith("edgemoe"):
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def typing_only_lines(file: Path) -> set[int]:
    """Lines under `if TYPE_CHECKING`, which never run."""
    blocks = (
        node
        for node in ast.walk(tree(file))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(PACKAGE)) for file in FILES])
def test_imports_go_downward_only(file: Path) -> None:
    room = room_of(module_of(file))
    if room in COMPOSERS:
        return
    assert room in LAYERS, f"{file} is in no room that this test knows: say there what {room} may import"
    allowed = LAYERS[room]
    for module, line in imports(file):
        if not module.startswith("edgemoe.") or room_of(module) not in ROOMS - {room}:
            continue
        assert room_of(module) in allowed, f"{file}:{line}: {room} may not import {module}"


@pytest.mark.parametrize(("library", "place"), ONLY_IN.items())
def test_a_library_with_one_home_is_imported_there_only(library: str, place: str) -> None:
    for file in FILES:
        inside = file.relative_to(PACKAGE)
        if any(module.split(".")[0] == library for module, _ in imports(file)):
            assert inside == Path(place) or inside.is_relative_to(place), f"{file} imports {library}"


def test_nothing_of_ours_unpickles() -> None:
    for file in [*FILES, *sorted((ROOT / "scoutgate").rglob("*.py"))]:
        typing_only = typing_only_lines(file)
        for module, line in imports(file):
            forbidden = NOWHERE if file.is_relative_to(PACKAGE) else {"pickle", "cloudpickle", "dill", "shelve"}
            assert line in typing_only or module.split(".")[0] not in forbidden, f"{file}:{line} imports {module}"
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = f"{node.value.id}.{node.attr}"
                assert called not in {"torch.load", "torch.save", "joblib.load"}, f"{file}:{node.lineno}: {called}"


def test_numba_keeps_no_disk_cache() -> None:
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.keyword) and node.arg == "cache" and isinstance(node.value, ast.Constant):
                assert not node.value.value, f"{file}:{node.value.lineno}: Numba's cache pickles"


@pytest.mark.parametrize("module", [name for name in TORCH_FREE if name in {module_of(file) for file in FILES}])
def test_the_front_imports_neither_torch_nor_numba(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'numba') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by it, and would collect none."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
