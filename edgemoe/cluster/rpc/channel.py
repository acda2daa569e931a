"""Exchanges questions and answers with peers: a ROUTER that answers, and one DEALER per peer that asks.

A box has three channels (control, expert calls, bulk), so that megabytes on one do not delay a heartbeat on another.
CURVE authenticates both ends, the allow-list maps keys to names, and an envelope frames every message. Questions to a
peer are bounded in bytes under way (credits) and in time. A lost connection fails all questions on it at once.
A channel belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import msgspec
import zmq

from edgemoe.cluster.rpc.codec import Codec
from edgemoe.cluster.rpc.envelope import MAX_REMAINING_MS, Buffer
from edgemoe.cluster.rpc.intake import Intake
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.cluster.rpc.mishaps import Mishaps
from edgemoe.cluster.rpc.peer_links import PeerLinks
from edgemoe.cluster.rpc.protocol import Language
from edgemoe.cluster.rpc.question_server import QuestionServer
from edgemoe.cluster.rpc.sockets import hand
from edgemoe.cluster.rpc.transport import Answer, ChannelSettings, Question, Transport
from edgemoe.errors import PeerRefused, PeerUnavailable, WireError

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
        serve: Callable[[Question[M]], Awaitable[Answer[M] | None]],
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
        self._links = PeerLinks(
            transport,
            codec,
            settings,
            self.intake,
            self.mishaps,
            lambda node: self.on_up(node),
            lambda node: self.on_down(node),
        )
        self._questions = QuestionServer(
            transport, codec, settings, self.intake, self.mishaps, serve, lambda node, why: self.on_foreign(node, why)
        )
        self._ids = itertools.count(1)

    def bind(self, host: str, port: int = 0) -> int:
        """Listens; returns the port. Raises PeerRefused where the address cannot be had."""
        return self._questions.bind(host, port)

    async def run(self) -> None:
        """Serves and reads answers until cancelled, then closes every socket."""
        try:
            async with asyncio.TaskGroup() as group:
                self._links.start(group)
                group.create_task(self.intake.run())
                await self._questions.run(group)
        finally:
            self.close()

    def close(self) -> None:
        """Closes every socket; `run` does so itself."""
        self._links.close()
        self._questions.close()

    def connect(self, peer: Peer) -> None:
        """Connects to `peer` and keeps reconnecting, by whichever of its keys it has; see PeerLinks.connect."""
        self._links.connect(peer)

    def disconnect(self, node: str) -> None:
        """Leaves that peer; what was asked of it fails."""
        self._links.disconnect(node)

    def give_up(self, node: str, why: str) -> None:
        """Fails what was asked of that peer; the connection stays."""
        self._links.give_up(node, why)

    def is_up(self, node: str) -> bool:
        """Returns whether the connection to that peer stands."""
        return self._links.is_up(node)

    def waiting(self) -> int:
        """Questions of ours without an answer yet."""
        return self._links.waiting()

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
    ) -> Answer[M]:
        """Returns the peer's answer. Raises PeerUnavailable, PeerBusy or PeerRefused, within `timeout_s`.

        Raises PeerRefused also for a message that is too large, and PeerOutdated for one that the peer does not know.
        """
        link = self._links[node]
        size = max(sum(memoryview(t).nbytes for t in tensors), self._settings.credits_bytes // ASKED_AT_ONCE + 1)
        taken, id = 0, next(self._ids)
        future: asyncio.Future[Answer[M]] = asyncio.get_running_loop().create_future()
        ends = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(ends):
                taken = await link.credits.take(size)
                link.pending[id] = future
                left_ms = max(0.0, ends - asyncio.get_running_loop().time()) * 1000
                hand(
                    link.socket,
                    self._codec.seal(node, body, tensors, id=id, remaining_ms=min(left_ms, MAX_REMAINING_MS)),
                )
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
        """Sends a message that needs no answer. Returns False where it cannot be sent, or the peer does not know it."""
        try:
            hand(self._links[node].socket, self._codec.seal(node, body, tensors))
        except (zmq.ZMQError, WireError, PeerRefused, PeerUnavailable):
            return False
        return True
