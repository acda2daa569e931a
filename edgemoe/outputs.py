"""Texts from outside as terminals may show them, and output whose terminal or reader has gone."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys

# Control characters but tabs and line feeds, and marks that reverse the direction of a line.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
MOST_CHARS = 8000  # of a message


def plain(text: str) -> str:
    """Returns a message as terminals may show it: without control characters, and without its middle if it is long."""
    if len(text) > MOST_CHARS:
        text = f"{text[: MOST_CHARS // 2]} [{len(text) - MOST_CHARS} characters] {text[-MOST_CHARS // 2 :]}"
    return CONTROL.sub("", text)


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
