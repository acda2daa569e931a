"""The lock files hold every library that pyproject.toml asks for, and the wheel's list holds every locked one."""

from __future__ import annotations

import re
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.build_hook import LockedLibrary, bill_of_materials, locked_libraries

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = {
    "requirements.lock": PROJECT["project"]["dependencies"],
    "tools/container/build.lock": PROJECT["build-system"]["requires"],
}
PYTHONS = [each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"] if ":: Python :: 3." in each]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def locked(file: str, python: str, machine: str) -> dict[str, list[LockedLibrary]]:
    """Returns the libraries that a machine installs, by name."""
    there = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    there |= {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython"}
    found: dict[str, list[LockedLibrary]] = {}
    for each in locked_libraries((ROOT / file).read_text()):
        if not each.marker or Marker(each.marker).evaluate(there):
            found.setdefault(each.name, []).append(each)
    return found


@pytest.mark.parametrize("file", LOCKS)
def test_each_requirement_is_locked_once_in_a_version_that_is_admitted(file: str) -> None:
    for python, machine in product(PYTHONS, ("x86_64", "aarch64")):
        found = locked(file, python, machine)
        assert [name for name, versions in found.items() if len(versions) > 1] == []
        for wanted in map(Requirement, LOCKS[file]):
            (library,) = found[canonicalize_name(wanted.name)]
            assert Version(library.version) in wanted.specifier, f"{wanted}: run tools/lock"
        for pin in PINS:
            for library in found.get(pin.name, ()):
                assert Version(library.version) in pin.specifier, f"{pin}: run tools/lock"


@pytest.mark.parametrize("file", LOCKS)
def test_every_line_of_a_lock_is_understood_and_has_a_hash(file: str) -> None:
    lines = re.findall(r"(?m)^[^#\s].*$", (ROOT / file).read_text())
    libraries = locked_libraries((ROOT / file).read_text())
    assert [f"{each.name}=={each.version}" for each in libraries] == [re.split(r" [;\\]", line)[0] for line in lines]
    assert all(each.sha256 for each in libraries)


def test_the_list_names_each_library_with_its_hashes_and_machines() -> None:
    torch = LockedLibrary("torch", "2.0", "", ("a" * 64, "b" * 64))
    triton = LockedLibrary("triton", "3.0", "sys_platform == 'linux'", ("c" * 64,))
    text = f"# by tools/lock\ntorch==2.0 \\\n    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\n"
    text += f"triton==3.0 ; sys_platform == 'linux' \\\n    --hash=sha256:{'c' * 64}\n"
    assert locked_libraries(text) == [torch, triton]
    document = bill_of_materials("0.1.0", [torch, triton])
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/edgemoe@0.1.0"
    needed, optional = document["components"]
    assert (needed["purl"], needed["scope"]) == ("pkg:pypi/torch@2.0", "required")
    assert [each["content"] for each in needed["externalReferences"][0]["hashes"]] == list(torch.sha256)
    assert optional["scope"] == "optional"
    assert optional["properties"][0]["value"] == triton.marker


ADVISORIES: list[dict[str, str]] = tomllib.loads((ROOT / "tools/advisories.toml").read_text())["advisory"]


@pytest.mark.parametrize("advisory", ADVISORIES, ids=[each["id"] for each in ADVISORIES])
def test_no_release_with_a_known_weakness_is_locked_or_admitted(advisory: dict[str, str]) -> None:
    fixed, name = Version(advisory["fixed"]), advisory["library"]
    versions = [
        each.version for file in LOCKS for each in locked_libraries((ROOT / file).read_text()) if each.name == name
    ]
    assert all(Version(version) >= fixed for version in versions), advisory["effect"]
    own = [one for one in map(Requirement, PROJECT["project"]["dependencies"]) if canonicalize_name(one.name) == name]
    assert versions or own, "no library of the service has this name"
    lowest = [spec.version for one in own for spec in one.specifier if spec.operator == ">="]
    assert all(Version(version) >= fixed for version in lowest), advisory["effect"]
