"""Tells how far a daemon's start has come before it listens, by a locked file in its runtime directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from edgemoe.durable import open_kept
from edgemoe.errors import ServiceError

NAME, MOST_BYTES = "start", 400


@contextlib.contextmanager
def start_note(runtime: Path) -> Iterator[Callable[[str], None]]:
    """Yields the function that writes a text as the note of this process; no note is left at the end.

    Raises ServiceError while another daemon starts there.
    """
    note = open_kept(runtime / NAME)
    try:
        fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(note)
        other = noted_start(runtime) or "it prepares its model"
        raise ServiceError(f"{runtime}: another daemon starts here: {other}; wait for it, or stop it") from None

    def write(text: str) -> None:
        with contextlib.suppress(OSError):  # as of a full disk
            os.ftruncate(note, 0)
            os.pwrite(note, f"{os.getpid()} {text}".encode()[:MOST_BYTES], 0)

    try:
        yield write
    finally:
        os.ftruncate(note, 0)
        os.close(note)


def noted_start(runtime: Path) -> str:
    """Returns the note of a daemon that still starts there; "" if there is none, or it may not be read."""
    try:
        note = open_kept(runtime / NAME, writable=False)
    except OSError:
        return ""
    try:
        pid, _, text = os.pread(note, MOST_BYTES, 0).decode(errors="replace").partition(" ")
    finally:
        os.close(note)
    return text if pid.isdecimal() and Path("/proc", pid).exists() else ""
