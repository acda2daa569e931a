"""Bounds what a connection brings before a whole message has come out of it.

ZeroMQ bounds the bytes of a frame and the number of messages, but collects the frames of a message without an end. So
the kernel is asked how many bytes each connection has brought; one that has brought more than a peer may have under
way, since its last whole message, is cut.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct

import zmq

from edgemoe.cluster.wire.sparing import SparingLog

log = logging.getLogger(__name__)
LOOK_S = 0.05  # between looks at all connections: what arrives meanwhile comes on top
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_BYTES_RECEIVED = 128  # where tcpi_bytes_received lies in struct tcp_info (Linux 4.1)
_libc = ctypes.CDLL(None, use_errno=True)


class Intake:
    """The connections of one lane, by file descriptor. They belong to ZeroMQ: here they are looked at, and cut."""

    def __init__(self, lane: str, limit_bytes: int) -> None:
        self.cut = 0
        self._say = SparingLog(log)
        self._lane, self._limit_bytes = lane, limit_bytes
        self._known: dict[int, tuple[int, int]] = {}  # inode, and bytes when the last message came out

    def note(self, event: int, fd: int) -> None:
        """What ZeroMQ says of a connection."""
        if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
            self._known[fd] = (_inode(fd), 0)
        elif event & EVENTS:
            self._known.pop(fd, None)

    def delivered(self, fd: int) -> None:
        """A whole message has come out of it."""
        if (known := self._known.get(fd)) is not None:
            self._known[fd] = (known[0], _received(fd))

    def look(self) -> None:
        """Cuts the connections that have brought too much."""
        for fd, (inode, before) in list(self._known.items()):
            brought = _received(fd) - before
            if brought <= self._limit_bytes:
                continue
            del self._known[fd]
            if inode and _inode(fd) == inode:
                _libc.shutdown(fd, socket.SHUT_RDWR)
                self.cut += 1
                line = "a connection was cut: it sends a message without an end"
                self._say(logging.WARNING, line, lane=self._lane, bytes=brought, limit=self._limit_bytes)


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
