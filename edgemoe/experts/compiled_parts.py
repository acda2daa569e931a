"""Lists the parts of machine code that an engine links, and compiles them in other processes.

`python -m edgemoe.experts.compiled_parts DIRECTORY NAME` compiles one of `NAMED` into `DIRECTORY`, and ends when its
input is closed. `... DIRECTORY` without a name compiles all parts for the processor of EDGEMOE_PROCESSOR, for a wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from edgemoe.experts.activity import CODES as ACTIVITY_CODES
from edgemoe.experts.predict.gate_lookahead import CODES as HINT_CODES
from edgemoe.experts.predict.next_use import CODES as PREDICTOR_CODES
from edgemoe.experts.tiers.residency_ops import CODES as TIER_CODES
from edgemoe.jit.compile_target import TARGET
from edgemoe.jit.object_cache import CompiledPart, build, compile_ahead, is_ready
from edgemoe.kernels.cpu.encoded.row_code import row_parts
from edgemoe.kernels.cpu.runtime import kernel_part
from edgemoe.types.encoding import BFLOAT16, FLOAT32, FP8, INT4, INT8, MXFP4

TIERS = CompiledPart((*TIER_CODES, *ACTIVITY_CODES, *HINT_CODES))
PREDICTOR = CompiledPart(PREDICTOR_CODES, "predictor")
NAMED = {"tiers": TIERS, "predictor": PREDICTOR}
END_S = 5.0  # that a compiling process has to end


def model_parts(bf16: bool) -> Iterator[CompiledPart]:
    """Yields all parts that models of one weight type may link."""
    yield kernel_part(bf16)
    for encoding in (BFLOAT16 if bf16 else FLOAT32, INT8, INT4, MXFP4, FP8):
        yield from row_parts(encoding, bf16)


def every_part() -> Iterator[CompiledPart]:
    """Yields all parts that some engine on this kind of machine may link."""
    yield from (*model_parts(True), *model_parts(False))
    if TARGET.is_native:  # Numba counts references by instructions of this machine
        yield from NAMED.values()


class CompileProcess:
    """Compiles one of `NAMED` in a process of its own, if it is not compiled. `close` it."""

    def __init__(self, name: str, directory: Path | None, niceness: int = 0) -> None:
        """Starts the process. Without a directory, or where no process can be started, whoever links compiles."""
        self._process: subprocess.Popen[bytes] | None = None
        if directory is None or is_ready(NAMED[name].codes, directory, NAMED[name].variant):
            return
        command = [sys.executable, "-m", __name__, str(directory), name, str(niceness)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
        except OSError:
            return

    @property
    def is_running(self) -> bool:
        """Whether it compiles now."""
        return self._process is not None and self._process.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Waits until it has ended. Returns False after `timeout_s`."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
        return True

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.stdin.close()
            self.wait(END_S)


def _end_with_parent() -> None:
    """Ends this process when its input is closed: the process that started it is gone."""
    sys.stdin.buffer.read()
    os._exit(0)


def main(directory: Path, name: str = "", niceness: str = "0") -> None:
    if not name:
        for part in every_part():
            build(part.codes, directory, part.variant)
        return
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(int(niceness))
    compile_ahead(NAMED[name].codes, directory, NAMED[name].variant)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
