"""Helpers for ZeroMQ's sockets: the sender of a frame, sending without waiting, reading until closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import zmq
import zmq.asyncio

from edgemoe.cluster.rpc.envelope import MAX_FRAMES, Buffer


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


def watch(socket: zmq.asyncio.Socket, events: int) -> zmq.asyncio.Socket:
    """Returns the socket on which `socket` says what becomes of its connections.

    It takes in any number of events: at its usual mark ZeroMQ's own thread would wait for somebody to read them, and
    whoever closes `socket`, which reads no more, would wait for that thread for ever.
    """
    monitor = socket.get_monitor_socket(events)
    monitor.set(zmq.RCVHWM, 0)
    return monitor


def waiting(socket: zmq.asyncio.Socket) -> bool:
    """Returns whether a message can be read without waiting."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def hand(socket: zmq.asyncio.Socket, frames: Sequence[Buffer]) -> None:
    """Hands a message to ZeroMQ without waiting. Raises zmq.ZMQError (Again: not connected, or the queue is full)."""
    assert len(frames) <= MAX_FRAMES + 2
    sent = socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    assert isinstance(sent, asyncio.Future)
    assert sent.done()
    sent.result()


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
