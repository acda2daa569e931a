"""What the engine's process is to the system: killed before the front, gone with it, deaf to the service's signals."""

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
    """Makes the process a good child. Returns the parent's id; the process ends when its parent does."""
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
    """Has malloc reuse a step's large tensors for the next one's, not give them back and fault them in again.

    Filling 5 MB of logits takes a third of the time. At most 128 MiB are kept. Does nothing where there is no glibc.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 128 << 20)
        mallopt(M_ARENA_MAX, 1)
