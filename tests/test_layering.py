"""The rules for imports between rooms, checked in the sources."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.prose import nodes_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "edgemoe"
FILES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "scoutgate").rglob("*.py")])

# The rooms that each room may import, from the bottom up. A room is a folder or a file. It may always import itself and
# the rooms in it; permission for a room includes the rooms in it.
NOUNS = {"types", "errors", "config.settings"}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "guard": {"errors"},
    "durable": set(),
    "outputs": {"errors"},
    "rights": {"durable", "errors"},
    "ticking": set(),
    "heap": {"ticking"},
    "types": set(),
    "helper": {"errors", "types"},
    "config": {"durable", "errors", "types"},
    "demo": {"errors"},
    "policy": {"types", "errors"},
    "telemetry": NOUNS | {"config.sizes", "durable"},
    "families": {"errors", "types"},
    "store": NOUNS | {"config.sizes", "demo", "durable", "encodings", "families"},
    "encodings": {"types"},
    "jit": {"durable", "errors"},
    "kernels": {"types"},
    "kernels.cpu": {"jit", "encodings", "types"},
    "kernels.gpu": {"encodings", "types"},
    "model": {"types", "errors", "encodings", "families", "jit", "kernels"},
    "experts.tiers": NOUNS | {"jit", "kernels", "store"},
    "experts.transfer": NOUNS | {"experts.tiers", "durable"},
    "experts.predict": NOUNS | {"experts.tiers", "policy", "telemetry", "config.sizes", "jit", "kernels", "durable"},
    "experts.compute": NOUNS
    | {"experts.tiers", "experts.transfer", "experts.predict", "jit", "kernels", "policy", "store", "telemetry"},
    "experts": NOUNS | {"config.budgets", "jit", "kernels", "telemetry"},
    "engine": NOUNS | {"config.sizes", "experts", "helper.turns", "families", "model", "policy", "telemetry"},
    "wire": {"errors"},
    "ipc": {"wire", "types", "errors", "durable"},
    "cluster": set(),
    "cluster.rpc": {"wire", "types", "errors", "ticking", "durable", "telemetry.rate_limited_log"},
    "cluster.control.messages": {"wire", "ipc.messages", "cluster.rpc", "types"},
    "cluster.control.coordination": NOUNS
    | {
        "wire",
        "cluster.rpc",
        "cluster.control.messages",
        "durable",
        "helper.tied_program",
        "telemetry.rate_limited_log",
    },
    "cluster.control": NOUNS
    | {"wire", "ipc.messages", "cluster.rpc", "durable", "helper", "policy", "ticking", "telemetry.rate_limited_log"},
    "cluster.data": {
        "wire",
        "ipc.messages",
        "cluster.rpc",
        "telemetry.unit_time",
        "telemetry.rate_limited_log",
        "ticking",
        "types",
        "errors",
    },
    "api.body_bounds": {"errors"},
    "api.field_names": {"errors"},
    "api.peer_formats": {"errors"},
    "api.custom_tools": {"types"},
    "api.spellings": {"api.peer_formats"},
    "api.peer_fields": {"errors", "api.custom_tools", "api.peer_formats", "api.spellings"},
    "api.schema_forms": set(),
    "api.schema": {"types", "errors", "api.body_bounds", "api.field_names", "api.peer_fields", "api.schema_forms"}
    | {"api.spellings"},
    "api.backend": {"types", "errors"},
    "api.api_keys": {"types", "durable", "errors"},
    "api.metrics": {"types", "errors", "api.backend"},
    "api.dialects": {"types"},
    "api.llama_bodies": {"api.schema"},
    "api.text": {"types", "errors", "guard", "heap", "helper", "api.schema", "api.dialects"},
    "api.generate": {
        "types",
        "errors",
        "guard",
        "heap",
        "helper",
        "api.body_bounds",
        "api.field_names",
        "api.schema",
        "api.schema_forms",
        "api.backend",
        "api.metrics",
        "api.dialects",
        "api.text",
    },
    "api.http": {
        "types",
        "errors",
        "api.api_keys",
        "api.schema",
        "api.metrics",
        "api.dialects",
        "api.text",
        "api.generate",
        "policy.shares",
        "telemetry.rate_limited_log",
    },
    "api.endpoints": {
        "api.custom_tools",
        "api.llama_bodies",
        "types",
        "errors",
        "api.body_bounds",
        "api.schema",
        "api.field_names",
        "api.peer_fields",
        "api.backend",
        "api.metrics",
    }
    | {"api.dialects", "api.text", "api.generate", "api.http", "policy.shares"},
    "api": NOUNS | {"helper"},
    "front": NOUNS
    | {"api", "wire", "ipc", "cluster.rpc", "cluster.control", "policy", "telemetry", "ticking", "durable"}
    | {"config.budgets", "config.served_models", "config.sizes", "families", "store"},
    "scoutgate": {
        "errors",
        "durable",
        "rights",
        "cli.output",
        "types",
        "config",
        "encodings",
        "experts.predict",
        "replay",
        "store",
        "telemetry",
    },
}
COMPOSERS = {  # combine rooms, or are a process: may import any
    "__main__",
    "cli",
    "cluster.control.planning.placement_child",
    "cluster.control.planning.fitting_child",
    "front.main",
    "front.witness",
    "worker",
    "replay",
}
ONLY_IN = {  # module -> the rooms that may import it
    "zmq": ("cluster", "ipc"),
    "aiofiles": ("store.reader",),
    "huggingface_hub": ("store.hub",),
    "psutil": ("telemetry.probes",),
    "pynvml": ("telemetry.probes",),
}
NOWHERE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "transformers", "lightning", "pytorch_lightning"}
CLUSTER_FREE = ("worker.service", "ipc.engine_socket", "api.app", "front.main")
TORCH_FREE = ("front.main", "cli", "config.loading", "config.budgets", "families.config", "store.packer")


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def inside(module: str) -> str:
    """Removes the package: "experts.tiers.slab" for "edgemoe.experts.tiers.slab"; other packages' modules stay."""
    return module.removeprefix("edgemoe.")


