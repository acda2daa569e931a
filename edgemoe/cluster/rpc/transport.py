"""Types that all channels of a process share: questions, answers, failures, credits, the ZeroMQ context."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import zmq
import zmq.asyncio
from msgspec import Meta

from edgemoe.cluster.rpc.auth import AllowList, Authenticator
from edgemoe.cluster.rpc.envelope import MAX_TENSOR_BYTES, Envelope
from edgemoe.cluster.rpc.keys import Secret
from edgemoe.cluster.rpc.sockets import Socket
from edgemoe.errors import EdgemoeError, PeerBusy, PeerError, PeerOutdated, PeerRefused, UnknownMessage
from edgemoe.types.bounds import Word
from edgemoe.wire import protocol
from edgemoe.wire.protocol import Message, Versions

M = TypeVar("M")
HWM_MESSAGES = 256  # to be sent to one peer
DEAF_MS = 3000  # without a TCP acknowledgement, after which a connection counts as broken
CURVE_BYTES = 33  # that encryption adds to a frame
FAILURE_CHARS = 1024  # of a failure's text; the rest is cut


class Failure(Message, frozen=True, tag="Failure"):
    """The answer to a question that was not served. Part of every channel's language.

    `kind` is "busy", "unknown" for a message that this release does not have, "failed" where serving raised an
    unexpected error, or "refused". Any other kind counts as "refused".
    """

    kind: Word
    message: Annotated[str, Meta(max_length=FAILURE_CHARS)]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Returns the answer to a question whose serving raised `error`."""
        text = str(error) if isinstance(error, EdgemoeError) else f"it went wrong: {error!r}"
        kinds = ((PeerBusy, "busy"), (UnknownMessage, "unknown"), (EdgemoeError, "refused"), (Exception, "failed"))
        text = text[:FAILURE_CHARS].encode("utf-8", "replace").decode()  # a file's name may hold what no text can
        return cls(next(kind for of, kind in kinds if isinstance(error, of)), text)

    def error(self, node: str) -> PeerError:
        """Returns the error to raise where `node` was asked."""
        kind = {"busy": PeerBusy, "unknown": PeerOutdated}.get(self.kind, PeerRefused)
        return kind(f"{node}: {self.message}")


@dataclass(frozen=True, slots=True)
class Question(Generic[M]):
    """A message from a peer, which expects an answer unless envelope.id is 0."""

    peer: str
    boot: str
    envelope: Envelope
    message: M
    tensors: Sequence[memoryview]
    deadline: float  # by the loop's clock


@dataclass(frozen=True, slots=True)
class Answer(Generic[M]):
    message: M
    tensors: Sequence[memoryview] = ()


@dataclass(slots=True, eq=False)
class Asked(Generic[M]):
    """A question of ours that has not ended: it waits for credits, and then for its answer.

    `send` sends it, and may raise EdgemoeError. `done` is called once.
    """

    id: int
    send: Callable[[], None]
    done: Callable[[Answer[M] | EdgemoeError], None]
    deadline: asyncio.TimerHandle | None = None
    credits_bytes: int = 0  # that it has taken


class Credits:
    """Limits the bytes under way to one peer. A question larger than the limit takes all credits."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._free = limit_bytes
        self._waiting: deque[tuple[int, Callable[[int], None]]] = deque()
        self._passing = False

    def take(self, size_bytes: int, then: Callable[[int], None]) -> None:
        """Calls `then` with what to give back once `size_bytes` may be sent: now, or after those who wait."""
        self._waiting.append((min(size_bytes, self._limit), then))
        self.give(0)

    def give(self, size_bytes: int) -> None:
        self._free += size_bytes
        if self._passing:  # whoever is called below gave back at once
            return
        self._passing = True
        try:
            while self._waiting and self._waiting[0][0] <= self._free:
                size_bytes, then = self._waiting.popleft()
                self._free -= size_bytes
                then(size_bytes)
        finally:
            self._passing = False


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """How much passes over a channel, and how long it waits."""

    credits_bytes: int = 32 << 20  # under way to one peer
    heartbeat_s: float = 0.0  # none
    longest_s: float = 60.0  # longest that a question may wait here, whatever its own deadline
    message_bytes: int = 32 << 20  # of one message; no peer has more than twice as much under way
    aside: bool = False  # a second connection to each peer, for what is long


class Transport:
    """Owns what the channels of one process share: ZeroMQ context, keys, allow-list, node name, incarnation."""

    def __init__(
        self, node: str, boot: str, secret: Secret, allowed: AllowList, speaks: Versions | None = None
    ) -> None:
        self.node, self.boot, self.secret, self.allowed = node, boot, secret, allowed
        self.speaks = speaks or protocol.SPOKEN
        self.context = zmq.asyncio.Context()
        self.authenticator = Authenticator(self.context, allowed)

    async def run(self) -> None:
        """Authenticates connections until cancelled. Without it no peer can connect."""
        await self.authenticator.run()

    def socket(self, kind: int, settings: ChannelSettings) -> Socket:
        """One of ours, with our keys. Raises zmq.ZMQError where there are none left."""
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
