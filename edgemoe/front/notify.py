"""What systemd and we say to each other: sd_notify(3), and sockets passed by sd_listen_fds(3)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

FIRST_FD = 3


class Notifier:
    """Tells the service manager how we are; does nothing where there is none."""

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        ours = env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(env.get("WATCHDOG_USEC", "0")) / 1e6 if ours else 0.0

    @property
    def is_heard(self) -> bool:
        """Returns whether there is a service manager."""
        return bool(self._address)

    def tell(self, **fields: str) -> bool:
        """READY=1, STATUS=..., STOPPING=1, WATCHDOG=1 and their like; false where it has too much unread."""
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
    """Returns the listening sockets that the service manager opened for us, in its order."""
    if env.get("LISTEN_PID") != str(os.getpid()):
        return []
    sockets = []
    for fd in range(FIRST_FD, FIRST_FD + int(env.get("LISTEN_FDS", "0"))):
        os.set_inheritable(fd, False)
        sockets.append(socket.socket(fileno=fd))
    return sockets
