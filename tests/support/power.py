"""Simulates a disk's content after a power loss."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

Inode = tuple[int, int]


class Disk:
    """Follows fsync and rename. Bytes are kept once their file is synced, a new name once its directory is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bytes: dict[Inode, bytes] = {}
        self._renamed: dict[Path, Inode] = {}  # not in their directory on the disk yet
        self._names: dict[Path, Inode] = {}
        for name in ("fsync", "replace", "rename"):
            monkeypatch.setattr(os, name, self._followed(getattr(os, name), getattr(self, f"_{name}")))

    def after_power_loss(self, path: Path) -> bytes | None:
        """Returns the bytes of a replaced or rewritten file after a power loss; None if it would be gone."""
        path = path.resolve()
        inode = self._names.get(path, None if path in self._renamed or not path.exists() else _inode(os.stat(path)))
        return None if inode is None else self._bytes.get(inode)

    @staticmethod
    def _followed(real: Any, note: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            commit = note(*args, **options)
            result = real(*args, **options)
            commit()
            return result

        return call

    def _fsync(self, file: Any) -> Any:
        fd = file if isinstance(file, int) else file.fileno()
        about, path = os.fstat(fd), Path(f"/proc/self/fd/{fd}")
        if not stat.S_ISDIR(about.st_mode):
            return lambda: self._bytes.__setitem__(_inode(about), path.read_bytes())
        directory = path.resolve()
        return lambda: self._names.update({p: n for p, n in self._renamed.items() if p.parent == directory})

    def _replace(self, source: Any, target: Any, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> Any:
        source, target = _whole(source, src_dir_fd), _whole(target, dst_dir_fd)
        inode = _inode(os.stat(source))
        if not stat.S_ISDIR(os.stat(source).st_mode):
            assert self._bytes.get(inode) == Path(source).read_bytes(), f"{target} is named before its bytes are kept"
        return lambda: self._renamed.__setitem__(Path(target).resolve(), inode)

    _rename = _replace


def _whole(path: Any, folder: int | None) -> Path:
    return Path(path) if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}")) / path


def _inode(about: os.stat_result) -> Inode:
    return about.st_dev, about.st_ino
