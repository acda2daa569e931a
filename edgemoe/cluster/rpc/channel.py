"""One conversation of a box with its peers: a ROUTER that answers, and one DEALER per peer that asks.

A box holds three channels (control, expert calls, bulk), so that megabytes on one never delay a heartbeat on another.
CURVE authenticates both ends, the allow-list names who speaks, an envelope frames every message. What is asked of a
peer is bounded in bytes under way (credits) and in time; a lost connection fails everything asked on it at once.
A channel belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from edgemoe.cluster.rpc import intake
from edgemoe.cluster.rpc.envelope import MAX_REMAINING_MS, MAX_TENSOR_BYTES, Buffer, Envelope, seal, unseal
from edgemoe.cluster.rpc.intake import LOOK_S, Intake
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.peer_link import NOT_MET, REFUSED, PeerLink, fd_of, hand, key_of, until_closed, waiting, who
from edgemoe.cluster.rpc.protocol import Language, Versions, check_known
from edgemoe.cluster.rpc.sparing_log import SparingLog
from edgemoe.cluster.rpc.transport import Answer, Failure, Question, Transport
from edgemoe.errors import EdgemoeError, PeerBusy, PeerRefused, PeerUnavailable, WireError, WireVersionError

log = logging.getLogger(__name__)
M = TypeVar("M")
HWM_MESSAGES = 256  # to be sent to one peer
SERVED_AT_ONCE = 64  # questions of one peer; beyond it they are sent away
ASKED_AT_ONCE = 48  # at most, of one peer: others wait for credits
BURST = 16  # messages read in one go
MESSAGE_BYTES = 32 << 20
RECONNECT_MS = 250
DEAF_MS = 3000  # without an acknowledgement of what was sent, after which a connection is taken for broken
LONGEST_S = 60.0  # that a question may wait here, however long its asker would


class Channel(Generic[M]):
    """See the module. `language` has Failure among its messages; `serve` answers questions.

    Whatever is wrong with one message, or goes wrong where it is served, costs that message alone: whoever asked gets
    a Failure, and it is counted.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        language: Language[M],
        serve: Callable[[Question[M]], Awaitable[Answer[M] | None]],
        *,
        credits_bytes: int = 32 << 20,
        heartbeat_s: float = 0.0,
        longest_s: float = LONGEST_S,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """`longest_s` is the deadline of questions whose askers would wait for longer.

        No message of this channel is larger than `message_bytes`, and no peer has more than twice as much under way.
        """
        self.name = name
        self.rejected = 0  # messages that could not be read or came from nobody
        self.failed = 0  # messages whose serving went wrong here, for no reason that we know of
        self.on_up: Callable[[str], None] = lambda _node: None
        self.on_down: Callable[[str], None] = lambda _node: None
        self.on_foreign: Callable[[str, str], None] = lambda _node, _why: None  # one speaks another version
        self._transport, self._language, self._serve = transport, language, serve
        self._credits_bytes, self._heartbeat_s, self._longest_s = credits_bytes, heartbeat_s, longest_s
        self._message_bytes = message_bytes
        self._say = SparingLog(log)
        self.intake = Intake(name, 2 * message_bytes)
        self._links: dict[str, PeerLink[M]] = {}
        self._speaks: dict[str, Versions] = {}  # as each peer said last
        self._serving: Counter[str] = Counter()  # questions of each peer
        self._held_bytes: Counter[str] = Counter()  # in them
        self._ids = itertools.count(1)
        self._router = self._socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.CURVE_SERVER, 1)
        self._monitor = self._router.get_monitor_socket(intake.EVENTS)
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
                self._group.create_task(until_closed(self._watch_connections()))
                self._group.create_task(self._bound_intake())
                await self._answer_questions(self._group)
        finally:
            self._group = None
            self.close()

    def close(self) -> None:
        """Closes every socket; `run` does so itself."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close(linger=0)

    def connect(self, peer: Peer) -> None:
        """Connects to `peer` and keeps reconnecting, by whichever of its keys it has.

        Replaces an earlier connection to that node, but for one to the same address by a key that still stands for it.
        """
        if (old := self._links.get(peer.node)) and old.peer.address == peer.address and old.peer.key in peer.keys:
            old.peer = peer if old.peer.key == peer.key else peer.turned()
            return
        self.disconnect(peer.node)
        try:
            link = self._links[peer.node] = self._dial(peer)
        except zmq.ZMQError as error:  # one that cannot be reached keeps nobody else out
            self._say(logging.ERROR, "a box cannot be reached", peer.node, address=peer.address, why=str(error))
            return
        if self._group is not None:
            self._start(link, self._group)

    def _dial(self, peer: Peer) -> PeerLink[M]:
        """Raises zmq.ZMQError for a key or address that is no good, and where there are no sockets left."""
        socket = self._socket(zmq.DEALER)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)  # each time, however often it has failed
        socket.set(zmq.CONNECT_TIMEOUT, 1000)  # a lost SYN is sent again after a second, not after 1, 3, 7, 15
        link: PeerLink[M] | None = None
        try:
            for key in reversed(peer.keys):  # whether they are keys; the first one holds
                socket.set(zmq.CURVE_SERVERKEY, key.encode())
            link = PeerLink[M](peer, socket, self._credits_bytes)
            self._connect(link)
        except zmq.ZMQError:
            socket.close(linger=0) if link is None else link.close()
            raise
        return link

    def _connect(self, link: PeerLink[M]) -> None:
        """Each connection has a name of its own: a box may be back before its peer has noticed that it was gone.

        No peer lets one take over the name of another that stands: what arrives on the old one would not be read, and
        ZeroMQ ends the process where such a connection breaks.
        """
        link.apart = False
        link.socket.set(zmq.IDENTITY, f"{self._transport.node}:{self._transport.boot}:{secrets.token_hex(8)}".encode())
        link.socket.connect(link.address)

    def disconnect(self, node: str) -> None:
        self._speaks.pop(node, None)
        if link := self._links.pop(node, None):
            was_up = link.up
            link.close()
            if was_up:
                self.on_down(node)

    def give_up(self, node: str, why: str) -> None:
        """Fails what was asked of that peer; the connection stays."""
        if link := self._links.get(node):
            link.fail(PeerUnavailable(why))

    def is_up(self, node: str) -> bool:
        return node in self._links and self._links[node].up

    def waiting(self) -> int:
        """Questions of ours without an answer yet."""
        return sum(len(link.pending) for link in self._links.values())

    def version(self, node: str) -> int:
        """The highest version of the protocol that both speak; the lowest of ours while the peer has not said."""
        theirs = self._speaks.get(node)
        return self._transport.speaks.common(theirs) if theirs is not None else self._transport.speaks.lowest

    async def ask(
        self,
        node: str,
        body: msgspec.Struct,
        tensors: Sequence[Buffer] = (),
        *,
        timeout_s: float,
    ) -> Answer[M]:
        """The peer's answer. Raises PeerUnavailable, PeerBusy or PeerRefused, within `timeout_s`.

        PeerRefused also for a message that is too large to be sent, PeerOutdated for one that the peer does not know.
        """
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
                hand(link.socket, self._seal(node, body, tensors, id=id, remaining_ms=min(left_ms, MAX_REMAINING_MS)))
                return await future
        except WireError as error:
            raise PeerRefused(f"{node} cannot be asked: {error}") from error
        except TimeoutError as error:
            raise PeerUnavailable(f"{node} did not answer within {timeout_s:.3g} s ({self.name})") from error
        except zmq.ZMQError as error:
            raise PeerUnavailable(f"{node} cannot be reached on {self.name}: {error}") from error
        finally:
            link.pending.pop(id, None)
            if taken:
                await link.credits.give(taken)

    def tell(self, node: str, body: msgspec.Struct, tensors: Sequence[Buffer] = ()) -> bool:
        """Sends without wanting an answer; False where it could not be handed over, or would not be understood."""
        link = self._links.get(node)
        if link is None or not link.up:
            return False
        try:
            hand(link.socket, self._seal(node, body, tensors))
        except (zmq.ZMQError, WireError, PeerRefused):
            return False
        return True

    def _seal(self, node: str, body: msgspec.Struct, tensors: Sequence[Buffer], **fields: Any) -> list[Buffer]:
        """The one place where messages for peers are made. Raises WireError, PeerOutdated."""
        check_known(body, self.version(node), node)
        frames = seal(body, tensors, speaks=self._transport.speaks, **fields)
        if (size := sum(memoryview(frame).nbytes for frame in frames)) > self._message_bytes:
            raise WireError(f"a message of {size} bytes; {self._message_bytes} pass over {self.name}")
        return frames

    def _link(self, node: str) -> PeerLink[M]:
        link = self._links.get(node)
        if link is None or not link.up:
            raise PeerUnavailable(f"{node} is not connected on {self.name}")
        return link

    def _start(self, link: PeerLink[M], group: asyncio.TaskGroup) -> None:
        for work in (self._read_answers(link), self._read_events(link)):
            link.tasks.append(group.create_task(until_closed(work)))

    # --- what our own connections say -------------------------------------------------------------------------

    async def _read_events(self, link: PeerLink[M]) -> None:
        while True:
            said = parse_monitor_message(await link.monitor.recv_multipart())
            event, fd = said["event"], said["value"]
            self.intake.note(event, fd)
            try:
                if event == zmq.EVENT_CONNECTED:
                    link.fd = fd
                else:
                    self._note(link, event)
            except Exception:  # of whoever wanted to know
                self._count_failure(link.node)

    def _note(self, link: PeerLink[M], event: int) -> None:
        if link.apart:
            return  # of a connection that was left meanwhile
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.up = True
            self.on_up(link.node)
        elif event & NOT_MET:
            if link.peer.new_key and not link.turning:
                link.turning = True
                asyncio.get_running_loop().call_later(RECONNECT_MS / 1000, self._turn, link)
        elif event == REFUSED:
            link.refusals += 1
            if link.refusals == 2:  # one who has just come may not have heard of us yet
                self._say(logging.WARNING, "a peer refuses our key; list it there", link.node, channel=self.name)
        elif event == zmq.EVENT_DISCONNECTED:
            self._leave(link)

    def _leave(self, link: PeerLink[M]) -> None:
        """Comes back in a moment, under another name; ZeroMQ would do so under the same, and not where it was refused.

        What refused our key may have learnt of it then.
        """
        link.apart = True
        with contextlib.suppress(zmq.ZMQError):
            link.socket.disconnect(link.address)
        asyncio.get_running_loop().call_later(RECONNECT_MS / 1000, self._connect_again, link)
        if link.up:
            link.up = False
            self._speaks.pop(link.node, None)
            link.fail(PeerUnavailable(f"the connection to {link.node} broke ({self.name})"))
            self.on_down(link.node)

    def _turn(self, link: PeerLink[M]) -> None:
        """Tries the peer by its other key, on another socket: on the old one ZeroMQ goes on with the first."""
        link.turning = False
        if self._links.get(link.node) is link and not link.up:
            self.disconnect(link.node)
            self.connect(link.peer.turned())

    def _connect_again(self, link: PeerLink[M]) -> None:
        if self._links.get(link.node) is link:
            self._connect(link)

    async def _read_answers(self, link: PeerLink[M]) -> None:
        while True:
            frames = await link.socket.recv_multipart(copy=False)
            self.intake.delivered(link.fd, frames, waiting(link.socket))
            try:
                self._take_answer(link, [frame.buffer for frame in frames])
            except WireError as error:
                self._reject(link.node, error)
            except Exception:  # one answer, whatever is wrong with it, costs that answer alone
                self._count_failure(link.node)

    def _take_answer(self, link: PeerLink[M], frames: Sequence[memoryview]) -> None:
        envelope = self._open(link.node, frames)
        message: Any = self._language.read(envelope.body)
        if isinstance(message, Failure) and not envelope.id:
            raise WireError(f"{link.node} could not read it: {message.message}")
        future = link.pending.pop(envelope.id, None) if envelope.answer else None
        if future is None or future.done():
            return
        if isinstance(message, Failure):
            future.set_exception(message.error(link.node))
        else:
            future.set_result(Answer(message, frames[1:]))

    # --- what connections bring -------------------------------------------------------------------------------

    async def _watch_connections(self) -> None:
        while True:
            said = parse_monitor_message(await self._monitor.recv_multipart())
            self.intake.note(said["event"], said["value"])

    async def _bound_intake(self) -> None:
        while True:
            self.intake.look()
            await asyncio.sleep(LOOK_S)

    # --- what others ask --------------------------------------------------------------------------------------

    async def _answer_questions(self, group: asyncio.TaskGroup) -> None:
        for count in itertools.count(1):
            if count % BURST == 0:  # reading what is there already does not let others run
                await asyncio.sleep(0)
            first, *frames = await self._router.recv_multipart(copy=False)
            identity = bytes(first.buffer)
            self.intake.delivered(fd_of(first if not frames else frames[0]), frames, waiting(self._router))
            try:
                self._take_question(identity, frames, group)
            except WireError as error:
                self._reject(who(identity)[0], error)
            except Exception:  # one message, whatever is wrong with it, costs that message alone
                self._count_failure(who(identity)[0])

    def _take_question(self, identity: bytes, frames: Sequence[zmq.Frame], group: asyncio.TaskGroup) -> None:
        peer, boot = who(identity)
        if not frames or self._transport.allowed.name_of(key_of(frames[0])) != peer:
            raise WireError("the name does not belong to the key, or the key was revoked")
        parts = [frame.buffer for frame in frames]
        try:
            envelope = self._open(peer, parts)
        except WireVersionError as error:
            self.on_foreign(peer, str(error))
            self._send_back(identity, seal(Failure.of(error), answer=True, speaks=self._transport.speaks))
            raise  # what was sent back may be unreadable there, too, and is told there by its version
        try:
            message = self._language.read(envelope.body)
            if envelope.answer or isinstance(message, Failure):
                raise WireError("an answer to nothing")
        except WireError as error:
            if not envelope.answer:
                self._fail(identity, envelope, error)
            raise
        size = sum(part.nbytes for part in parts)
        held = self._held_bytes[peer]
        if self._serving[peer] >= SERVED_AT_ONCE or (held and held + size > 2 * self._credits_bytes):
            self._fail(identity, envelope, PeerBusy("too many questions at once"))
            return
        wait_s = min(envelope.remaining_ms / 1000, self._longest_s)
        deadline = asyncio.get_running_loop().time() + wait_s
        self._serving[peer] += 1
        self._held_bytes[peer] += size
        group.create_task(self._answer(identity, Question(peer, boot, envelope, message, parts[1:], deadline), size))

    async def _answer(self, identity: bytes, question: Question[M], size: int) -> None:
        asked, peer = question.envelope, question.peer
        try:
            answer = await self._serve(question)
            if answer is not None and asked.id:
                assert isinstance(answer.message, msgspec.Struct)
                self._send_back(identity, self._seal(peer, answer.message, answer.tensors, id=asked.id, answer=True))
        except EdgemoeError as error:
            self._fail(identity, asked, error)
        except Exception as error:  # whatever it is, it is this question's failure
            self._count_failure(peer)
            self._fail(identity, asked, error)
        finally:
            self._serving[peer] -= 1
            self._held_bytes[peer] -= size
            if not self._serving[peer]:
                del self._serving[peer], self._held_bytes[peer]

    def _fail(self, identity: bytes, asked: Envelope, error: Exception) -> None:
        """Tells whoever asked; what was only told is answered where it could not be read, as a failure of nothing."""
        if asked.id or isinstance(error, WireError):
            failure = Failure.of(error)
            self._send_back(identity, seal(failure, id=asked.id, answer=True, speaks=self._transport.speaks))

    def _send_back(self, identity: bytes, frames: Sequence[Buffer]) -> None:
        try:
            hand(self._router, [identity, *frames])
        except zmq.ZMQError as error:
            log.debug("an answer could not be sent", extra={"channel": self.name, "why": str(error)})

    def _open(self, node: str, frames: Sequence[memoryview]) -> Envelope:
        """The checked envelope of one who speaks a version that we speak. Raises WireError, WireVersionError."""
        envelope = unseal(frames)
        if not self._transport.speaks.common(envelope.speaks):
            raise WireVersionError(
                f"{node} speaks versions {envelope.speaks} of the protocol, "
                f"{self._transport.node} {self._transport.speaks}: run neighbouring releases"
            )
        self._speaks[node] = envelope.speaks
        return envelope

    def _count_failure(self, peer: str) -> None:
        """Notes what is being handled: an error that nobody expected."""
        self.failed += 1
        self._say(logging.ERROR, "a message failed here", peer, channel=self.name, failed=self.failed, exc_info=True)

    def _reject(self, peer: str, error: WireError) -> None:
        self.rejected += 1
        self._say(logging.WARNING, "message dropped", peer, channel=self.name, why=str(error))

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._transport.context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, HWM_MESSAGES)
        socket.set(zmq.RCVHWM, 0)  # see intake, which bounds it
        socket.set(zmq.MAXMSGSIZE, min(self._message_bytes, MAX_TENSOR_BYTES) + 1)
        socket.set(zmq.HANDSHAKE_IVL, 3000)
        socket.set(zmq.TCP_MAXRT, DEAF_MS)
        socket.set(zmq.CURVE_SECRETKEY, self._transport.secret.secret)
        socket.set(zmq.CURVE_PUBLICKEY, self._transport.secret.public)
        if self._heartbeat_s:
            socket.set(zmq.HEARTBEAT_IVL, int(self._heartbeat_s * 1000))
            socket.set(zmq.HEARTBEAT_TIMEOUT, int(self._heartbeat_s * 3000))
        return socket
