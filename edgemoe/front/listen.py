"""Opens listening sockets, since servers make Unix sockets 0666, and speaks with the service manager (systemd)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from edgemoe.config.settings import ApiSettings
from edgemoe.durable import give_group, make_folder, open_kept, remove_file
from edgemoe.errors import ServiceError
from edgemoe.types.bounds import is_loopback

FIRST_FD = 3  # of sockets that the service manager passes
BACKLOG = 1024
SOCKET_MODE = 0o660
OLLAMA_TCP = "api.ollama_tcp"
PATH_BYTES = 107  # of sun_path without its terminator


def unix_socket(path: Path, group: str = "") -> socket.socket:
    """Returns a listening socket at `path`, 0660, for `group` if one is named.

    A socket file without a listener is replaced. Raises ServiceError if it is in use, or is no socket.
    """
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


def bound_socket(address: str, setting: str = "api.tcp") -> socket.socket:
    """Returns a socket bound to HOST:PORT, the value of `setting`, that does not listen yet.

    Raises ServiceError if it cannot be bound.
    """
    host, _, port = address.rpartition(":")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family == socket.AF_INET6:  # `::` is every address, and IPv4's, on every system
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError, OverflowError) as error:
        bound.close()
        raise _cannot_listen(setting, address, error) from error
    return bound


def _cannot_listen(setting: str, address: str, error: Exception) -> ServiceError:
    """Returns the error of an address, with its reason and remedy."""
    remedies = {
        errno.EADDRINUSE: "another program has this port; stop it, or choose another port",
        errno.EADDRNOTAVAIL: "this box has no such address; 127.0.0.1 is its own, 0.0.0.0 every one",
        errno.EACCES: "a port below 1024 is for root alone; choose a higher one",
    }
    why = remedies.get(error.errno or 0, str(error)) if isinstance(error, OSError) else str(error)
    return ServiceError(f"{setting}: cannot listen on {address}: {why}")


class BoundPorts(NamedTuple):
    """Sockets that are bound and do not listen yet; None where the settings name no address."""

    tcp: socket.socket | None = None
    ollama: socket.socket | None = None


def bound_ports(api: ApiSettings) -> BoundPorts:
    """Binds the TCP addresses of the settings. Raises ServiceError if one cannot be bound or must not be."""
    with contextlib.ExitStack() as held:
        tcp = held.enter_context(bound_socket(api.tcp)) if api.tcp else None
        ollama = held.enter_context(bound_socket(api.ollama_address, OLLAMA_TCP)) if api.ollama_tcp else None
        if ollama is not None and api.ollama_keyless and not is_loopback(ollama.getsockname()[0]):
            raise ServiceError(f"{OLLAMA_TCP}: {api.ollama_tcp} is no loopback address, which api.ollama_keyless needs")
        held.pop_all()
        return BoundPorts(tcp, ollama)


def tcp_socket(address: str, setting: str = "api.tcp") -> socket.socket:
    """Returns a listening socket at HOST:PORT, the value of `setting`. Raises ServiceError if it is in use."""
    return listening(bound_socket(address, setting), address, setting)


def listening(bound: socket.socket, address: str, setting: str = "api.tcp") -> socket.socket:
    """Starts listening on the socket and returns it. Raises ServiceError if the address is in use."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise _cannot_listen(setting, address, error) from error
    return bound


@contextlib.contextmanager
def sole_owner(directory: Path, remedy: str) -> Iterator[None]:
    """Holds the lock of a runtime directory. Raises ServiceError, ending with `remedy`, if another daemon holds it."""
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
    """Removes a socket file without a listener. Raises ServiceError if it has one, is none, or is too long."""
    if len(os.fsencode(path)) > PATH_BYTES:
        raise ServiceError(f"{path}: too long for a socket ({PATH_BYTES} bytes); set api.socket to a shorter path")
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


class Notifier:
    """Notifies the service manager by sd_notify(3); does nothing without one."""

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        ours = env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(env.get("WATCHDOG_USEC", "0")) / 1e6 if ours else 0.0

    @property
    def has_manager(self) -> bool:
        """Returns whether there is a service manager."""
        return bool(self._address)

    def notify_manager(self, **fields: str) -> bool:
        """Sends READY=1, STATUS=..., STOPPING=1, WATCHDOG=1 and the like; False if its queue is full."""
        if not self._address:
            return True
        text = "\n".join(f"{key}={value}" for key, value in fields.items())
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(text.encode(), self._address)
            except BlockingIOError:
                return False
        return True


def passed_sockets(env: Mapping[str, str]) -> list[socket.socket]:
    """Returns the listening sockets passed by the service manager (sd_listen_fds(3)), in its order."""
    if env.get("LISTEN_PID") != str(os.getpid()):
        return []
    sockets = []
    for fd in range(FIRST_FD, FIRST_FD + int(env.get("LISTEN_FDS", "0"))):
        os.set_inheritable(fd, False)
        sockets.append(socket.socket(fileno=fd))
    return sockets
