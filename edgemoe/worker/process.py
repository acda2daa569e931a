"""What the engine's process is to the system: killed before the front, gone with it, deaf to the service's signals."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
OOM_SCORE = 500  # between the front's 0 and "first of all", 1000


def settle() -> int:
    """Makes the process a good child. Returns the parent's id; the process ends when its parent does."""
    parent = os.getppid()
    faulthandler.enable()  # where a segmentation fault happened goes to stderr
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)  # it died before it could be watched
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front decides when to stop, and then says so
    return parent
