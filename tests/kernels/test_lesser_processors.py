"""Tests of kernels, encodings, experts and models once more, with code for lesser processors than the one at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from edgemoe.jit.compile_target import host, named
from edgemoe.jit.env import PROCESSOR

ROOM_S = 3600.0  # of one room
QEMU = shutil.which("qemu-x86_64-static")
TESTS = Path(__file__).parents[1]
SAMPLES = {
    "haswell": "avx2 and (int4 or fp8) or rounding or equal_numpy and mxfp4 or format",
    "skylake-avx512": "avx2 and int4 or rounding",
}
for_x86 = pytest.mark.skipif(named("haswell").machine != host().machine, reason="for x86-64")


def _run(processor: str, *arguments: str, emulator: tuple[str, ...] = ()) -> None:
    """Runs some tests in a process of its own."""
    if missing := named(processor).features - host().features:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    command = [*emulator, sys.executable, "-m", "pytest", "-q", "-n", "0", *arguments]
    env = os.environ | {PROCESSOR: processor}
    done = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True, timeout=ROOM_S)
    assert done.returncode == 0, done.stdout[-3000:]


@cache
def _run_sample(processor: str) -> None:
    """Runs a processor's sample once, which keeps the compiled code."""
    files = (str(TESTS / "kernels" / name) for name in ("test_encoded_rows.py", "test_rounding.py"))
    _run(processor, "-k", SAMPLES[processor], *files)


@for_x86
@pytest.mark.parametrize("processor", SAMPLES)
def test_encoded_rows_are_right_with_code_for_lesser_processors(processor: str) -> None:
    _run_sample(processor)


@for_x86
@pytest.mark.timeout(900)
@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64-static is not installed (Debian: qemu-user-static)")
def test_an_emulated_haswell_runs_the_code_for_it() -> None:
    _run_sample("haswell")  # compiles the code, which would take long in QEMU
    sample = ("-k", "avx2 and int4", str(TESTS / "kernels/test_encoded_rows.py"))
    _run("haswell", *sample, emulator=(str(QEMU), "-cpu", "Haswell-noTSX"))


@pytest.mark.slow
@pytest.mark.timeout(ROOM_S)
@for_x86
@pytest.mark.parametrize("room", ["kernels", "encodings", "experts", "model"])
@pytest.mark.parametrize("processor", SAMPLES)
def test_whole_rooms_are_right_with_code_for_lesser_processors(processor: str, room: str) -> None:
    _run(processor, "--ignore", __file__, str(TESTS / room))
