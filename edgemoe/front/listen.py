"""Listening sockets, bound by us: a server left to itself makes a Unix socket 0666."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from edgemoe.durable import give_group, make_folder, open_kept, remove_file
from edgemoe.errors import ServiceError

BACKLOG = 1024
SOCKET_MODE = 0o660
PATH_BYTES = 107  # sun_path, less its terminator


def unix_socket(path: Path, group: str = "") -> socket.socket:
    """Returns a listening socket at `path`, 0660, for `group` if one is named.

    A socket file that nobody listens on is replaced. Raises ServiceError where one is in use, or is no socket.
    """
    if len(os.fsencode(path)) > PATH_BYTES:
        raise ServiceError(f"{path}: too long for a socket ({PATH_BYTES} bytes); set api.socket to a shorter path")
    gid = _group_id(group) if group else None
    make_folder(path.parent, 0o755)
    clear_path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o777 & ~SOCKET_MODE)
    try:
        listener.bind(str(path))
        if gid is not None:
            give_group(path, gid)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServiceError(f"{path}: cannot listen here: {error.strerror}") from error
    finally:
        os.umask(mask)
    return listener


def bound_socket(address: str) -> socket.socket:
    """Returns a socket that has HOST:PORT and does not listen yet. Raises ServiceError."""
    host, _, port = address.rpartition(":")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError, OverflowError) as error:
        bound.close()
        raise ServiceError(f"api.tcp: cannot listen on {address}: {error}") from error
    return bound


def tcp_socket(address: str) -> socket.socket:
    """Returns a listening socket at HOST:PORT. Raises ServiceError."""
    return listening(bound_socket(address), address)


def listening(bound: socket.socket, address: str) -> socket.socket:
    """Has the socket listen, and returns it. Raises ServiceError where another has come before."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ServiceError(f"api.tcp: cannot listen on {address}: {error}") from error
    return bound


@contextlib.contextmanager
def sole_owner(directory: Path, remedy: str) -> Iterator[None]:
    """Holds the lock of a runtime directory. Raises ServiceError, which ends on `remedy`, where another daemon does."""
    lock = open_kept(directory / "lock")
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ServiceError(f"{directory}: another daemon runs here; {remedy}") from None
        yield
    finally:
        os.close(lock)


def clear_path(path: Path) -> None:
    """Removes a socket file that nobody listens on. Raises ServiceError where another daemon does, or it is none."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ServiceError(f"{path}: is no socket, so it is left alone; set api.socket to another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        remove_file(path, missing_ok=True)
    except OSError as error:
        raise ServiceError(f"{path}: cannot tell whether it is in use: {error}") from error
    else:
        raise ServiceError(f"{path}: another daemon listens here; stop it, or set api.socket to another path")


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ServiceError(f"api.socket_group: there is no group {name!r} on this system") from None
