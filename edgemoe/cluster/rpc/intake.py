"""Bounds what a connection brings and nobody has read yet: whole messages that wait, and one that has no end.

ZeroMQ bounds the bytes of a frame, but collects the frames of a message without an end. The messages that wait it could
bound, but must not: a connection that it holds back for them, and that then breaks, ends the process (libzmq 4.3.5
asserts `!_io_error`, where it next sends a heartbeat or answers one). So no socket has a mark at which it stops taking
in. The kernel is asked how many bytes each connection has brought; one that has brought more than a peer may have under
way, beyond what was read of it, is cut.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from edgemoe.cluster.rpc.sparing_log import SparingLog

log = logging.getLogger(__name__)
LOOK_S = 0.05  # between looks at all connections: what arrives meanwhile comes on top
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
FRAME_BYTES = 35  # that pass for a frame besides its own, at least
_BYTES_RECEIVED = 128  # where tcpi_bytes_received lies in struct tcp_info (Linux 4.1)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Connection:
    inode: int
    read: int = 0  # bytes of what it has brought


class Intake:
    """The connections of one channel, by file descriptor. They belong to ZeroMQ: here they are looked at, and cut."""

    def __init__(self, channel: str, limit_bytes: int) -> None:
        self.cut = 0
        self._say = SparingLog(log)
        self._channel, self._limit_bytes = channel, limit_bytes
        self._known: dict[int, _Connection] = {}

    def note(self, event: int, fd: int) -> None:
        """What ZeroMQ says of a connection."""
        if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
            self._known[fd] = _Connection(_inode(fd))
        elif event & EVENTS:
            self._known.pop(fd, None)

    def delivered(self, fd: int, frames: Sequence[zmq.Frame], waiting: bool) -> None:
        """A whole message has come out of it. `waiting` says whether others may be, which it has brought before."""
        if (known := self._known.get(fd)) is None:
            return
        brought = _received(fd)
        if waiting:
            known.read = min(brought, known.read + sum(len(frame) + FRAME_BYTES for frame in frames))
        else:
            known.read = brought  # heartbeats too, which come out nowhere

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Cuts the connections that have brought too much."""
        for fd, known in list(self._known.items()):
            unread = _received(fd) - known.read
            if unread <= self._limit_bytes:
                continue
            del self._known[fd]
            if known.inode and _inode(fd) == known.inode:
                _libc.shutdown(fd, socket.SHUT_RDWR)
                self.cut += 1
                line = "a connection was cut: it sends more than is read, or a message without an end"
                self._say(logging.WARNING, line, channel=self._channel, bytes=unread, limit=self._limit_bytes)


def _received(fd: int) -> int:
    """Bytes that the connection has brought; 0 where it is none any more."""
    size = ctypes.c_uint32(_BYTES_RECEIVED + 8)
    info = ctypes.create_string_buffer(size.value)
    if _libc.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)) or size.value < len(info):
        return 0
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0])


def _inode(fd: int) -> int:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return 0
