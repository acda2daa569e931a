"""Standard output and error whose terminal or reader has gone."""

from __future__ import annotations

import errno
import os
import stat
import sys


def drop_unwritable() -> bool:
    """Drops output whose terminal or reader has gone, and which would change the exit code; returns whether any has."""
    is_any = False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is None:  # closed before the start
                continue
            descriptor = stream.fileno()
        except OSError:  # in memory
            continue
        try:
            stream.flush()
            os.write(descriptor, b"")  # which only a terminal that is gone refuses
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO) or stat.S_ISREG(os.fstat(descriptor).st_mode):
                continue  # a disk is full or fails: that is told
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
            is_any = True
    return is_any
