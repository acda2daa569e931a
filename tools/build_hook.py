"""Adds compiled kernels of the common kinds of processors to a wheel that is made of the source archive.

`python -m build` makes it so; each kind takes a process about a minute. `pip install .` in a clone adds none: an engine
compiles for its own processor at its first start. EDGEMOE_KINDS names other kinds, separated by commas; "" is none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parents[1]
KINDS = ("haswell", "znver1", "skylake-avx512", "cascadelake", "sapphirerapids", "znver4", "generic")  # generic: Arm
OBJECTS = "edgemoe/jit/objects"
NEEDED = ["numba>=0.63", "numpy>=2.0", "scipy>=1.15", "safetensors>=0.8", "msgspec>=0.18.6", "xxhash>=3.5"]


def wanted_kinds() -> list[str]:
    """Returns EDGEMOE_KINDS; without it all kinds in a source archive, which has PKG-INFO, else none."""
    default = ",".join(KINDS) if (ROOT / "PKG-INFO").exists() else ""
    return [kind for kind in os.environ.get("EDGEMOE_KINDS", default).split(",") if kind]


class CompiledKernels(BuildHookInterface[Any]):
    """Compiles into a temporary folder, which the wheel includes as `OBJECTS`."""

    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        return NEEDED if wanted_kinds() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        kinds = wanted_kinds()
        if version != "standard" or not kinds:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="edgemoe-objects-")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._compile, kinds))
        build_data["force_include"][self._folder.name] = OBJECTS

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _compile(self, kind: str) -> None:
        assert self._folder is not None
        command = [sys.executable, "-m", "edgemoe.experts.compiled_parts", self._folder.name]
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        subprocess.run(command, env=os.environ | {"EDGEMOE_PROCESSOR": kind, "PYTHONPATH": path}, check=True)
        self.app.display_info(f"compiled kernels for {kind}")
