"""Bounds the connections of a peer to a channel, and the unread bytes of each, by the kernel's byte counts.

ZeroMQ does not bound the frames of a message. Its high-water mark for receiving must not be used: with it, libzmq
4.3.5 ends the process if a connection breaks while it is held back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.ticking import until_tick
from edgemoe.types.bounds import MAX_NODES

log = logging.getLogger(__name__)
LOOK_S = 0.05  # between checks of all connections while one has much unread; meanwhile the bound may be exceeded
CALM_S, CALM = 0.25, 1 / 8  # while none has more than this share of its bound unread
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
CONNECTIONS = 8  # of one peer to one channel
SILENT = 2 * MAX_NODES  # from one address, on which nothing has been said yet: two of each box, all behind one
FRAME_BYTES = 35  # of overhead per frame, at least
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info (Linux 4.1)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Connection:
    inode: int
    host: str = ""  # its address; "" of a connection that we made
    peer: str = ""  # whose key it has; "" until something was said
    read: int = 0  # received bytes that have been read


class ConnectionGuard:
    """Watches the connections of one channel by file descriptor, and shuts down those over the limit.

    The descriptors belong to ZeroMQ.
    """

    def __init__(self, channel: str, limit_bytes: int) -> None:
        self.cut = 0
        self._say = RateLimitedLog(log)
        self._channel, self._limit_bytes = channel, limit_bytes
        self._known: dict[int, _Connection] = {}

    def on_event(self, event: int, fd: int) -> None:
        """Updates the known connections by an event of ZeroMQ's monitor."""
        if event == zmq.EVENT_CONNECTED:
            self._known[fd] = _Connection(_inode(fd))
        elif event == zmq.EVENT_ACCEPTED:
            known = self._known.get(fd)
            if known is None or known.inode != _inode(fd):  # messages on it may have been read before
                known = _Connection(_inode(fd), _host(fd))
                if not known.host:  # it is closed already, and its number may be another file's
                    self._known.pop(fd, None)
                    return
                self._known[fd] = known
            self._keep("", known.host, SILENT)
        elif event & EVENTS:
            self._known.pop(fd, None)

    def on_message_read(self, fd: int, frames: Sequence[zmq.Frame], waiting: bool) -> None:
        """Counts a message that was read. `waiting` says whether other received messages may still be unread."""
        if (known := self._known.get(fd)) is None:
            return
        received = _received(fd)
        if waiting:
            known.read = min(received, known.read + sum(len(frame) + FRAME_BYTES for frame in frames))
        else:
            known.read = received  # heartbeats too, which are never delivered

    def on_identified(self, fd: int, peer: str) -> None:
        """Records the peer whose key the connection has."""
        if (known := self._known.get(fd)) is None:
            known = self._known[fd] = _Connection(_inode(fd), _host(fd))
        if known.peer != peer:
            known.peer = peer
            self._keep(peer, "", CONNECTIONS)

    def host_of(self, fd: int) -> str:
        """Returns the address that a connection comes from; "" if it is not known."""
        return known.host if (known := self._known.get(fd)) is not None else ""

    async def run(self) -> None:
        """Checks all connections until cancelled, less often while none has many unread bytes."""
        while True:
            calm = self.cut_overfull() <= CALM * self._limit_bytes
            await asyncio.sleep(until_tick(CALM_S) if calm else LOOK_S)

    def cut_overfull(self) -> int:
        """Shuts down the connections that have too many unread bytes. Returns the most that one had."""
        most = 0
        for fd, known in list(self._known.items()):
            unread = _received(fd) - known.read
            most = max(most, unread)
            if unread <= self._limit_bytes:
                continue
            line = "a connection was cut: it sends more than is read, or a message without an end"
            self._cut(fd, line, known.peer, bytes=unread, limit=self._limit_bytes)
        return most

    def _keep(self, peer: str, host: str, most: int) -> None:
        """Shuts down the oldest of the peer's connections, or of those from `host` that are nobody's yet."""
        its = [fd for fd, known in self._known.items() if known.peer == peer and (peer or known.host == host)]
        for fd in its[:-most]:
            self._cut(fd, "a connection was cut: there are too many like it", peer, host=host, limit=most)

    def _cut(self, fd: int, line: str, peer: str, **fields: object) -> None:
        known = self._known.pop(fd)
        if known.inode and _inode(fd) == known.inode:
            _libc.shutdown(fd, socket.SHUT_RDWR)
            self.cut += 1
            self._say(logging.WARNING, line, peer, channel=self._channel, **fields)


def _received(fd: int) -> int:
    """Returns the bytes that the connection has received; 0 where it is closed."""
    size = ctypes.c_uint32(_BYTES_RECEIVED + 8)
    info = ctypes.create_string_buffer(size.value)
    if _libc.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)) or size.value < len(info):
        return 0
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0])


def _host(fd: int) -> str:
    """Returns the address that the connection comes from; "" where this is none of a peer's, or not any more."""
    try:
        copy = os.dup(fd)
    except OSError:
        return ""
    try:
        same = socket.socket(fileno=copy)
    except OSError:  # of a file
        os.close(copy)
        return ""
    with same, contextlib.suppress(OSError):
        if same.family in (socket.AF_INET, socket.AF_INET6):
            return str(same.getpeername()[0])
    return ""


def _inode(fd: int) -> int:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0
