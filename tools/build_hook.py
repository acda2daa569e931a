"""Adds to a wheel the list of its locked libraries, and compiled kernels if it is made of the source archive.

The list is a CycloneDX document of requirements.lock, in the wheel's sboms folder (PEP 770).
`python -m build` makes it so; each kind takes one to two minutes. `pip install .` in a clone adds none: an engine
compiles for its own processor at its first start. EDGEMOE_KINDS names other kinds, separated by commas; "" is none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parents[1]
KINDS = (
    *("haswell", "znver1", "skylake-avx512", "cascadelake", "sapphirerapids", "sapphirerapids+amx", "znver4"),
    *("generic", "cortex-a76"),
)
OBJECTS = "edgemoe/jit/objects"
LOCK, SBOM = "requirements.lock", "edgemoe.cdx.json"
PINNED = re.compile(r"(?m)^([\w.-]+)==([^\s;]+)(?: ; (.*?))?((?: +--hash=sha256:[0-9a-f]{64})+)$")
NEEDED = ["numba>=0.63", "numpy>=2.0", "scipy>=1.15", "safetensors>=0.8", "msgspec>=0.18.6", "xxhash>=3.5"]


class LockedLibrary(NamedTuple):
    """A library of a lock file."""

    name: str
    version: str
    marker: str  # of the machines that need it, as in PEP 508; "" is all
    sha256: tuple[str, ...]  # of its archives

    @property
    def url(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def locked_libraries(text: str) -> list[LockedLibrary]:
    """Returns the libraries of a lock file in pip's format."""
    return [
        LockedLibrary(name, version, marker, tuple(re.findall(r"[0-9a-f]{64}", hashes)))
        for name, version, marker, hashes in PINNED.findall(text.replace("\\\n", ""))
    ]


def bill_of_materials(version: str, libraries: list[LockedLibrary]) -> dict[str, Any]:
    """Returns a CycloneDX document of edgemoe and its libraries."""
    own = {"type": "application", "name": "edgemoe", "version": version, "purl": f"pkg:pypi/edgemoe@{version}"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own | {"bom-ref": own["purl"], "licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": [_component(each) for each in libraries],
    }


def _component(library: LockedLibrary) -> dict[str, Any]:
    archives = [{"alg": "SHA-256", "content": content} for content in library.sha256]
    source = {"type": "distribution", "url": f"https://pypi.org/project/{library.name}/{library.version}/"}
    component = {
        "type": "library",
        "bom-ref": library.url,
        "name": library.name,
        "version": library.version,
        "purl": library.url,
        "scope": "optional" if library.marker else "required",
        "externalReferences": [source | {"hashes": archives}],
    }
    return component | ({"properties": [{"name": "pep508:marker", "value": library.marker}]} if library.marker else {})


def wanted_kinds() -> list[str]:
    """Returns EDGEMOE_KINDS; without it all kinds in a source archive, which has PKG-INFO, else none."""
    default = ",".join(KINDS) if (ROOT / "PKG-INFO").exists() else ""
    return [kind for kind in os.environ.get("EDGEMOE_KINDS", default).split(",") if kind]


class CompiledKernels(BuildHookInterface[Any]):
    """Writes both into a temporary folder, of which the wheel includes `OBJECTS` and the list."""

    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        return NEEDED if wanted_kinds() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="edgemoe-wheel-")
        libraries = locked_libraries((ROOT / LOCK).read_text())
        list_path = Path(self._folder.name, SBOM)
        list_path.write_text(json.dumps(bill_of_materials(self.metadata.version, libraries), indent=1) + "\n")
        build_data["sbom_files"].append(str(list_path))
        if kinds := wanted_kinds():
            self._objects.mkdir()
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(self._compile, kinds))
            build_data["force_include"][str(self._objects)] = OBJECTS

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def _objects(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, "objects")

    def _compile(self, kind: str) -> None:
        command = [sys.executable, "-m", "edgemoe.experts.compiled_parts", str(self._objects)]
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        subprocess.run(command, env=os.environ | {"EDGEMOE_PROCESSOR": kind, "PYTHONPATH": path}, check=True)
        self.app.display_info(f"compiled kernels for {kind}")
