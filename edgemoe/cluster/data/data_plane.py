"""Composes the engine's channels to other engines: expert calls and bulk, in both directions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from edgemoe.cluster.data.expert_client import ExpertClient, Holdings
from edgemoe.cluster.data.expert_fetch import ExpertFetchServer, ExpertSource, PeerStore
from edgemoe.cluster.data.expert_server import ExpertOwner, ExpertServer
from edgemoe.cluster.data.kv_fetch import KVFetcher, KVFetchServer, PrefixSource
from edgemoe.cluster.data.messages import (
    BULK,
    EXPERT_CALLS,
    BulkMessage,
    ExpertCall,
    ExpertCallMessage,
    FetchKV,
    FetchPiece,
    Hello,
    OpenStage,
    StageStep,
)
from edgemoe.cluster.data.stage_calls import StageClient, StageServer
from edgemoe.cluster.data.store_fetch import PieceSource, StorePieceServer
from edgemoe.cluster.rpc.channel import Channel, Later
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.keys import AllowList, Peer, Secret
from edgemoe.cluster.rpc.transport import ChannelSettings, Transport
from edgemoe.errors import PeerRefused
from edgemoe.ipc.messages import PeerEngine
from edgemoe.telemetry.rate_limited_log import RateLimitedLog
from edgemoe.types.experts import ServedModel
from edgemoe.types.stages import CacheRoom, Stage

log = logging.getLogger(__name__)
BULK_CREDITS_BYTES = 8 << 20
EXPERT_CALL_BYTES = 80 << 20  # of one call: rows, experts and weights


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """Holds the parts of an engine that serve peers, or are filled from peers."""

    model: ServedModel
    holdings: Holdings
    host: ExpertOwner  # computes for peers
    shelf: ExpertSource  # hands out experts
    store: PeerStore  # fetches over the bulk channel
    prefixes: PrefixSource  # blocks of keys and values, in both directions
    pieces: PieceSource  # of the store, for boxes that have none yet


class DataPlane:
    """Owns the channels, servers and clients of an engine. Made on its event loop; `run` it, then `close` it."""

    def __init__(
        self,
        node: str,
        boot: str,
        secret: Secret,
        own: OwnExperts,
        *,
        timeout_s: float,
    ) -> None:
        self.transport = Transport(node, boot, secret, AllowList({}))
        self._calls_channel: Channel[ExpertCallMessage] = Channel(
            self.transport,
            "calls",
            EXPERT_CALLS,
            self._serve,
            ChannelSettings(longest_s=timeout_s, message_bytes=EXPERT_CALL_BYTES),
        )
        self.server, self.stage = ExpertServer(own.model.geometry, own.host), StageServer(own.model)
        self.bulk = ExpertFetchServer(own.shelf, own.model.geometry)
        self._bulk_channel: Channel[BulkMessage] = Channel(
            self.transport,
            "bulk",
            BULK,
            self._serve_bulk,
            ChannelSettings(credits_bytes=BULK_CREDITS_BYTES, longest_s=timeout_s),
        )
        self.pieces = StorePieceServer(own.pieces)
        self.kv = KVFetchServer(own.prefixes)
        self.kv_fetcher = KVFetcher(self._bulk_channel, own.prefixes, timeout_s)
        self.calls = ExpertClient(self._calls_channel, own.model, own.holdings, timeout_s)
        own.store.join(self._bulk_channel, lambda: self.calls.peers, timeout_s)
        self._say = RateLimitedLog(log)
        self._known: dict[PeerEngine, tuple[str, ...]] = {}  # with their keys

    def stage_client(
        self,
        stage: Stage,
        opens: OpenStage,
        timeouts_s: tuple[float, float],
        restart: Callable[[str, CacheRoom, Callable[[], None]], None],
    ) -> StageClient:
        """Returns the client of a stage on another box, which is asked on the channel of expert calls."""
        return StageClient(self._calls_channel, stage, opens, timeouts_s, restart)

    def bind(self, host: str, calls_port: int = 0, bulk_port: int = 0) -> tuple[int, int]:
        """Listens and returns the two ports. Raises PeerRefused where an address cannot be used."""
        return self._calls_channel.bind(host, calls_port), self._bulk_channel.bind(host, bulk_port)

    def set_peers(self, keys: Mapping[str, tuple[str, ...]], engines: Sequence[PeerEngine]) -> None:
        """Allows these keys by node, connects to these engines, and revokes and disconnects all others.

        Connections stay open to an engine whose box is not heard, so that it can be used at once when it is back.
        They also stay where their key is still one of the box's keys.
        """
        self.transport.allowed.replace(keys)
        wanted = {
            msgspec.structs.replace(engine, heard=True): keys[engine.node]
            for engine in engines
            if engine.node != self.transport.node
        }
        for engine in self._known.keys() - wanted.keys():
            self._calls_channel.disconnect(engine.node)
            self._bulk_channel.disconnect(engine.node)
            self.calls.remove(engine.node)
        for engine, its in wanted.items():
            if engine not in self._known:
                self.calls.add(engine.node, engine.boot)
                self._say(logging.INFO, "peer", engine.node, boot=engine.boot)
            if self._known.get(engine) != its:
                self._calls_channel.connect(Peer(engine.node, engine.calls, its[0], new_key="".join(its[1:])))
                self._bulk_channel.connect(Peer(engine.node, engine.bulk, its[0], new_key="".join(its[1:])))
        self._known = wanted
        for engine in engines:
            self.calls.heed(engine.node, engine.heard)

    async def run(self) -> None:
        """Serves and asks peers until cancelled."""
        self.server.start()
        async with asyncio.TaskGroup() as group:
            for work in (self.transport.run(), self._calls_channel.run(), self._bulk_channel.run(), self.calls.run()):
                group.create_task(work)

    def close(self) -> None:
        """Frees threads and sockets. Must be called after `run` has ended."""
        self.server.close()
        self.transport.close()

    def _serve(self, question: Question[ExpertCallMessage]) -> Answer[ExpertCallMessage] | Later[ExpertCallMessage]:
        match question.message:
            case ExpertCall():
                return self.server.serve(question)
            case StageStep() as step:
                return self.stage.serve(question, step)
            case OpenStage() as opens:
                return self.stage.open(question, opens)
            case Hello() as hello:
                return Answer(self.calls.learn(question.peer, hello))
            case _:
                raise PeerRefused("not a question")

    async def _serve_bulk(self, question: Question[BulkMessage]) -> Answer[BulkMessage]:
        if isinstance(question.message, FetchKV):
            return await self.kv.serve(question, question.message)
        if isinstance(question.message, FetchPiece):
            return await self.pieces.serve(question.message)
        return await self.bulk.serve(question)
