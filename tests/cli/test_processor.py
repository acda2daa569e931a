"""A processor that the kernels cannot run on is refused, by name, before anything is read, packed or compiled."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.jit.env import PROCESSOR

QEMU = shutil.which("qemu-x86_64-static")
COMMANDS = [("serve", "--model"), ("plan",), ("doctor", "--socket")]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


def _run(python: str, command: tuple[str, ...], tmp_path: Path, **env: str) -> tuple[int, str]:
    """Returns the exit status and the output of a command of edgemoe that is given a missing path."""
    line = [python, "-m", "edgemoe", *command, str(tmp_path / "nothing")]
    env = os.environ | {"HOME": str(tmp_path), "COLUMNS": "1000"} | env
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Arm's processors all do")
@each_command
def test_a_processor_below_avx2_is_refused_first_with_its_missing_features(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    status, said = _run(sys.executable, command, tmp_path, **{PROCESSOR: "nehalem"})
    assert status == 1
    assert "the processor (nehalem) lacks AVX2, FMA, F16C: edgemoe needs" in said
    assert "Traceback" not in said
    assert command[0] == "doctor" or "nothing" not in said.rpartition("edgemoe: ")[2], "the model was looked for first"


def _emulated_python(model: str, folder: Path) -> str:
    """Returns a Python whose processor is emulated, as is the one of the processes that it starts by its own path."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {QEMU} -cpu {model} -0 {python} {sys.executable} "$@"\n')
    python.chmod(0o700)
    return str(python)


@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64-static is not installed (Debian: qemu-user-static)")
@pytest.mark.parametrize(
    ("model", "command"),
    [
        pytest.param("SandyBridge", ("plan",), id="SandyBridge"),  # has AVX
        *(pytest.param("Nehalem", each, marks=pytest.mark.slow, id=f"Nehalem-{each[0]}") for each in COMMANDS),
    ],
)
def test_an_emulated_processor_below_avx2_is_refused(model: str, command: tuple[str, ...], tmp_path: Path) -> None:
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the libraries: Python does not look beside itself
    status, said = _run(_emulated_python(model, tmp_path), command, tmp_path, **env)
    assert status == 1
    assert "lacks AVX2, FMA" in said
    assert "Traceback" not in said
