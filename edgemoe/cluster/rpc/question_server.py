"""The answering end of a channel: a ROUTER on which every peer asks.

The allow-list names who speaks, by the key of the connection. So many questions of one peer are served at once, and so
many bytes in them; beyond that they are sent away.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from edgemoe.cluster.rpc.codec import Codec
from edgemoe.cluster.rpc.envelope import Buffer, Envelope
from edgemoe.cluster.rpc.intake import EVENTS, Intake
from edgemoe.cluster.rpc.mishaps import Mishaps
from edgemoe.cluster.rpc.sockets import MessageReader, fd_of, hand, key_of, until_closed, watch, who
from edgemoe.cluster.rpc.transport import Answer, ChannelSettings, Failure, Question, Transport
from edgemoe.errors import EdgemoeError, PeerBusy, PeerRefused, WireError, WireVersionError

log = logging.getLogger(__name__)
M = TypeVar("M")
Later = Coroutine[Any, Any, Answer[M] | None]
Serve = Callable[[Question[M]], Answer[M] | Later[M] | None]  # at once, or in a task
SERVED_AT_ONCE = 64  # questions of one peer; further ones are refused as busy


class QuestionServer(Generic[M]):
    """Answers peers' questions by `serve`; the asker gets a Failure where that, or the message, fails."""

    def __init__(
        self,
        transport: Transport,
        codec: Codec[M],
        settings: ChannelSettings,
        intake: Intake,
        mishaps: Mishaps,
        serve: Serve[M],
        on_foreign: Callable[[str, str], None],
    ) -> None:
        """`on_foreign` is told who speaks another version."""
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
        self._reader = MessageReader(self._router, partial(self._take, group))
        self._reader.start()

    def close(self) -> None:
        """Closes the socket."""
        if self._reader is not None:
            self._reader.close()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close(linger=0)

    async def _watch_connections(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())
            with self._mishaps.contained(""):
                self._intake.note(event["event"], event["value"])

    def _take(self, group: asyncio.TaskGroup, message: Sequence[zmq.Frame], waiting: bool) -> None:
        first, *frames = message
        identity = bytes(first.buffer)
        try:
            self._intake.delivered(fd_of(first if not frames else frames[0]), frames, waiting)
            self._take_question(identity, frames, group)
        except WireError as error:
            self._mishaps.reject(who(identity)[0], error)
        except Exception:  # a bad message affects that message alone
            self._mishaps.fail(who(identity)[0])

    def _take_question(self, identity: bytes, frames: Sequence[zmq.Frame], group: asyncio.TaskGroup) -> None:
        peer, boot = who(identity)
        owner = self._transport.allowed.name_of(key_of(frames[0])) if frames else None
        if owner is not None:
            self._intake.heard(fd_of(frames[0]), owner)
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
        question = Question(peer, boot, envelope, message, parts[1:], deadline)
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
        task.add_done_callback(lambda _: served.close())  # where it was cancelled before its first step

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
            self._reader.look()
