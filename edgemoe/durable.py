"""Writes files and folders: the only module that does, so that nobody else can have root write where root should not.

A folder is reached by no link of another user, and used by its descriptor. A new file has a random name until it is
whole and fsynced. A crash leaves the old file or the new one. A file written in place must be a plain
one. A file that root makes belongs to the owner of its folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

MAX_LINKS = 40  # on the way to a folder, as the kernel has it
ABANDONED_S = 3600.0  # after which a temporary file has been left by a process that was killed
MAX_STEPS = 4096  # on the way to a folder, links followed
TEMPORARY = ".tmp"
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NewFile:
    """A file under a random name in its folder. `put_in_place` names it; leaving the `with` block without removes it.

    Raises OSError, as all here does.
    """

    def __init__(self, path: Path, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
        """Takes the owner as (uid, gid); None is the folder's owner if root makes the file, else the user."""
        self.path, self._temporary = path, f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}"
        with contextlib.ExitStack() as held:
            self._folder = held.enter_context(_opened_folder(path.parent))
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with _naming(path):
                self.fd = os.open(self._temporary, flags, 0o600, dir_fd=self._folder)
            held.callback(self._discard)
            os.fchmod(self.fd, mode)  # against the umask: a public file stays readable
            if (belongs := owner or _heir(self._folder)) is not None:
                os.fchown(self.fd, *belongs)
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held.close()

    def put_in_place(self) -> None:
        """Flushes the bytes to disk, then gives the file its name, replacing a file of that name."""
        os.fsync(self.fd)
        with _naming(self.path):
            os.replace(self._temporary, self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def _discard(self) -> None:
        os.close(self.fd)
        with contextlib.suppress(FileNotFoundError):  # it is in place
            os.unlink(self._temporary, dir_fd=self._folder)


def replace_file(path: Path, data: bytes, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Makes `data` the file's content, `owner` (uid, gid) its owner. Raises OSError; the old content then stays."""
    _sweep(path)
    with NewFile(path, mode, owner) as file:
        write_all(file.fd, data)
        file.put_in_place()


def create_file(path: Path) -> int:
    """Returns the descriptor of a new file, for writing. Raises FileExistsError where there is anything, OSError."""
    with _opened_folder(path.parent) as folder, _naming(path):
        return _create(folder, path.name, 0o600)


def write_new(path: Path, data: bytes) -> None:
    """Writes a new file (0600), or none. Raises FileExistsError where there is anything, OSError."""
    fd = create_file(path)
    try:
        with _naming(path):
            write_all(fd, data)
            os.fsync(fd)
    except OSError:
        remove_file(path)
        raise
    finally:
        os.close(fd)


def open_kept(path: Path, mode: int = 0o600, *, writable: bool = True) -> int:
    """Returns the descriptor of a file that stays where it is, made where it is missing and `writable`.

    Raises OSError for a link, a pipe or a device, and in a folder of others for a file with a second name.
    """
    with _opened_folder(path.parent) as folder, _naming(path):
        while True:
            try:
                _check_plain(os.stat(path.name, dir_fd=folder, follow_symlinks=False), folder)
                flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(path.name, flags, dir_fd=folder)
            except FileNotFoundError:
                if not writable:
                    raise
                with contextlib.suppress(FileExistsError):  # another process was first
                    return _create(folder, path.name, mode)
                continue
            try:
                _check_plain(os.fstat(fd), folder)
            except OSError:
                os.close(fd)
                raise
            return fd


def open_plain(path: Path) -> BinaryIO:
    """Opens a file to read it, never waiting for a pipe. Raises OSError for anything but a plain file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    raise OSError(errno.EPERM, "is no plain file", str(path))


def read_plain(path: Path, most_bytes: int) -> bytes:
    """Returns a file's first bytes. Raises OSError for anything but a plain file."""
    with open_plain(path) as file:
        return file.read(most_bytes)


def rename_file(path: Path, name: str) -> None:
    """Gives a file another name in its folder, for good. Raises OSError."""
    with _opened_folder(path.parent) as folder, _naming(path):
        os.replace(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)


def remove_file(path: Path, *, missing_ok: bool = False) -> None:
    """Removes a file, or the link that it is. Raises OSError."""
    try:
        with _opened_folder(path.parent) as folder, _naming(path):
            os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        if not missing_ok:
            raise


def remove_tree(path: Path) -> None:
    """Removes a folder and all that is in it; nothing that a link in it leads to. Raises OSError."""
    with _opened_folder(path.parent) as folder:
        shutil.rmtree(path.name, dir_fd=folder)


def remove_empty(path: Path) -> bool:
    """Removes a folder if nothing is in it, and returns whether it is gone. Raises OSError."""
    with _opened_folder(path.parent) as folder:
        try:
            os.rmdir(path.name, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False
    return True


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder, and those above it, as far as they are missing. Raises OSError."""
    try:
        os.close(open_folder(path))
    except FileNotFoundError:
        if path.is_symlink():
            raise
        make_folder(path.parent)
        with _opened_folder(path.parent) as above, _naming(path), contextlib.suppress(FileExistsError):
            os.mkdir(path.name, mode, dir_fd=above)
            _hand_down(above, path.name)
        os.close(open_folder(path))


def private_folder(path: Path) -> bool:
    """Makes a folder that this user alone enters. False where it is another user's, or a link. Raises OSError."""
    if path.is_symlink():
        return False
    make_folder(path, 0o700)
    with _opened_folder(path) as folder:
        if os.fstat(folder).st_uid != os.geteuid():
            return False
        os.fchmod(folder, 0o700)
        return True


def give_group(path: Path, gid: int) -> None:
    """Gives a socket of ours to a group. Raises OSError where it is none."""
    with _opened_folder(path.parent) as folder, _naming(path):
        fd = os.open(path.name, _STEP, dir_fd=folder)
        try:
            about = os.fstat(fd)
            if not stat.S_ISSOCK(about.st_mode) or about.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "is no socket of ours")
            os.chown(f"/proc/self/fd/{fd}", -1, gid)
        finally:
            os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes every byte at the file's position. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def sync(path: Path) -> None:
    """Flushes a file, or a directory's entries, so that they outlast power loss. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- folders ---------------------------------------------------------------------------------------------------


def open_folder(path: Path) -> int:
    """Returns the descriptor of a folder. Follows links of root and of this user only. Raises OSError."""
    with _naming(path):
        at, links, left = os.open("/", _STEP), 0, list(reversed(path.absolute().parts[1:]))
        try:
            trusted = {0, os.geteuid(), os.fstat(at).st_uid}
            while left:
                step = os.open(left.pop(), _STEP, dir_fd=at)
                about = os.fstat(step)
                if not stat.S_ISLNK(about.st_mode):
                    os.close(at)
                    at = step
                    continue
                try:
                    links += 1
                    if links > MAX_LINKS or about.st_uid not in trusted:
                        raise OSError(errno.ELOOP, "a link of another user leads there; name the folder itself")
                    target = Path(os.readlink("", dir_fd=step))
                finally:
                    os.close(step)
                if target.is_absolute():
                    os.close(at)
                    at = os.open("/", _STEP)
                left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            return os.open(".", _FOLDER, dir_fd=at)
        finally:
            os.close(at)


def owner_above(path: Path) -> tuple[int, int] | None:
    """Returns (uid, gid) of the uppermost folder or link on the way to `path` that is not root's; None where all are.

    Its owner decides the target of the path. Folders that are missing belong to nobody yet.
    """
    at, left = Path("/"), list(reversed(path.absolute().parts[1:]))
    trusted = {0, at.stat().st_uid}
    for _ in range(MAX_STEPS):
        try:
            about = at.lstat()
            if about.st_uid not in trusted and (stat.S_ISLNK(about.st_mode) or stat.S_ISDIR(about.st_mode)):
                return about.st_uid, about.st_gid
            if stat.S_ISLNK(about.st_mode):
                target = Path(os.readlink(at))
                at, left = at.parent, left + list(reversed(target.parts))
        except OSError:
            return None
        if not left:
            return None
        at = Path(os.path.normpath(at / left.pop()))
    return None


@contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    folder = open_folder(path)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Has an error name the whole path, which the system knows the last part of only."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _create(folder: int, name: str, mode: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, mode, dir_fd=folder)
    if (owner := _heir(folder)) is not None:
        os.fchown(fd, *owner)
    return fd


def _heir(folder: int) -> tuple[int, int] | None:
    """Returns the (uid, gid) that a new file in a folder must get; None if the process has them already."""
    about = os.fstat(folder)
    return (about.st_uid, about.st_gid) if os.geteuid() == 0 and about.st_uid else None


def _hand_down(above: int, name: str) -> None:
    if (owner := _heir(above)) is not None:
        fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
        try:
            os.fchown(fd, *owner)
        finally:
            os.close(fd)


def _check_plain(file: os.stat_result, folder: int) -> None:
    about = os.fstat(folder)
    if not stat.S_ISREG(file.st_mode):
        raise OSError(errno.EPERM, "is a link, a pipe or a device where a file should be; remove it")
    is_shared = about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022
    if is_shared and (file.st_nlink != 1 or file.st_uid not in (0, os.geteuid(), about.st_uid)):
        raise OSError(errno.EPERM, "is another user's file, or has a second name; remove it")


def _sweep(path: Path) -> None:
    """Removes temporary files of `path` whose processes were killed."""
    start = f"{path.name}."
    with contextlib.suppress(OSError), _opened_folder(path.parent) as folder:
        for name in os.listdir(folder):
            if name.startswith(start) and name.endswith(TEMPORARY):
                about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if time.time() - about.st_mtime > ABANDONED_S:
                    os.unlink(name, dir_fd=folder)