def room_of(module: str) -> str:
    """Returns the smallest room of a module: "experts.tiers" for "experts.tiers.slab"."""
    rooms = [room for room in (*LAYERS, *COMPOSERS) if within(module, room)]
    return max(rooms, key=len, default="")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {inside(module_of(file)) for file in FILES}


@functools.cache
def imports(file: Path) -> list[tuple[str, int]]:
    """Returns every module that `file` imports, anywhere in it, with its line."""
    return list(imported(file))


def imported(file: Path) -> Iterator[tuple[str, int]]:
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if inside(whole) in MODULES else node.module or "", node.lineno


def typing_only_lines(file: Path) -> set[int]:
    """Returns the lines under `if TYPE_CHECKING`, which never run."""
    blocks = (
        node
        for node in nodes_of(file)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}


def wrong_imports(file: Path) -> Iterator[str]:
    """Yields the imports of a file that the order of the rooms does not allow."""
    module = inside(module_of(file))
    room = room_of(module)
    if not within(module, "scoutgate"):
        trained = [line for name, line in imports(file) if within(name, "scoutgate")]
        if trained:
            yield f"{file}:{trained}: scoutgate imports edgemoe, never the other way"
    if room in COMPOSERS or module in ("edgemoe", "__main__"):
        return
    if not room:
        yield f"{file} is in no room that this test knows: say in LAYERS which rooms it may import"
        return
    allowed = LAYERS[room] | {room}
    for name, line in imports(file):
        target = inside(name)
        ours = name.startswith("edgemoe.") or within(name, "scoutgate")
        if ours and not any(within(target, one) for one in allowed):
            yield f"{file}:{line}: {room} may not import {name}"


def test_imports_go_downward_only() -> None:
    assert not (found := [wrong for file in FILES for wrong in wrong_imports(file)]), "\n".join(found)


def test_a_library_with_one_home_is_imported_there_only() -> None:
    for file in FILES:
        for library in {module.split(".")[0] for module, _ in imports(file)} & ONLY_IN.keys():
            assert any(within(inside(module_of(file)), place) for place in ONLY_IN[library]), (
                f"{file} imports {library}"
            )


def test_nothing_of_ours_unpickles() -> None:
    for file in FILES:
        typing_only = typing_only_lines(file)
        for module, line in imports(file):
            forbidden = NOWHERE if file.is_relative_to(PACKAGE) else {"pickle", "cloudpickle", "dill", "shelve"}
            assert line in typing_only or module.split(".")[0] not in forbidden, f"{file}:{line} imports {module}"
        for node in nodes_of(file):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = f"{node.value.id}.{node.attr}"
                assert called not in {"torch.load", "torch.save", "joblib.load"}, f"{file}:{node.lineno}: {called}"


def test_no_pattern_is_matched_otherwise_by_a_python_that_is_admitted() -> None:
    """Possessive repeats and atomic groups match too little before Python 3.11.5, as in Debian 12."""
    later = re.compile(r"[*+?}]\+|\(\?>")
    for file in FILES:
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
                texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                odd = [text for text in texts if isinstance(text, str) and later.search(text.replace("\\+", ""))]
                assert not odd, f"{file}: {odd}"


def test_numba_keeps_no_disk_cache() -> None:
    for file in FILES:
        for node in nodes_of(file):
            if isinstance(node, ast.keyword) and node.arg == "cache" and isinstance(node.value, ast.Constant):
                assert not node.value.value, f"{file}:{node.value.lineno}: Numba's cache pickles"


def test_the_front_imports_neither_torch_nor_numba() -> None:
    """One process imports all; the first module that loads either is named."""
    code = (
        "import importlib, sys\n"
        f"for name in {[f'edgemoe.{name}' for name in TORCH_FREE]}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'numba'} & sys.modules.keys()\n"
        "    assert not heavy, (name, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_one_box_alone_loads_nothing_of_the_cluster() -> None:
    modules = ", ".join(f"edgemoe.{name}" for name in CLUSTER_FREE)
    code = f"import sys, {modules}; print([name for name in sys.modules if name.startswith('edgemoe.cluster')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports test files by their names, and would fail."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
