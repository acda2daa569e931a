"""Small files that are replaced whole and fsynced: after a crash or power loss the old one is there, or the new one."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Makes `data` the file's content, `owner` (uid, gid) its owner. Raises OSError; what was there then still is."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.fchmod(fd, mode)  # whatever the umask is: others read what is for others
        if owner is not None:
            os.fchown(fd, *owner)
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    sync(path.parent)


def write_all(fd: int, data: bytes) -> None:
    """Writes every byte at the file's position. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def sync(path: Path) -> None:
    """Has a file's bytes, or what was renamed in a directory, outlast power loss. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
