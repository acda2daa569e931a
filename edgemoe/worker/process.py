"""Sets up the engine's process: killed before the front, ends with it, ignores the service's signals."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
OOM_SCORE = 500  # between the front's 0 and "first of all", 1000


def settle() -> int:
    """Sets up the process, which then ends when its parent does. Returns the parent's id."""
    parent = os.getppid()
    _keep_freed_memory()
    faulthandler.enable()  # where a segmentation fault happened goes to stderr
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)  # it died before it could be watched
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front decides when to stop, and then says so
    return parent


def _keep_freed_memory() -> None:
    """Makes malloc reuse a step's large tensors for the next step, instead of returning them to the system.

    Filling 5 MB of logits takes a third of the time. At most 128 MiB are kept. Does nothing where there is no glibc.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 128 << 20)
        mallopt(M_ARENA_MAX, 1)
