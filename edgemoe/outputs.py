"""Texts from outside as terminals may show them, and output whose terminal or reader has gone."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys

from edgemoe.errors import FULL

# Control characters but tabs and line feeds, and marks that reverse the direction of a line.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
MOST_CHARS = 8000  # of a message


def plain(text: str) -> str:
    """Returns a message as terminals may show it: without control characters, and without its middle if it is long."""
    if len(text) > MOST_CHARS:
        text = f"{text[: MOST_CHARS // 2]} [{len(text) - MOST_CHARS} characters] {text[-MOST_CHARS // 2 :]}"
    return CONTROL.sub("", text)


def flush_output() -> None:
    """Writes the buffered output of a command. Raises OSError if its file's disk or quota is full."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            if error.errno in FULL:
                raise


def drop_unwritable() -> bool:
    """Drops output that cannot be written, and would change the exit code; returns whether there is any.

    Its terminal or reader has gone, or the disk is full. A disk that fails is told.
    """
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
            gone = error.errno in (errno.EPIPE, errno.EIO) and not stat.S_ISREG(os.fstat(descriptor).st_mode)
            if not gone and error.errno not in FULL:
                continue
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
            is_any = True
    return is_any
