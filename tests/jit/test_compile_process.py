"""Processes that compile a part of the machine code."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

from support.kept import KERNELS

from edgemoe.experts import compiled_parts
from edgemoe.experts.compiled_parts import TIERS
from edgemoe.jit.compile_process import CompileProcess
from edgemoe.jit.object_cache import compile_ahead

PLACE = f"{compiled_parts.__name__}:TIERS"


def test_a_compiling_process_ends_when_it_is_closed(tmp_path: Path) -> None:
    with closing(CompileProcess([TIERS], PLACE, tmp_path)) as compiling:
        assert compiling.is_running
    assert not compiling.is_running


def test_a_compiling_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    compiling = CompileProcess([TIERS], PLACE, tmp_path)
    assert compiling._process is not None
    assert compiling._process.stdin is not None
    compiling._process.stdin.close()
    assert compiling._process.wait(60.0) == 0
    assert not list(tmp_path.glob("*.o"))


def test_no_process_is_started_for_code_that_is_compiled_or_cannot_be_kept() -> None:
    compile_ahead(TIERS.codes, KERNELS)
    for directory in (KERNELS, None):
        compiling = CompileProcess([TIERS], PLACE, directory)
        assert not compiling.is_running
        compiling.close()


ENDS = """
import sys, types
from pathlib import Path
from edgemoe.jit import compile_process
compile_process.compile_ahead = lambda *_: None
sys.modules["parts"] = types.SimpleNamespace(NONE=types.SimpleNamespace(codes=(), variant=""))
compile_process.main("parts:NONE", sys.argv[1], "0")
"""


def test_a_compiling_process_ends_well_while_its_parent_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()  # its own input stays open
        assert (process.wait(), said) == (0, "")
