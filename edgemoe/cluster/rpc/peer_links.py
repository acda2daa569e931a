"""The asking end of a channel: a DEALER to each peer, kept up, and the answers that come on it.

A lost connection fails all questions on it at once, and is opened again a moment later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from edgemoe.cluster.rpc import connection_guard as intake
from edgemoe.cluster.rpc.connection_guard import ConnectionGuard
from edgemoe.cluster.rpc.envelope import Answer, EnvelopeCodec, Failure
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.transport import (
    ChannelSettings,
    ErrorCounter,
    MessageReader,
    Socket,
    Transport,
    until_closed,
    watch,
)
from edgemoe.errors import EdgemoeError, PeerUnavailable, WireError
from edgemoe.telemetry.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)
M = TypeVar("M")
RECONNECT_MS = 250
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH  # the peer refuses our key
NOT_MET = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # e.g. the peer has another key
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | REFUSED | NOT_MET | intake.EVENTS


@dataclass(slots=True, eq=False)
class PendingQuestion(Generic[M]):
    """A question of ours that has not ended: it waits for credits, and then for its answer.

    `send` sends it, and may raise EdgemoeError. `done` is called once.
    """

    id: int
    send: Callable[[], None]
    done: Callable[[Answer[M] | EdgemoeError], None]
    deadline: asyncio.TimerHandle | None = None
    credits_bytes: int = 0  # that it has taken


class PeerCredits:
    """Limits the bytes under way to one peer. A question larger than the limit takes all credits."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._free = limit_bytes
        self._waiting: deque[tuple[int, Callable[[int], None]]] = deque()
        self._passing = False

    def acquire(self, size_bytes: int, then: Callable[[int], None]) -> None:
        """Calls `then` with the credits to release once `size_bytes` may be sent: now, or after earlier callers."""
        self._waiting.append((min(size_bytes, self._limit), then))
        self.release(0)

    def release(self, size_bytes: int) -> None:
        self._free += size_bytes
        if self._passing:  # a callback below released its credits at once
            return
        self._passing = True
        try:
            while self._waiting and self._waiting[0][0] <= self._free:
                size_bytes, then = self._waiting.popleft()
                self._free -= size_bytes
                then(size_bytes)
        finally:
            self._passing = False


