"""One conversation of a box with its peers: a ROUTER that answers, and one DEALER per peer that asks.

A box holds three lanes (control, expert calls, bulk), so that megabytes on one never delay a heartbeat on another.
CURVE authenticates both ends, the allow-list names who speaks, an envelope frames every message. What is asked of a
peer is bounded in bytes under way (credits) and in time; a lost connection fails everything asked on it at once.
A lane belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from edgemoe.cluster.wire.envelope import MAX_FRAMES, MAX_TENSOR_BYTES, Buffer, Envelope, seal, unseal
from edgemoe.cluster.wire.keys import Peer
from edgemoe.cluster.wire.net import Answer, Credits, Failure, Net, Question
from edgemoe.errors import EdgemoeError, PeerBusy, PeerRefused, PeerUnavailable, WireError, WireVersionError

log = logging.getLogger(__name__)
M = TypeVar("M")
HWM_MESSAGES = 256
SERVED_AT_ONCE = 64  # questions of one peer; beyond it they are sent away
ASKED_AT_ONCE = 48  # at most, of one peer: others wait for credits
BURST = 16  # messages read in one go
REFUSED_S = 0.5  # before a peer that refused our key is tried again
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class _Link(Generic[M]):
    """Our DEALER to one peer, and what was asked on it."""

    def __init__(self, node: str, address: str, socket: zmq.asyncio.Socket, credits_bytes: int) -> None:
        self.node, self.address = node, address
        self.socket = socket
        self.monitor = socket.get_monitor_socket(EVENTS)
        self.credits = Credits(credits_bytes)
        self.pending: dict[int, asyncio.Future[Answer[M]]] = {}
        self.up = False
        self.refusals = 0
        self.tasks: list[asyncio.Task[None]] = []

    def fail(self, error: EdgemoeError) -> None:
        pending, self.pending = self.pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.fail(PeerUnavailable("the connection was closed"))
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class Lane(Generic[M]):
    """See the module. `decoder` reads the bodies of this lane's language (Failure included); `serve` answers."""

    def __init__(
        self,
        net: Net,
        name: str,
        decoder: msgspec.msgpack.Decoder[Any],
        serve: Callable[[Question[M]], Awaitable[Answer[M] | None]],
        *,
        credits_bytes: int = 32 << 20,
        heartbeat_s: float = 0.0,
    ) -> None:
        self.name = name
        self.rejected = 0  # messages dropped because they could not be read or came from nobody
        self.on_up: Callable[[str], None] = lambda _node: None
        self.on_down: Callable[[str], None] = lambda _node: None
        self.on_foreign: Callable[[str, str], None] = lambda _node, _why: None  # one speaks another version
        self._net, self._decoder, self._serve = net, decoder, serve
        self._credits_bytes, self._heartbeat_s = credits_bytes, heartbeat_s
        self._links: dict[str, _Link[M]] = {}
        self._serving: dict[str, int] = {}
        self._ids = itertools.count(1)
        self._router = self._socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        # A box that lost its connection may be back before this end has noticed: else ZeroMQ would ignore the new one.
        self._router.set(zmq.ROUTER_HANDOVER, 1)
        self._router.set(zmq.CURVE_SERVER, 1)
        self._group: asyncio.TaskGroup | None = None

    def bind(self, host: str, port: int = 0) -> int:
        """Listens; returns the port. Raises PeerRefused where the address cannot be had."""
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            self._router.bind(f"{address}:{port or '*'}")
        except zmq.ZMQError as error:
            raise PeerRefused(f"cannot listen on {host}:{port} for {self.name}: {error}") from error
        return int(bytes(self._router.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").rsplit(b":", 1)[1])

    async def run(self) -> None:
        """Serves and reads answers until cancelled, then closes every socket."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for link in self._links.values():
                    self._start(link, self._group)
                await self._answer_questions(self._group)
        finally:
            self._group = None
            self.close()

    def close(self) -> None:
        """Closes every socket; `run` does so itself."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._router.close(linger=0)

    def connect(self, peer: Peer) -> None:
        """Connects to `peer` and keeps reconnecting; replaces an earlier connection to that node."""
        self.disconnect(peer.node)
        socket = self._socket(zmq.DEALER)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, 100)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        socket.set(zmq.CONNECT_TIMEOUT, 1000)  # a lost SYN is sent again after a second, not after 1, 3, 7, 15
        link = self._links[peer.node] = _Link[M](peer.node, f"tcp://{peer.address}", socket, self._credits_bytes)
        try:
            socket.set(zmq.CURVE_SERVERKEY, peer.key.encode())
            socket.connect(link.address)
        except zmq.ZMQError as error:  # one address that is no good keeps nobody else out
            log.error("a box cannot be reached", extra={"peer": peer.node, "address": peer.address, "why": str(error)})
        if self._group is not None:
            self._start(link, self._group)

    def disconnect(self, node: str) -> None:
        if link := self._links.pop(node, None):
            was_up = link.up
            link.close()
            if was_up:
                self.on_down(node)

    def is_up(self, node: str) -> bool:
        return node in self._links and self._links[node].up

    def waiting(self) -> int:
        """Questions of ours without an answer yet."""
        return sum(len(link.pending) for link in self._links.values())

    async def ask(
        self,
        node: str,
        body: msgspec.Struct,
        tensors: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        epoch: int = 0,
        plan: int = 0,
    ) -> Answer[M]:
        """The peer's answer. Raises PeerUnavailable, PeerBusy or PeerRefused, within `timeout_s`."""
        link = self._link(node)
        size = max(sum(memoryview(t).nbytes for t in tensors), self._credits_bytes // ASKED_AT_ONCE + 1)
        taken, id = 0, next(self._ids)
        future: asyncio.Future[Answer[M]] = asyncio.get_running_loop().create_future()
        ends = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(ends):
                taken = await link.credits.take(size)
                link.pending[id] = future
                left_ms = max(0.0, ends - asyncio.get_running_loop().time()) * 1000
                _hand(link.socket, seal(body, tensors, id=id, epoch=epoch, plan=plan, remaining_ms=left_ms))
                return await future
        except TimeoutError as error:
            raise PeerUnavailable(f"{node} did not answer within {timeout_s:.3g} s ({self.name})") from error
        except zmq.ZMQError as error:
            raise PeerUnavailable(f"{node} cannot be reached on {self.name}: {error}") from error
        finally:
            link.pending.pop(id, None)
            if taken:
                await link.credits.give(taken)

    def tell(self, node: str, body: msgspec.Struct, tensors: Sequence[Buffer] = (), *, epoch: int = 0) -> bool:
        """Sends without wanting an answer; False where it could not be handed over."""
        link = self._links.get(node)
        if link is None or not link.up:
            return False
        try:
            _hand(link.socket, seal(body, tensors, epoch=epoch))
        except zmq.ZMQError:
            return False
        return True

    def _link(self, node: str) -> _Link[M]:
        link = self._links.get(node)
        if link is None or not link.up:
            raise PeerUnavailable(f"{node} is not connected on {self.name}")
        return link

    def _start(self, link: _Link[M], group: asyncio.TaskGroup) -> None:
        for work in (self._read_answers(link), self._read_events(link)):
            link.tasks.append(group.create_task(_until_closed(work)))

    async def _read_events(self, link: _Link[M]) -> None:
        while True:
            event = parse_monitor_message(await link.monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                link.up = True
                self.on_up(link.node)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                link.refusals += 1
                if link.refusals == 2:  # one who has just come may not have heard of us yet
                    log.warning("a peer refuses our key; list it there", extra={"peer": link.node, "lane": self.name})
                asyncio.get_running_loop().call_later(REFUSED_S, self._connect_again, link)
            elif link.up:
                link.up = False
                link.fail(PeerUnavailable(f"the connection to {link.node} broke ({self.name})"))
                self.on_down(link.node)

    def _connect_again(self, link: _Link[M]) -> None:
        """ZeroMQ takes a refusal for final; but the peer may learn of our key a moment later."""
        if self._links.get(link.node) is link and not link.up:
            with contextlib.suppress(zmq.ZMQError):
                link.socket.disconnect(link.address)
            link.socket.connect(link.address)

    async def _read_answers(self, link: _Link[M]) -> None:
        while True:
            frames = await link.socket.recv_multipart(copy=False)
            try:
                envelope, message, tensors = self._read([frame.buffer for frame in frames])
            except WireError as error:
                self._reject(link.node, error)
                continue
            if isinstance(message, Failure) and not envelope.id:
                self._reject(link.node, WireError(f"{link.node} could not read it: {message.message}"))
            future = link.pending.pop(envelope.id, None)
            if not envelope.answer or future is None or future.done():
                continue
            if isinstance(message, Failure):
                kind = PeerBusy if message.kind == "busy" else PeerRefused
                future.set_exception(kind(f"{link.node}: {message.message}"))
            else:
                future.set_result(Answer(message, tensors))

    async def _answer_questions(self, group: asyncio.TaskGroup) -> None:
        for count in itertools.count(1):
            if count % BURST == 0:  # reading what is there already does not let others run
                await asyncio.sleep(0)
            identity, *frames = await self._router.recv_multipart(copy=False)
            peer, boot = _who(bytes(identity.buffer))
            if not frames or self._net.allowed.name_of(_key_of(frames[0])) != peer:
                self._reject(peer, WireError("the name does not belong to the key, or the key was revoked"))
                continue
            try:
                envelope, message, tensors = self._read([frame.buffer for frame in frames])
            except WireVersionError as error:
                self._reject(peer, error)
                self.on_foreign(peer, str(error))
                self._send_back(bytes(identity.buffer), seal(Failure("refused", str(error)), answer=True))
                continue  # what was sent back cannot be read there either, and is told there by its version
            except WireError as error:
                self._reject(peer, error)
                continue
            if envelope.answer or isinstance(message, Failure):
                self._reject(peer, WireError("an answer to nothing"))
                continue
            deadline = asyncio.get_running_loop().time() + envelope.remaining_ms / 1000
            question = Question(peer, boot, envelope, message, tensors, deadline)
            if self._serving.get(peer, 0) >= SERVED_AT_ONCE:
                self._reply(bytes(identity.buffer), envelope, Failure("busy", "too many questions at once"), ())
            else:
                self._serving[peer] = self._serving.get(peer, 0) + 1
                group.create_task(self._answer(bytes(identity.buffer), question))

    async def _answer(self, identity: bytes, question: Question[M]) -> None:
        try:
            answer = await self._serve(question)
        except PeerBusy as error:
            self._reply(identity, question.envelope, Failure("busy", str(error)), ())
        except EdgemoeError as error:
            self._reply(identity, question.envelope, Failure("refused", str(error)), ())
        else:
            if answer is not None:
                assert isinstance(answer.message, msgspec.Struct)
                self._reply(identity, question.envelope, answer.message, answer.tensors)
        finally:
            self._serving[question.peer] -= 1

    def _reply(self, identity: bytes, asked: Envelope, body: msgspec.Struct, tensors: Sequence[Buffer]) -> None:
        if not asked.id:
            return
        self._send_back(identity, seal(body, tensors, id=asked.id, answer=True))

    def _send_back(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        try:
            _hand(self._router, [identity, *frames])
        except zmq.ZMQError as error:
            log.debug("an answer could not be sent", extra={"lane": self.name, "why": str(error)})

    def _read(self, frames: Sequence[memoryview]) -> tuple[Envelope, Any, Sequence[memoryview]]:
        envelope = unseal(frames)
        try:
            return envelope, self._decoder.decode(envelope.body), frames[1:]
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise WireError(f"a body that cannot be read: {error}") from error

    def _reject(self, peer: str, error: WireError) -> None:
        self.rejected += 1
        if self.rejected & (self.rejected - 1) == 0:  # 1, 2, 4, 8, ...: a flood does not fill the log
            log.warning("message dropped", extra={"peer": peer, "lane": self.name, "why": str(error)})

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._net.context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, HWM_MESSAGES)
        socket.set(zmq.RCVHWM, HWM_MESSAGES)
        socket.set(zmq.MAXMSGSIZE, MAX_TENSOR_BYTES + 1)
        socket.set(zmq.HANDSHAKE_IVL, 3000)
        socket.set(zmq.CURVE_SECRETKEY, self._net.secret.secret)
        socket.set(zmq.CURVE_PUBLICKEY, self._net.secret.public)
        if kind == zmq.DEALER:
            # with a part that only the peer learns, so that nobody else can take the connection over
            socket.set(zmq.IDENTITY, f"{self._net.node}:{self._net.boot}:{secrets.token_hex(8)}".encode())
        if self._heartbeat_s:
            socket.set(zmq.HEARTBEAT_IVL, int(self._heartbeat_s * 1000))
            socket.set(zmq.HEARTBEAT_TIMEOUT, int(self._heartbeat_s * 3000))
        return socket


def _who(identity: bytes) -> tuple[str, str]:
    """The node and the incarnation that a connection claims to be."""
    node, boot, *_ = [*identity.decode("ascii", "replace").split(":"), ""]
    return node, boot


def _key_of(frame: zmq.Frame) -> bytes:
    """The public key of the connection that a frame came by, as the authenticator noted it."""
    return str(frame.get("User-Id")).encode()


def _hand(socket: zmq.asyncio.Socket, frames: Sequence[Buffer]) -> None:
    """Hands a message to ZeroMQ now. Raises zmq.ZMQError (Again: no connection, or its queue is full)."""
    assert len(frames) <= MAX_FRAMES + 2
    sent = socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
    assert isinstance(sent, asyncio.Future)
    assert sent.done()
    sent.result()


async def _until_closed(work: Awaitable[None]) -> None:
    """A reader ends when its socket is closed under it."""
    try:
        await work
    except (zmq.ContextTerminated, asyncio.CancelledError):
        raise
    except zmq.ZMQError as error:
        if error.errno != zmq.ENOTSOCK:
            raise
