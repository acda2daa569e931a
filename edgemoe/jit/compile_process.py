"""Compiles parts of the machine code in a process of its own, at a lower priority if asked."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from edgemoe.jit.object_cache import CompiledPart, compile_ahead, is_ready

END_S = 5.0  # that a compiling process has to end


class CompileProcess:
    """Compiles parts one after the other in a process of its own, if some are not compiled. `close` it."""

    def __init__(
        self,
        parts: Sequence[CompiledPart],
        place: str,
        directory: Path | None,
        niceness: int = 0,
        arguments: Sequence[str] = (),
    ) -> None:
        """Starts the process. `place` is "module:NAME" of the part, or of a function that returns all for `arguments`.

        Without a directory, or if no process can be started, the caller of `link` compiles.
        """
        self._process: subprocess.Popen[bytes] | None = None
        if directory is None or all(is_ready(part.codes, directory, part.variant) for part in parts):
            return
        command = [sys.executable, "-m", __name__, place, str(directory), str(niceness), *arguments]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
        except OSError:
            return

    @property
    def is_running(self) -> bool:
        """Whether it compiles now."""
        return self._process is not None and self._process.poll() is None

    def wait(self, ends_s: float) -> bool:
        """Waits for its end, at most until `ends_s` of `time.monotonic`. Returns whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(max(0.0, ends_s - time.monotonic()))
        return not self.is_running

    def close(self) -> None:
        """Kills the process, if it was started, and waits for its end."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.stdin.close()
            self._process.wait(END_S)


def _end_with_parent() -> None:
    """Ends this process when its input is closed: the process that started it is gone."""
    while os.read(0, 1):  # sys.stdin has a lock, which a thread may not hold when Python ends
        pass
    os._exit(0)


def main(place: str, directory: str, niceness: str, *arguments: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger().addHandler(logging.NullHandler())  # `link` of the process that waits tells the same
    os.nice(int(niceness))
    module, name = place.split(":")
    found = getattr(importlib.import_module(module), name)
    parts: Sequence[CompiledPart] = found(*arguments) if arguments else [found]
    for part in parts:
        compile_ahead(part.codes, Path(directory), part.variant)


if __name__ == "__main__":
    main(*sys.argv[1:])
