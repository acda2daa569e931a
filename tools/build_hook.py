"""Adds compiled kernels of the common kinds of processors to a wheel; hatchling runs it for `python -m build`.

Each kind takes a process about a minute. EDGEMOE_KINDS names fewer, separated by commas; "" makes a wheel without. An
editable install compiles at its first start instead.
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


class CompiledKernels(BuildHookInterface[Any]):
    """Compiles into a temporary folder, which the wheel includes as `OBJECTS`."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="edgemoe-objects-")
        kinds = os.environ.get("EDGEMOE_KINDS", ",".join(KINDS))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._compile, filter(None, kinds.split(","))))
        build_data["force_include"][self._folder.name] = OBJECTS

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            self._folder.cleanup()

    def _compile(self, kind: str) -> None:
        command = [sys.executable, "-m", "edgemoe.experts.compiled_parts", self._folder.name]
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        subprocess.run(command, env=os.environ | {"EDGEMOE_PROCESSOR": kind, "PYTHONPATH": path}, check=True)
        self.app.display_info(f"compiled kernels for {kind}")
