"""The engine's lanes to other engines, put together: expert calls and bulk, both ways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from edgemoe.cluster.data.bulk import BulkServer, PeerStore, Shelf
from edgemoe.cluster.data.calls import Calls, Holdings
from edgemoe.cluster.data.messages import BULK, CALLS, BulkMessage, Call, CallMessage, Hello, Model
from edgemoe.cluster.data.server import ExpertServer, Host
from edgemoe.cluster.wire.keys import Peer, Secret
from edgemoe.cluster.wire.lane import Lane
from edgemoe.cluster.wire.messages import PeerEngine
from edgemoe.cluster.wire.net import Answer, Net, Question
from edgemoe.cluster.wire.zap import AllowList
from edgemoe.errors import PeerRefused

log = logging.getLogger(__name__)
BULK_CREDITS_BYTES = 8 << 20


class DataPlane:
    """Made on the engine's event loop. `run` until cancelled, then `close`."""

    def __init__(
        self,
        node: str,
        boot: str,
        secret: Secret,
        model: Model,
        holdings: Holdings,
        host: Host,
        shelf: Shelf,
        store: PeerStore,
        *,
        timeout_s: float,
    ) -> None:
        """`host` computes for peers, `shelf` hands out experts; `store` fetches over this plane's bulk lane."""
        self._net = Net(node, boot, secret, AllowList({}))
        self._calls_lane: Lane[CallMessage] = Lane(self._net, "calls", CALLS, self._serve)
        self.server = ExpertServer(model, host)
        self.bulk = BulkServer(shelf, model.layers, model.experts, model.expert_bytes)
        self._bulk_lane: Lane[BulkMessage] = Lane(
            self._net, "bulk", BULK, self.bulk.serve, credits_bytes=BULK_CREDITS_BYTES
        )
        self.calls = Calls(self._calls_lane, model, holdings, timeout_s)
        store.join(self._bulk_lane, lambda: self.calls.peers, timeout_s)
        self._known: dict[str, PeerEngine] = {}

    def bind(self, host: str, calls_port: int = 0, bulk_port: int = 0) -> tuple[int, int]:
        """Listens; the two ports. Raises PeerRefused where an address cannot be had."""
        return self._calls_lane.bind(host, calls_port), self._bulk_lane.bind(host, bulk_port)

    def set_peers(self, peers: Sequence[PeerEngine]) -> None:
        """Connects to these engines, and drops all others."""
        wanted = {peer.node: peer for peer in peers if peer.node != self._net.node}
        for node in [node for node, peer in self._known.items() if wanted.get(node) != peer]:
            del self._known[node]
            self._net.allowed.revoke(node)
            self._calls_lane.disconnect(node)
            self._bulk_lane.disconnect(node)
            self.calls.remove(node)
        for node, peer in wanted.items():
            if node not in self._known:
                self._known[node] = peer
                self._net.allowed.allow(node, peer.key)
                self.calls.add(node, peer.boot)
                self._calls_lane.connect(Peer(node, peer.calls, peer.key))
                self._bulk_lane.connect(Peer(node, peer.bulk, peer.key))
                log.info("peer", extra={"peer": node, "boot": peer.boot})

    async def run(self) -> None:
        """Serves and asks until cancelled."""
        self.server.start()
        async with asyncio.TaskGroup() as group:
            for work in (self._net.run(), self._calls_lane.run(), self._bulk_lane.run(), self.calls.run()):
                group.create_task(work)

    def close(self) -> None:
        """After `run` has ended."""
        self.server.close()
        self._net.close()

    async def _serve(self, question: Question[CallMessage]) -> Answer[CallMessage]:
        match question.message:
            case Call():
                return await self.server.serve(question)
            case Hello() as hello:
                return Answer(self.calls.learn(question.peer, hello))
            case _:
                raise PeerRefused("not a question")