class PeerLink(Generic[M]):
    """Owns the DEALER to one peer, which expects the peer's first key, and its pending questions."""

    def __init__(self, peer: Peer, socket: Socket, credits_bytes: int) -> None:
        self.peer = peer
        self.node, self.address = peer.node, f"tcp://{peer.address}"
        self.socket = socket
        self.monitor = watch(socket, EVENTS)
        self.pending: dict[int, PendingQuestion[M]] = {}
        self.reader: MessageReader | None = None
        self._credits = PeerCredits(credits_bytes)
        self.up = False
        self.fd = -1  # of the connection
        self.apart = False  # left, and not connected again yet
        self.refusals = 0
        self.turning = False  # to the peer's other key, in a moment
        self.task: asyncio.Task[None] | None = None

    def ask(self, asked: PendingQuestion[M], size_bytes: int) -> None:
        """Sends a question once `size_bytes` more may be under way."""
        self.pending[asked.id] = asked
        self._credits.acquire(size_bytes, partial(self._send, asked))

    def end(self, id: int, outcome: Answer[M] | EdgemoeError) -> None:
        """Ends a pending question. Does nothing where it has ended."""
        if (asked := self.pending.pop(id, None)) is not None:
            self._end(asked, outcome)

    def fail(self, error: EdgemoeError) -> None:
        """Fails all pending questions with `error`."""
        pending, self.pending = self.pending, {}
        for asked in pending.values():
            self._end(asked, error)

    def _send(self, asked: PendingQuestion[M], credits_bytes: int) -> None:
        if asked.id not in self.pending:
            self._credits.release(credits_bytes)
            return
        asked.credits_bytes = credits_bytes
        try:
            asked.send()
        except EdgemoeError as error:
            self.end(asked.id, error)
        self.read_soon()

    def read_soon(self) -> None:
        """Reads soon; must be called after every use of the socket."""
        if self.reader is not None:
            self.reader.read_soon()

    def _end(self, asked: PendingQuestion[M], outcome: Answer[M] | EdgemoeError) -> None:
        if asked.deadline is not None:
            asked.deadline.cancel()
        self._credits.release(asked.credits_bytes)
        asked.done(outcome)

    def close(self) -> None:
        """Fails pending questions and frees the socket."""
        if self.task is not None:
            self.task.cancel()
        if self.reader is not None:
            self.reader.close()
        self.fail(PeerUnavailable("the connection was closed"))
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class PeerLinks(Generic[M]):
    """The links of one channel, by node. `on_up` and `on_down` are told which peers are met and lost."""

    def __init__(
        self,
        transport: Transport,
        codec: EnvelopeCodec[M],
        settings: ChannelSettings,
        intake: ConnectionGuard,
        mishaps: ErrorCounter,
        on_up: Callable[[str], None],
        on_down: Callable[[str], None],
    ) -> None:
        self._transport, self._codec, self._settings = transport, codec, settings
        self._intake, self._mishaps = intake, mishaps
        self._on_up, self._on_down = on_up, on_down
        self._say = RateLimitedLog(log)
        self._links: dict[str, PeerLink[M]] = {}
        self._group: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._links)

    def __getitem__(self, node: str) -> PeerLink[M]:
        """Returns the link to a connected peer. Raises PeerUnavailable where it is not connected."""
        link = self._links.get(node)
        if link is None or not link.up:
            raise PeerUnavailable(f"{node} is not connected on {self._codec.channel}")
        return link

    def is_up(self, node: str) -> bool:
        return node in self._links and self._links[node].up

    def waiting(self) -> int:
        """Counts our questions without an answer."""
        return sum(len(link.pending) for link in self._links.values())

    def start(self, group: asyncio.TaskGroup) -> None:
        """Starts reading from all links, in tasks of `group`."""
        self._group = group
        for link in self._links.values():
            self._start(link, group)

    def close(self) -> None:
        """Closes the sockets of all links."""
        self._group = None
        for link in self._links.values():
            link.close()
        self._links.clear()

    def connect(self, peer: Peer) -> None:
        """Connects to `peer` by whichever of its keys it has, and reconnects when the connection breaks.

        Replaces an earlier connection to that node, unless that has the same address and a key that is still valid.
        """
        if (old := self._links.get(peer.node)) and old.peer.address == peer.address and old.peer.key in peer.keys:
            old.peer = peer if old.peer.key == peer.key else peer.with_keys_swapped()
            return
        self.disconnect(peer.node)
        try:
            link = self._links[peer.node] = self._dial(peer)
        except zmq.ZMQError as error:  # one bad peer must not keep others out
            self._say(logging.ERROR, "a box cannot be reached", peer.node, address=peer.address, why=str(error))
            return
        if self._group is not None:
            self._start(link, self._group)

    def _dial(self, peer: Peer) -> PeerLink[M]:
        """Returns a link to `peer`. Raises zmq.ZMQError for an invalid key or address, and where no socket is left."""
        socket = self._transport.socket(zmq.DEALER, self._settings)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)  # each time, however often it has failed
        socket.set(zmq.CONNECT_TIMEOUT, 1000)  # a lost SYN is sent again after a second, not after 1, 3, 7, 15
        link: PeerLink[M] | None = None
        try:
            for key in reversed(peer.keys):  # checks all; the first one, set last, is used
                socket.set(zmq.CURVE_SERVERKEY, key.encode())
            link = PeerLink[M](peer, socket, self._settings.credits_bytes)
            self._connect(link)
        except zmq.ZMQError:
            socket.close(linger=0) if link is None else link.close()
            raise
        return link

    def _connect(self, link: PeerLink[M]) -> None:
        """Connects under a new random identity, because the peer may not have noticed yet that the old one is gone.

        ROUTER sockets do not hand an identity over to a new connection, and do not read messages of the old one.
        ZeroMQ ends the process if such a connection breaks.
        """
        link.apart = False
        link.socket.set(zmq.IDENTITY, f"{self._transport.node}:{self._transport.boot}:{secrets.token_hex(8)}".encode())
        link.socket.connect(link.address)
        link.read_soon()

    def disconnect(self, node: str) -> None:
        """Closes the connection to that peer and fails all questions to it."""
        if link := self._links.pop(node, None):
            was_up = link.up
            link.close()
            if was_up:
                self._on_down(node)

    def give_up(self, node: str, why: str) -> None:
        """Fails all questions to that peer; the connection stays."""
        if link := self._links.get(node):
            link.fail(PeerUnavailable(why))

    def _start(self, link: PeerLink[M], group: asyncio.TaskGroup) -> None:
        link.task = group.create_task(until_closed(partial(self._read_events, link)))
        link.reader = MessageReader(link.socket, partial(self._on_answer, link))
        link.reader.start()

    async def _read_events(self, link: PeerLink[M]) -> None:
        while True:
            report = parse_monitor_message(await link.monitor.recv_multipart())
            event, fd = report["event"], report["value"]
            try:
                self._intake.on_event(event, fd)
                if event == zmq.EVENT_CONNECTED:
                    link.fd = fd
                else:
                    self._note(link, event)
            except Exception:  # of a callback
                self._mishaps.fail(link.node)

    def _note(self, link: PeerLink[M], event: int) -> None:
        if link.apart:
            return  # an event of a connection that was left meanwhile
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.up = True
            self._on_up(link.node)
        elif event & NOT_MET:
            if link.peer.new_key and not link.turning:
                link.turning = True
                asyncio.get_running_loop().call_later(RECONNECT_MS / 1000, self._turn, link)
        elif event == REFUSED:
            link.refusals += 1
            if link.refusals == 2:  # a peer that has just started may not know us yet
                self._say(
                    logging.WARNING, "a peer refuses our key; list it there", link.node, channel=self._codec.channel
                )
        elif event == zmq.EVENT_DISCONNECTED:
            self._leave(link)

    def _leave(self, link: PeerLink[M]) -> None:
        """Disconnects, and reconnects a moment later under another identity.

        ZeroMQ by itself would keep the identity, and would not retry where the peer refused our key. The peer may have
        learned the key by then.
        """
        link.apart = True
        with contextlib.suppress(zmq.ZMQError):
            link.socket.disconnect(link.address)
        link.read_soon()
        asyncio.get_running_loop().call_later(RECONNECT_MS / 1000, self._connect_again, link)
        if link.up:
            link.up = False
            link.fail(PeerUnavailable(f"the connection to {link.node} broke ({self._codec.channel})"))
            self._on_down(link.node)

    def _turn(self, link: PeerLink[M]) -> None:
        """Tries the peer's other key on a new socket; the old socket would go on using the first key."""
        link.turning = False
        if self._links.get(link.node) is link and not link.up:
            self.disconnect(link.node)
            self.connect(link.peer.with_keys_swapped())

    def _connect_again(self, link: PeerLink[M]) -> None:
        if self._links.get(link.node) is link:
            self._connect(link)

    def _on_answer(self, link: PeerLink[M], frames: Sequence[zmq.Frame], waiting: bool) -> None:
        try:
            self._intake.on_message_read(link.fd, frames, waiting)
            self._read_answer(link, [frame.buffer for frame in frames])
        except WireError as error:
            self._mishaps.reject(link.node, error)
        except Exception:  # a bad answer affects that answer alone
            self._mishaps.fail(link.node)

    def _read_answer(self, link: PeerLink[M], frames: Sequence[memoryview]) -> None:
        envelope = self._codec.open(link.node, frames)
        message: Any = self._codec.read(envelope)
        if isinstance(message, Failure) and not envelope.id:
            raise WireError(f"{link.node} could not read it: {message.message}")
        if envelope.answer:
            failed = isinstance(message, Failure)
            link.end(envelope.id, message.error(link.node) if failed else Answer(message, frames[1:]))
