"""The ZeroMQ context, keys, authentication and sockets that the channels of one process share.

Connections are authenticated by ZeroMQ's protocol [ZAP] and an allow-list of CURVE public keys. The key's owner is
looked up for each frame, so that a revoked key is refused at once, on open connections too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85

from edgemoe.cluster.rpc.keys import AllowList, Secret
from edgemoe.errors import WireError
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.wire import protocol
from edgemoe.wire.protocol import MAX_FRAMES, MAX_TENSOR_BYTES, Buffer, Versions

log = logging.getLogger(__name__)
ENDPOINT = "inproc://zeromq.zap.01"
HWM_MESSAGES = 256  # to be sent to one peer
DEAF_MS = 3000  # without a TCP acknowledgement, after which a connection counts as broken
CURVE_BYTES = 33  # that encryption adds to a frame
BURST = 16  # messages read before other tasks run
# as plain numbers, because flags are slow to combine
EVENTS, READABLE, AT_ONCE, MORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """How much passes over a channel, and how long it waits."""

    credits_bytes: int = 32 << 20  # under way to one peer
    heartbeat_s: float = 0.0  # none
    longest_s: float = 60.0  # longest that a question may wait here, even if its own deadline is later
    message_bytes: int = 32 << 20  # of one message; no peer has more than twice as much under way
    aside: bool = False  # a second connection to each peer, for long messages


class Transport:
    """Owns the ZeroMQ context, keys, allow-list, node name and incarnation of one process."""

    def __init__(
        self, node: str, boot: str, secret: Secret, allowed: AllowList, speaks: Versions | None = None
    ) -> None:
        self.node, self.boot, self.secret, self.allowed = node, boot, secret, allowed
        self.speaks = speaks or protocol.PROTOCOL_VERSIONS
        self.context = zmq.asyncio.Context()
        self.authenticator = Authenticator(self.context, allowed)

    async def run(self) -> None:
        """Authenticates connections until cancelled. Without it no peer can connect."""
        await self.authenticator.run()

    def socket(self, kind: int, settings: ChannelSettings) -> Socket:
        """Returns a socket with our keys. Raises zmq.ZMQError where there are none left."""
        context: zmq.Context[Any] = self.context  # of which this one is no asyncio socket
        socket: Socket = context.socket(kind, zmq.Socket)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, 1)  # and IPv4
        socket.set(zmq.SNDHWM, HWM_MESSAGES)
        socket.set(zmq.RCVHWM, 0)  # see intake, which bounds it
        socket.set(zmq.MAXMSGSIZE, min(settings.message_bytes, MAX_TENSOR_BYTES) + CURVE_BYTES)
        socket.set(zmq.HANDSHAKE_IVL, 3000)
        socket.set(zmq.TCP_MAXRT, DEAF_MS)
        socket.set(zmq.CURVE_SECRETKEY, self.secret.secret)
        socket.set(zmq.CURVE_PUBLICKEY, self.secret.public)
        if settings.heartbeat_s:
            socket.set(zmq.HEARTBEAT_IVL, int(settings.heartbeat_s * 1000))
            socket.set(zmq.HEARTBEAT_TIMEOUT, int(settings.heartbeat_s * 3000))
        return socket

    def close(self) -> None:
        """Frees the context. Must be called after every channel is closed."""
        self.authenticator.close()
        self.context.term()


class Authenticator:
    """Answers ZeroMQ's authentication requests of one context, while `run` runs.

    Must be made before any server socket is bound.
    """

    def __init__(self, context: zmq.asyncio.Context, allowed: AllowList) -> None:
        self._allowed = allowed
        self._say = RateLimitedLog(log)
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self.refused = 0

    async def run(self) -> None:
        while True:
            question = await self._socket.recv_multipart()
            await self._socket.send_multipart(self._answer(question))

    def close(self) -> None:
        self._socket.close(linger=0)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """Returns the reply: version, request id, status, text, user id, metadata."""
        request_id = question[1] if len(question) > 1 else b""
        if len(question) == 7 and question[0] == b"1.0" and question[5] == b"CURVE" and len(question[6]) == 32:
            key = z85.encode(question[6])
            if self._allowed.name_of(key) is not None:
                return [b"1.0", request_id, b"200", b"OK", key, b""]
            self._say(logging.WARNING, "a connection with an unlisted key was refused", key=key.decode())
        self.refused += 1
        return [b"1.0", request_id, b"400", b"unknown key", b"", b""]


class ErrorCounter:
    """Counts failed messages; each failure affects its message alone."""

    def __init__(self, channel: str) -> None:
        self.rejected = 0  # messages that could not be read or came from an unknown sender
        self.failed = 0  # messages whose handling raised an unexpected error
        self._channel = channel
        self._say = RateLimitedLog(log)

    def reject(self, peer: str, error: WireError) -> None:
        self.rejected += 1
        self._say(logging.WARNING, "message dropped", peer, channel=self._channel, why=str(error))

    @contextmanager
    def contained(self, peer: str) -> Iterator[None]:
        """Contains an exception of the `with` block: it ends that block alone."""
        try:
            yield
        except Exception:
            self.fail(peer)

    async def contain(self, peer: str, work: Coroutine[None, None, None]) -> None:
        """Runs the work of one message; an exception ends that work alone."""
        with self.contained(peer):
            await work

    def fail(self, peer: str) -> None:
        """Counts and logs the unexpected exception that is being handled."""
        self.failed += 1
        self._say(
            logging.ERROR, "a message failed here", peer, channel=self._channel, failed=self.failed, exc_info=True
        )


def claimed_identity(identity: bytes) -> tuple[str, str]:
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
    """Returns the monitor socket, which reports events of the connections of `socket`.

    Its queue has no limit. At the usual limit ZeroMQ's own thread would wait for a reader, and closing `socket`
    would wait for that thread for ever.
    """
    monitor: Any = socket.get_monitor_socket(events)  # of the context's own kind
    assert isinstance(monitor, zmq.asyncio.Socket)
    monitor.set(zmq.RCVHWM, 0)
    return monitor


class MessageReader:
    """Reads the messages of a socket that arrive, on the running loop, until closed.

    ZeroMQ reports arrivals once, and any use of the socket may consume the report: call `read_soon` after each use.
    """

    def __init__(self, socket: Socket, take: Callable[[Sequence[zmq.Frame], bool], None]) -> None:
        """Calls `take` with each message and whether others wait; `take` must not raise."""
        self._socket, self._take = socket, take
        self._loop: asyncio.AbstractEventLoop | None = None
        self._soon = False  # it reads in a moment anyway

    def start(self) -> None:
        """Starts reading on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._read)
        self.read_soon()

    def read_soon(self) -> None:
        """Schedules a read of messages that have arrived."""
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
        self.read_soon()


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
