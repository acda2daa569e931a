"""Exchanges questions and answers with peers: a ROUTER that answers, and one DEALER per peer that asks.

A box has three channels (control, expert calls, bulk), so that megabytes on one do not delay a heartbeat on another.
Questions to a peer are bounded in bytes under way (credits) and in time. A lost connection fails all its questions.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from edgemoe.cluster.rpc.connection_guard import EVENTS, ConnectionGuard
from edgemoe.cluster.rpc.envelope import MAX_REMAINING_MS, Answer, Envelope, EnvelopeCodec, Failure, Question
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.peer_links import PeerLink, PeerLinks, PendingQuestion
from edgemoe.cluster.rpc.transport import (
    ChannelSettings,
    ErrorCounter,
    MessageReader,
    Transport,
    claimed_identity,
    fd_of,
    hand,
    key_of,
    until_closed,
    watch,
)
from edgemoe.errors import EdgemoeError, PeerBusy, PeerRefused, PeerUnavailable, Unsendable, WireError, WireVersionError
from edgemoe.wire.protocol import Buffer, MessageLanguage

log = logging.getLogger(__name__)
M = TypeVar("M")
Later = Coroutine[Any, Any, Answer[M] | None]
Serve = Callable[[Question[M]], Answer[M] | Later[M] | None]  # at once, or in a task
SERVED_AT_ONCE = 64  # questions of one peer; further ones are refused as busy
ASKED_AT_ONCE = 48  # questions to one peer; further ones wait for credits


class QuestionServer(Generic[M]):
    """Answers peers' questions by `serve`; the asker gets a Failure where that, or the message, fails."""

    def __init__(
        self,
        transport: Transport,
        codec: EnvelopeCodec[M],
        settings: ChannelSettings,
        intake: ConnectionGuard,
        mishaps: ErrorCounter,
        serve: Serve[M],
        on_foreign: Callable[[str, str], None],
    ) -> None:
        """Calls `on_foreign` with a peer that speaks no common version, and the reason."""
        self._transport, self._codec, self._settings = transport, codec, settings
        self._intake, self._mishaps = intake, mishaps
        self._serve, self._on_foreign = serve, on_foreign
        self._serving: Counter[str] = Counter()  # questions of each peer
        self._held_bytes: Counter[str] = Counter()  # of these questions
        self._router = transport.socket(zmq.ROUTER, settings)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.CURVE_SERVER, 1)
        self._monitor = watch(self._router, EVENTS)
        self._reader: MessageReader | None = None

    def bind(self, host: str, port: int = 0) -> int:
        """Listens; returns the port. Raises PeerRefused where the address cannot be had."""
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            self._router.bind(f"{address}:{port or '*'}")
        except zmq.ZMQError as error:
            raise PeerRefused(f"cannot listen on {host}:{port} for {self._codec.channel}: {error}") from error
        return int(bytes(self._router.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").rsplit(b":", 1)[1])

    def start(self, group: asyncio.TaskGroup) -> None:
        """Reads questions from now on; `group` serves them."""
        group.create_task(until_closed(self._watch_connections))
        self._reader = MessageReader(self._router, partial(self._on_message, group))
        self._reader.start()

    def close(self) -> None:
        """Closes the socket and its monitor."""
        if self._reader is not None:
            self._reader.close()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close(linger=0)

    async def _watch_connections(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            with self._mishaps.contained(""):
                self._intake.on_event(event["event"], event["value"])

    def _on_message(self, group: asyncio.TaskGroup, message: Sequence[zmq.Frame], waiting: bool) -> None:
        first, *frames = message
        identity = bytes(first.buffer)
        try:
            self._intake.on_message_read(fd_of(first if not frames else frames[0]), frames, waiting)
            self._on_question(identity, frames, group)
        except WireError as error:
            self._mishaps.reject(claimed_identity(identity)[0], error)
        except Exception:  # a bad message affects that message alone
            self._mishaps.fail(claimed_identity(identity)[0])

    def _on_question(self, identity: bytes, frames: Sequence[zmq.Frame], group: asyncio.TaskGroup) -> None:
        peer, boot = claimed_identity(identity)
        owner = self._transport.allowed.name_of(key_of(frames[0])) if frames else None
        if owner is not None:
            self._intake.on_identified(fd_of(frames[0]), owner)
        if owner != peer:
            raise WireError("the name does not belong to the key, or the key was revoked")
        parts = [frame.buffer for frame in frames]
        try:
            envelope = self._codec.open(peer, parts)
        except WireVersionError as error:
            self._on_foreign(peer, str(error))
            self._send_back(identity, self._codec.seal_failure(error))
            raise  # the peer may be unable to read the answer too, but it sees its version
        try:
            message = self._codec.read(envelope)
            if envelope.answer or isinstance(message, Failure):
                raise WireError("an answer to nothing")
        except WireError as error:
            if not envelope.answer:
                self._fail(identity, envelope, error)
            raise
        size = sum(part.nbytes for part in parts)
        held = self._held_bytes[peer]
        if self._serving[peer] >= SERVED_AT_ONCE or (held and held + size > 2 * self._settings.credits_bytes):
            self._fail(identity, envelope, PeerBusy("too many questions at once"))
            return
        wait_s = min(envelope.remaining_ms / 1000, self._settings.longest_s)
        deadline = asyncio.get_running_loop().time() + wait_s
        host = self._intake.host_of(fd_of(frames[0]))
        question = Question(peer, boot, envelope, message, parts[1:], deadline, host)
        try:
            served = self._serve(question)
            if served is None or isinstance(served, Answer):
                self._answer(identity, question, served)
                return
        except Exception as error:  # affects this question alone
            self._fail_question(identity, question, error)
            return
        self._serving[peer] += 1
        self._held_bytes[peer] += size
        task = group.create_task(self._answer_later(identity, question, served, size))
        task.add_done_callback(lambda _: served.close())  # it may have been cancelled before its first step

    async def _answer_later(self, identity: bytes, question: Question[M], served: Later[M], size: int) -> None:
        peer = question.peer
        try:
            self._answer(identity, question, await served)
        except Exception as error:  # affects this question alone
            self._fail_question(identity, question, error)
        finally:
            self._serving[peer] -= 1
            self._held_bytes[peer] -= size
            if not self._serving[peer]:
                del self._serving[peer], self._held_bytes[peer]

    def _answer(self, identity: bytes, question: Question[M], answer: Answer[M] | None) -> None:
        asked = question.envelope
        if answer is not None and asked.id:
            assert isinstance(answer.message, msgspec.Struct)
            self._send_back(
                identity, self._codec.seal(question.peer, answer.message, answer.tensors, id=asked.id, answer=True)
            )

    def _fail_question(self, identity: bytes, question: Question[M], error: Exception) -> None:
        if not isinstance(error, EdgemoeError):
            self._mishaps.fail(question.peer)
        self._fail(identity, question.envelope, error)

    def _fail(self, identity: bytes, asked: Envelope, error: Exception) -> None:
        """Answers with a Failure. A message without id is answered only where it could not be read, with id 0."""
        if asked.id or isinstance(error, WireError):
            self._send_back(identity, self._codec.seal_failure(error, asked.id))

    def _send_back(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        try:
            hand(self._router, [identity, *frames])
        except zmq.ZMQError as error:
            log.debug("an answer could not be sent", extra={"channel": self._codec.channel, "why": str(error)})
        if self._reader is not None:
            self._reader.read_soon()


class Channel(Generic[M]):
    """Asks peers, and answers their questions by `serve`. `language` must contain Failure.

    An invalid message, or an error while serving one, affects that message alone: it is counted, and the asker gets a
    Failure.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        language: MessageLanguage[M],
        serve: Serve[M],
        settings: ChannelSettings | None = None,
    ) -> None:
        settings = settings or ChannelSettings()
        self.name, self._settings = name, settings
        self.on_up: Callable[[str], None] = lambda _node: None
        self.on_down: Callable[[str], None] = lambda _node: None
        self.on_foreign: Callable[[str, str], None] = lambda _node, _why: None  # one speaks another version
        self.intake = ConnectionGuard(name, 2 * settings.message_bytes)
        self.mishaps = ErrorCounter(name)
        self._codec = codec = EnvelopeCodec(transport.node, transport.speaks, name, language, settings.message_bytes)
        connect = partial(PeerLinks[M], transport, codec, settings, self.intake, self.mishaps)
        self._links = connect(self._met, self._lost)
        self._aside = connect(_nobody, _nobody) if settings.aside else None
        self._all_links = [links for links in (self._links, self._aside) if links is not None]
        self._questions = QuestionServer(
            transport,
            codec,
            settings,
            self.intake,
            self.mishaps,
            serve,
            lambda node, why: self._inform(node, self.on_foreign, node, why),
        )
        self._ids = itertools.count(1)

    def bind(self, host: str, port: int = 0) -> int:
        """Listens; returns the port. Raises PeerRefused where the address cannot be had."""
        return self._questions.bind(host, port)

    async def run(self) -> None:
        """Serves and reads answers until cancelled, then closes every socket."""
        async with asyncio.TaskGroup() as group:
            try:
                for links in self._all_links:
                    links.start(group)
                self._questions.start(group)
                await self.intake.run()
            finally:
                self.close()  # before tasks end: nothing that comes now could be served

    def close(self) -> None:
        """Closes every socket; `run` does so itself."""
        for links in self._all_links:
            links.close()
        self._questions.close()

    def connect(self, peer: Peer) -> None:
        """Connects to `peer` and keeps reconnecting, by whichever of its keys it has; see PeerLinks.connect."""
        for links in self._all_links:
            links.connect(peer)

    def disconnect(self, node: str) -> None:
        """Closes the connection to that peer and fails all questions to it."""
        self._codec.forget(node)
        for links in self._all_links:
            links.disconnect(node)

    def give_up(self, node: str, why: str) -> None:
        """Fails all questions to that peer; the connection stays."""
        for links in self._all_links:
            links.give_up(node, why)

    def is_up(self, node: str) -> bool:
        """Returns whether the connection to that peer stands."""
        return self._links.is_up(node)

    def waiting(self) -> int:
        """Counts our questions without an answer."""
        return sum(links.waiting() for links in self._all_links)

    def version(self, node: str) -> int:
        """Returns the highest protocol version that both speak; our lowest while the peer has named none."""
        return self._codec.version(node)

    async def ask(
        self,
        node: str,
        body: msgspec.Struct,
        tensors: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        aside: bool = False,
    ) -> Answer[M]:
        """Returns the peer's answer, by the second connection if `aside`.

        Raises PeerUnavailable, PeerBusy or PeerRefused, within `timeout_s`.
        Raises Unsendable for a message that is too large, and PeerOutdated for one that the peer does not know.
        """
        future: asyncio.Future[Answer[M]] = asyncio.get_running_loop().create_future()

        def done(outcome: Answer[M] | EdgemoeError) -> None:
            if future.done():
                return
            if isinstance(outcome, Answer):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

        withdraw = self.post(node, body, tensors, timeout_s=timeout_s, done=done, aside=aside)
        try:
            return await future
        except asyncio.CancelledError:
            withdraw(PeerUnavailable("nobody waits for it any more"))
            raise

    def post(
        self,
        node: str,
        body: msgspec.Struct,
        tensors: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        done: Callable[[Answer[M] | EdgemoeError], None],
        aside: bool = False,
    ) -> Callable[[EdgemoeError], None]:
        """Asks, and calls `done` once with the answer or error, perhaps before this returns.

        Returns a function that ends the question with an error. Raises PeerUnavailable where it is not connected.
        """
        links = self._aside if aside else self._links
        assert links is not None, "this channel has no second connection"
        link, loop = links[node], asyncio.get_running_loop()
        ends, id = loop.time() + timeout_s, next(self._ids)

        def send() -> None:
            left_ms = min(max(0.0, ends - loop.time()) * 1000, MAX_REMAINING_MS)
            try:
                hand(link.socket, self._codec.seal(node, body, tensors, id=id, remaining_ms=left_ms))
            except WireError as error:
                raise Unsendable(f"{node} cannot be asked: {error}") from error
            except zmq.ZMQError as error:
                raise PeerUnavailable(f"{node} cannot be reached on {self.name}: {error}") from error

        asked = PendingQuestion(id, send, done)
        asked.deadline = loop.call_at(ends, self._late, link, id, timeout_s)
        size = max(sum(memoryview(t).nbytes for t in tensors), self._settings.credits_bytes // ASKED_AT_ONCE + 1)
        link.ask(asked, size)
        return partial(link.end, id)

    def _inform(self, node: str, listener: Callable[..., None], *news: str) -> None:
        with self.mishaps.contained(node):  # else it would end the channel and the tasks beside it
            listener(*news)

    def _met(self, node: str) -> None:
        self._inform(node, self.on_up, node)

    def _lost(self, node: str) -> None:
        self._codec.forget(node)
        self._inform(node, self.on_down, node)

    def _late(self, link: PeerLink[M], id: int, timeout_s: float) -> None:
        link.end(id, PeerUnavailable(f"{link.node} did not answer within {timeout_s:.3g} s ({self.name})"))

    def notify_peer(self, node: str, body: msgspec.Struct) -> bool:
        """Sends a message that needs no answer. Returns False where it cannot be sent, or the peer does not know it."""
        try:
            link = self._links[node]
            hand(link.socket, self._codec.seal(node, body, ()))
            link.read_soon()
        except (zmq.ZMQError, WireError, PeerRefused, PeerUnavailable):
            return False
        return True


def _nobody(_node: str) -> None:
    """Ignores a connection event: the default listener."""
