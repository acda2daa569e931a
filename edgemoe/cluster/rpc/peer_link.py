"""Our connection to one peer: a DEALER, what was asked on it, and the plain work with ZeroMQ's sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Generic, TypeVar

import zmq
import zmq.asyncio

from edgemoe.cluster.rpc import intake
from edgemoe.cluster.rpc.envelope import MAX_FRAMES, Buffer
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.transport import Answer, Credits
from edgemoe.errors import EdgemoeError, PeerUnavailable

M = TypeVar("M")
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH  # the peer does not let our key in
NOT_MET = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # as where it has another key
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | REFUSED | NOT_MET | intake.EVENTS


class PeerLink(Generic[M]):
    """Our DEALER to one peer, by the peer's first key, and what was asked on it."""

    def __init__(self, peer: Peer, socket: zmq.asyncio.Socket, credits_bytes: int) -> None:
        self.peer = peer
        self.node, self.address = peer.node, f"tcp://{peer.address}"
        self.socket = socket
        self.monitor = socket.get_monitor_socket(EVENTS)
        self.credits = Credits(credits_bytes)
        self.pending: dict[int, asyncio.Future[Answer[M]]] = {}
        self.up = False
        self.fd = -1  # of the connection
        self.apart = False  # left, and not connected again yet
        self.refusals = 0
        self.turning = False  # to the peer's other key, in a moment
        self.tasks: list[asyncio.Task[None]] = []

    def fail(self, error: EdgemoeError) -> None:
        """Ends all that was asked."""
        pending, self.pending = self.pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Frees the socket."""
        for task in self.tasks:
            task.cancel()
        self.fail(PeerUnavailable("the connection was closed"))
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


def who(identity: bytes) -> tuple[str, str]:
    """The node and the incarnation that a connection claims to be."""
    node, boot, *_ = [*identity.decode("ascii", "replace").split(":"), ""]
    return node, boot


def key_of(frame: zmq.Frame) -> bytes:
    """The public key of the connection that a frame came by, as the authenticator noted it."""
    return str(frame.get("User-Id")).encode()


def fd_of(frame: zmq.Frame) -> int:
    """The connection that a frame came by."""
    return int(frame.get(zmq.SRCFD))


def waiting(socket: zmq.asyncio.Socket) -> bool:
    """Whether a message is there to be read."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def hand(socket: zmq.asyncio.Socket, frames: Sequence[Buffer]) -> None:
    """Hands a message to ZeroMQ now. Raises zmq.ZMQError (Again: no connection, or its queue is full)."""
    assert len(frames) <= MAX_FRAMES + 2
    sent = socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    assert isinstance(sent, asyncio.Future)
    assert sent.done()
    sent.result()


async def until_closed(work: Awaitable[None]) -> None:
    """A reader ends when its socket is closed under it."""
    try:
        await work
    except (zmq.ContextTerminated, asyncio.CancelledError):
        raise
    except zmq.ZMQError as error:
        if error.errno != zmq.ENOTSOCK:
            raise
