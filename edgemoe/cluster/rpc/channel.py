"""Exchanges questions and answers with peers: a ROUTER that answers, and one DEALER per peer that asks.

A box has three channels (control, expert calls, bulk), so that megabytes on one do not delay a heartbeat on another.
Control has a second connection to each peer, for what is asked `aside`: the few messages that are long.
CURVE authenticates both ends, the allow-list maps keys to names, and an envelope frames every message. Questions to a
peer are bounded in bytes under way (credits) and in time. A lost connection fails all questions on it at once.
A channel belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec
import zmq

from edgemoe.cluster.rpc.codec import Codec
from edgemoe.cluster.rpc.envelope import MAX_REMAINING_MS, Buffer
from edgemoe.cluster.rpc.intake import Intake
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.mishaps import Mishaps
from edgemoe.cluster.rpc.peer_links import PeerLink, PeerLinks
from edgemoe.cluster.rpc.question_server import QuestionServer, Serve
from edgemoe.cluster.rpc.sockets import hand
from edgemoe.cluster.rpc.transport import Answer, Asked, ChannelSettings, Transport
from edgemoe.errors import EdgemoeError, PeerRefused, PeerUnavailable, Unsendable, WireError
from edgemoe.wire.protocol import Language

M = TypeVar("M")
ASKED_AT_ONCE = 48  # questions to one peer; further ones wait for credits


class Channel(Generic[M]):
    """Asks peers, and answers their questions by `serve`. `language` must contain Failure.

    An invalid message, or an error while serving one, affects that message alone: it is counted, and the asker gets a
    Failure.
    """

    def __init__(
        self,
        transport: Transport,
        name: str,
        language: Language[M],
        serve: Serve[M],
        settings: ChannelSettings | None = None,
    ) -> None:
        settings = settings or ChannelSettings()
        self.name, self._settings = name, settings
        self.on_up: Callable[[str], None] = lambda _node: None
        self.on_down: Callable[[str], None] = lambda _node: None
        self.on_foreign: Callable[[str, str], None] = lambda _node, _why: None  # one speaks another version
        self.intake = Intake(name, 2 * settings.message_bytes)
        self.mishaps = Mishaps(name)
        self._codec = codec = Codec(transport, name, language, settings.message_bytes)
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
        """Leaves that peer; what was asked of it fails."""
        self._codec.forget(node)
        for links in self._all_links:
            links.disconnect(node)

    def give_up(self, node: str, why: str) -> None:
        """Fails what was asked of that peer; the connection stays."""
        for links in self._all_links:
            links.give_up(node, why)

    def is_up(self, node: str) -> bool:
        """Returns whether the connection to that peer stands."""
        return self._links.is_up(node)

    def waiting(self) -> int:
        """Questions of ours without an answer yet."""
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
        """Asks, and calls `done` once, with the answer or what `ask` would raise; perhaps before this returns.

        Returns what to call to have it end with that error now. Raises PeerUnavailable where it is not connected.
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

        asked = Asked(id, send, done)
        asked.deadline = loop.call_at(ends, self._late, link, id, timeout_s)
        size = max(sum(memoryview(t).nbytes for t in tensors), self._settings.credits_bytes // ASKED_AT_ONCE + 1)
        link.ask(asked, size)
        return partial(link.end, id)

    def _inform(self, node: str, who: Callable[..., None], *news: str) -> None:
        with self.mishaps.contained(node):  # else it would end the channel, and what runs beside it
            who(*news)

    def _met(self, node: str) -> None:
        self._inform(node, self.on_up, node)

    def _lost(self, node: str) -> None:
        self._codec.forget(node)
        self._inform(node, self.on_down, node)

    def _late(self, link: PeerLink[M], id: int, timeout_s: float) -> None:
        link.end(id, PeerUnavailable(f"{link.node} did not answer within {timeout_s:.3g} s ({self.name})"))

    def tell(self, node: str, body: msgspec.Struct, tensors: Sequence[Buffer] = ()) -> bool:
        """Sends a message that needs no answer. Returns False where it cannot be sent, or the peer does not know it."""
        try:
            link = self._links[node]
            hand(link.socket, self._codec.seal(node, body, tensors))
            link.look()
        except (zmq.ZMQError, WireError, PeerRefused, PeerUnavailable):
            return False
        return True


def _nobody(_node: str) -> None:
    """Is told which second connections come and go."""
