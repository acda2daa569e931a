"""The tests that are responsible for each room's sources."""

from __future__ import annotations

import re
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
        """Returns the mutants of the room, except known equivalents of the source."""
        same = tomllib.loads(equivalents.read_text())
        every = (one for file in self.files(root) for one in mutants_of(file, str(file.relative_to(root))))
        return [one for one in every if one.key not in same]

    def test_files(self, root: Path) -> list[str]:
        """All test files of the room."""
        found = sorted({path for pattern in self.tests for path in root.glob(pattern)})
        return [str(path.relative_to(root)) for path in found]

    def own_tests(self, root: Path, mutated: str) -> list[str]:
        """Returns the test files that import the mutated module, which are the likeliest to fail."""
        module = mutated.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package, _, name = module.rpartition(".")
        imports = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{re.escape(name)}\b")
        return [path for path in self.test_files(root) if imports.search((root / path).read_text())]


FOLDERS = (
    *(
        "api",
        "cli",
        "config",
        "engine",
        "experts",
        "families",
        "front",
        "jit",
        "kernels",
        "model",
        "policy",
        "replay",
        "store",
    ),
    *("telemetry", "worker", "cluster/control", "cluster/data", "cluster/rpc", "ipc"),
)  # rooms of the package, each with its tests in the folder of the same name
ROOMS = {Path(name).name: Room((f"edgemoe/{name}",), (f"tests/{name}/**/test_*.py",)) for name in FOLDERS} | {
    "kernels": Room(("edgemoe/kernels",), ("tests/kernels/**/test_*.py", "tests/engine/test_whole_steps.py")),
    "wire": Room(("edgemoe/wire",), ("tests/ipc/test_*.py", "tests/cluster/rpc/test_*.py")),
    "durable": Room(("edgemoe/durable.py",), ("tests/store/test_durable.py",)),
    "scoutgate": Room(("scoutgate",), ("tests/scoutgate/test_*.py",)),
}
