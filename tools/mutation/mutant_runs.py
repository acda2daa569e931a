"""Runs a room's tests on a copy of the tree, with one mutant in it at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.mutation.mutants import Mutant
from tools.mutation.rooms import Room

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".cache", ".wheels", "__pycache__", ".*_cache", ".hypothesis")
GREEN = (0, 5)  # exit statuses of pytest; 5: all tests are of the slow ones
UNCHANGED = "unchanged"  # key of the row with the tests' duration
FACTOR = 3.0  # a mutant may take this multiple of the unchanged sources' time, and `least_s` more


def copy_tree(root: Path, into: Path) -> Path:
    """Copies the sources and tests, and compiled kernels, which take long to make."""
    copy = into / "tree"
    shutil.copytree(root, copy, ignore=LEFT_OUT, symlinks=True)
    if (root / ".cache/kernels").is_dir():
        shutil.copytree(root / ".cache/kernels", copy / ".cache/kernels")
    return copy


class Bench:
    """A copy of the tree in which the tests pass."""

    def __init__(self, copy: Path, room: Room, log: Path, least_s: float) -> None:
        self._copy, self._room, self._log = copy, room, log
        self._output = copy.with_name("output")
        self._env = os.environ | {
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "",
        }  # which saves seconds
        self._least_s, self._limit_s = least_s, 3600.0
        files = [*room.files(copy), *(copy / name for name in room.test_files(copy))]
        self._tree = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
        self._known: dict[str, dict[str, Any]] = {}
        if log.exists():
            rows = map(json.loads, log.read_text().splitlines())
            self._known = {row["key"]: row for row in rows if row["tree"] == self._tree}

    def begin(self) -> str:
        """Times the tests of the unchanged sources. Returns the reason why no mutant can be tried, or ""."""
        if not (tests := self._room.test_files(self._copy)):
            return "there are no tests of this room"
        if UNCHANGED not in self._known:
            outcome, seconds = self._run(tests)
            if outcome != "survived":
                return f"the tests fail without any change: {self._output_text()}"
            self._note({"key": UNCHANGED, "seconds": round(seconds, 1)})
        self._limit_s = self._least_s + FACTOR * self._known[UNCHANGED]["seconds"]
        return ""

    def try_out(self, mutant: Mutant) -> dict[str, Any]:
        """Tries a mutant, its module's own tests first, then the room's others. Returns its row of the log."""
        if mutant.key in self._known:
            return self._known[mutant.key]
        path = self._copy / mutant.file
        source = path.read_bytes()
        _write(path, mutant.apply(source))
        own = self._room.own_tests(self._copy, mutant.file)
        others = [one for one in self._room.test_files(self._copy) if one not in own]
        outcome, seconds = "survived", 0.0
        try:
            for tests in filter(None, (own, others)):
                if outcome == "survived":
                    outcome, more_s = self._run(tests)
                    seconds += more_s
        finally:
            _write(path, source)
        row = {"key": mutant.key, "outcome": outcome, "file": mutant.file, "line": mutant.line}
        return self._note(row | {"diff": mutant.diff(source), "seconds": round(seconds, 1)})

    def _note(self, row: dict[str, Any]) -> dict[str, Any]:
        row = self._known[row["key"]] = row | {"tree": self._tree}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            log.write(json.dumps(row) + "\n")
        return row

    def _run(self, tests: list[str]) -> tuple[str, float]:
        """Runs tests; returns the outcome, and seconds."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        began_s = time.monotonic()
        with (
            self._output.open("wb") as output,
            subprocess.Popen(
                command, cwd=self._copy, env=self._env, stdout=output, stderr=output, start_new_session=True
            ) as process,
        ):
            try:
                outcome = "survived" if process.wait(self._limit_s) in GREEN else "killed"
            except subprocess.TimeoutExpired:
                outcome = "timed out"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return outcome, time.monotonic() - began_s

    def _output_text(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-5:])


def _write(path: Path, source: bytes) -> None:
    """Replaces a module and deletes its compiled file, which Python may take for the new one's by size and time."""
    path.write_bytes(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
