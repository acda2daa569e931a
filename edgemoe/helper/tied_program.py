"""Starts a program that is killed when this process's parent dies: `python tied_program.py PARENT PROGRAM WORD ...`.

Run as a file, without imports of ours. The kernel keeps the wish over exec (PR_SET_PDEATHSIG, prctl(2)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tied(words: list[str]) -> list[str]:
    """Returns the command of a program that is killed when this process dies. Start it from the main thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *words]


def main() -> None:
    """Becomes the program, or ends if the parent has died already."""
    parent, program = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
