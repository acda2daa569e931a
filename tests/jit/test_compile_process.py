"""Processes that compile a part of the machine code."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from support.kept import KERNELS

from edgemoe.experts import compiled_parts
from edgemoe.experts.compiled_parts import TIERS
from edgemoe.jit.compile_process import CompileProcess
from edgemoe.jit.object_cache import link

PLACE = f"{compiled_parts.__name__}:TIERS"


def test_a_compiling_process_ends_when_it_is_closed(tmp_path: Path) -> None:
    with closing(CompileProcess(TIERS, PLACE, tmp_path)) as compiling:
        assert compiling.is_running
    assert not compiling.is_running


def test_a_compiling_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    compiling = CompileProcess(TIERS, PLACE, tmp_path)
    assert compiling._process is not None
    assert compiling._process.stdin is not None
    compiling._process.stdin.close()
    assert compiling._process.wait(60.0) == 0
    assert not list(tmp_path.glob("*.o"))


def test_no_process_is_started_for_code_that_is_compiled_or_cannot_be_kept() -> None:
    link(TIERS.codes, KERNELS)
    for directory in (KERNELS, None):
        compiling = CompileProcess(TIERS, PLACE, directory)
        assert not compiling.is_running
        compiling.close()
