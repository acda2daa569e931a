"""Which tests answer for which sources."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.mutation.mutants import Mutant, mutants_of

EQUIVALENTS = Path(__file__).with_name("equivalents.toml")


@dataclass(frozen=True)
class Room:
    """Folders or files of sources, and patterns of test files, from the root."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]

    def files(self, root: Path) -> list[Path]:
        found = [root / source for source in self.sources]
        return sorted(file for one in found for file in (one.rglob("*.py") if one.is_dir() else [one]))

    def mutants(self, root: Path, equivalents: Path = EQUIVALENTS) -> list[Mutant]:
        """Those that mean something else than the source, as far as we know."""
        same = tomllib.loads(equivalents.read_text())
        every = (one for file in self.files(root) for one in mutants_of(file, str(file.relative_to(root))))
        return [one for one in every if one.key not in same]

    def test_files(self, root: Path, mutated: str = "") -> list[str]:
        """Those that name the mutated module come first: they are the likeliest to notice."""
        module = mutated.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found = sorted({path for pattern in self.tests for path in root.glob(pattern)})
        found.sort(key=lambda path: module not in path.read_text())
        return [str(path.relative_to(root)) for path in found]


def _cluster(*topics: str) -> tuple[str, ...]:
    return tuple(f"tests/cluster/test_{topic}*.py" for topic in topics)


def _alike(name: str) -> Room:
    """A room whose tests lie in a folder of its name."""
    return Room((f"edgemoe/{name}",), (f"tests/{name}/test_*.py",))


ALIKE = ("api", "engine", "kernels", "model", "policy", "replay", "telemetry", "worker")
CONTROL = ("coord", "elect", "etcd", "fence", "journal", "lead", "member", "plan", "raft", "recover", "voter")
ROOMS = {name: _alike(name) for name in ALIKE} | {
    "cli": Room(("edgemoe/cli",), ("tests/shell/test_c*.py",)),
    "config": Room(("edgemoe/config/loading.py", "edgemoe/config/settings.py"), ("tests/shell/test_*config*.py",)),
    "control": Room(
        ("edgemoe/cluster/control", "edgemoe/durable.py"), (*_cluster(*CONTROL), "tests/store/test_durable.py")
    ),
    "data": Room(("edgemoe/cluster/data",), _cluster("data", "bulk", "lying")),
    "experts": Room(("edgemoe/experts",), ("tests/experts/test_*.py", "tests/store/test_store.py")),
    "front": Room(("edgemoe/front",), ("tests/daemon/test_[!b]*.py", "tests/daemon/test_book*.py")),
    "pack": Room(("edgemoe/pack",), ("tests/store/test_*.py",)),
    "scoutgate": Room(("scoutgate",), ("tests/scoutgate/test_*.py",)),
    "wire": Room(("edgemoe/cluster/wire",), ("tests/wire/test_*.py", *_cluster("lane", "frame", "wire"))),
}
