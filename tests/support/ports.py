"""Unused TCP ports for servers that start later."""

from __future__ import annotations

import contextlib
import random
import socket

OUTSIDE = range(12_000, 32_000)  # below the ports that the system gives to clients, one of which may take it meanwhile


def free_ports(count: int) -> list[int]:
    """Returns unused TCP ports of the loopback interface."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            one = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", random.choice(OUTSIDE)))
                found.append(int(one.getsockname()[1]))
        return found
