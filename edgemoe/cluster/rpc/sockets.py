"""Helpers for ZeroMQ's sockets: the sender of a frame, sending and reading without a task for each message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from edgemoe.cluster.rpc.envelope import MAX_FRAMES, Buffer

BURST = 16  # messages read before other tasks run
# as plain numbers, because flags are slow to combine
EVENTS, READABLE, AT_ONCE, MORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
Socket = zmq.Socket[bytes]


def who(identity: bytes) -> tuple[str, str]:
    """Returns the node and the incarnation that a connection's identity claims."""
    node, boot, *_ = [*identity.decode("ascii", "replace").split(":"), ""]
    return node, boot


def key_of(frame: zmq.Frame) -> bytes:
    """Returns the authenticated public key of the connection that a frame came by."""
    return str(frame.get("User-Id")).encode()


def fd_of(frame: zmq.Frame) -> int:
    """Returns the file descriptor of the connection that a frame came by."""
    return int(frame.get(zmq.SRCFD))


def watch(socket: Socket, events: int) -> zmq.asyncio.Socket:
    """Returns the socket on which `socket` says what becomes of its connections.

    It takes in any number of events: at its usual mark ZeroMQ's own thread would wait for somebody to read them, and
    whoever closes `socket`, which reads no more, would wait for that thread for ever.
    """
    monitor: Any = socket.get_monitor_socket(events)  # of the context's own kind
    assert isinstance(monitor, zmq.asyncio.Socket)
    monitor.set(zmq.RCVHWM, 0)
    return monitor


class MessageReader:
    """Reads the messages of a socket that arrive, on the running loop, until closed.

    ZeroMQ says once that there are some. Whatever is done with a socket may use that up, so that `look` must follow.
    """

    def __init__(self, socket: Socket, take: Callable[[Sequence[zmq.Frame], bool], None]) -> None:
        """`take` gets each message, and whether others wait; it must not raise."""
        self._socket, self._take = socket, take
        self._loop: asyncio.AbstractEventLoop | None = None
        self._soon = False  # it reads in a moment anyway

    def start(self) -> None:
        """Reads from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._read)
        self.look()

    def look(self) -> None:
        """Reads in a moment what has arrived meanwhile."""
        if self._loop is not None and not self._soon and _waiting(self._socket):
            self._soon = True
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Reads no more. Must be called before the socket is closed."""
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
        self._loop = None

    def _read(self) -> None:
        self._soon = False
        for _ in range(BURST):
            if self._loop is None or not _waiting(self._socket):
                return
            self._take(_receive(self._socket), _waiting(self._socket))
        self.look()


def _waiting(socket: Socket) -> bool:
    return bool(int(socket.get(EVENTS)) & READABLE)


def _receive(socket: Socket) -> Sequence[zmq.Frame]:
    frames = [socket.recv(AT_ONCE, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(AT_ONCE, copy=False))
    return frames


def hand(socket: Socket, frames: Sequence[Buffer]) -> None:
    """Hands a message to ZeroMQ without waiting. Raises zmq.ZMQError (Again: not connected, or the queue is full)."""
    assert len(frames) <= MAX_FRAMES + 2
    for frame in frames[:-1]:
        socket.send(frame, MORE, copy=False)
    socket.send(frames[-1], AT_ONCE, copy=False)


async def until_closed(read: Callable[[], Awaitable[None]]) -> None:
    """Runs a reader until its socket is closed, without raising the error that this causes.

    The reader is made here: a task that is cancelled before its first step would leave one behind that nobody awaits.
    """
    try:
        await read()
    except (zmq.ContextTerminated, asyncio.CancelledError):
        raise
    except zmq.ZMQError as error:
        if error.errno != zmq.ENOTSOCK:
            raise
