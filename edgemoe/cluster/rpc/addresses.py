"""Addresses of this machine and of others: where to listen, a free port, the time to a box."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

CONNECT_S = 1.0


def bind_host(listen: str) -> str:
    """Returns the numeric host of HOST:PORT, which some programs want to listen at. Raises OSError."""
    host = listen.rpartition(":")[0].strip("[]").replace("*", "0.0.0.0")
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def free_port(host: str) -> int:
    """Returns a port that is free at this moment. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


async def round_trip_s(address: str) -> float:
    """Returns the time that a connection to HOST:PORT takes; 0 if it fails."""
    host, _, port = address.rpartition(":")
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError, TimeoutError):
        return 0.0
    took_s = time.monotonic() - began_s
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return took_s
