"""Tests of this room once more, with code for lesser processors than the one at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgemoe.jit.compile_target import host, named
from edgemoe.jit.env import PROCESSOR

HERE = Path(__file__).parent


def _run(processor: str, *files: str, only: str = "") -> None:
    if missing := named(processor).features - host().features:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    command = [sys.executable, "-m", "pytest", "-q", "-k", only, *(str(HERE / file) for file in files)]
    env = os.environ | {PROCESSOR: processor}
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif(named("haswell").machine != host().machine, reason="for x86-64")
def test_encoded_rows_are_right_with_code_for_haswell() -> None:
    _run("haswell", "test_encoded_rows.py", "test_rounding.py", only="avx2 or rounding or equal_numpy or format")


@pytest.mark.slow
@pytest.mark.skipif(named("haswell").machine != host().machine, reason="for x86-64")
@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512"])
def test_all_kernels_are_right_with_code_for_lesser_processors(processor: str) -> None:
    files = ("test_encoded_rows", "test_rounding", "test_kernels", "test_prefill", "test_delta_step")
    _run(processor, *(f"{file}.py" for file in files), "test_matrix_products.py", "test_thread_pool.py")
