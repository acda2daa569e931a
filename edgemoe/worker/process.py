"""Sets up the engine's process: killed before the front, ends with it, ignores the service's signals."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from pathlib import Path

from edgemoe.heap import keep_freed

PR_SET_PDEATHSIG = 1
OOM_SCORE = 500  # between the front's 0 and "first of all", 1000


def settle() -> int:
    """Sets up the process, which then ends when its parent does. Returns the parent's id."""
    parent = os.getppid()
    keep_freed(mmap_bytes=32 << 20, trim_bytes=128 << 20)  # filling 5 MB of logits takes a third of the time
    faulthandler.enable()  # where a segmentation fault happened goes to stderr
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)  # it died before it could be watched
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front decides when to stop, and then says so
    return parent
