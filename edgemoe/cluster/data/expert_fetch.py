"""Transfers experts as bytes between boxes, in chunks of at most a megabyte, and verifies each whole expert.

`PeerStore` is the store of a box in a cluster: experts that its disk does not have, or has damaged, come from a peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from edgemoe.cluster.data.expert_client import READ_BYTES_PER_S, PeerEstimate
from edgemoe.cluster.data.messages import CHUNK_BYTES, BulkMessage, ExpertChunk, FetchExpert
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.errors import CorruptExpert, MissingExpert, PeerError, PeerRefused, PeerUnavailable, first_error
from edgemoe.types.experts import ExpertGeometry, ExpertId, ExpertReader

log = logging.getLogger(__name__)
WINDOW = 4  # chunks of one expert under way
FETCHES = 4  # experts of one peer under way
SHARE, LEAST_BYTES = 1 / 4, 32 << 10  # of a chunk's time-out that all under way take on the link; of a chunk, at least
LATE_FACTOR, LATE_S = 4.0, 0.25  # a fetch is late after this multiple of its expected time; then another peer is tried
YIELDING_WINDOW, YIELDING_S = 2, 0.002  # chunks under way of one that yields to calls, and of each, on the link
LEAST_BYTES_PER_S = 5e6  # of a fetch; a slower one fails in the end, unless the peer was measured to be slow

Checksum = Callable[[memoryview], str]


class ExpertSource(Protocol):
    """Provides this box's experts to peers. Called on the event loop."""

    def checksum(self, layer: int, expert: int) -> str | None:
        """Returns the expert's checksum; None where it is not known yet."""

    def learn(self, layer: int, expert: int, checksum: str) -> None:
        """Notes the checksum of an expert that arrived from a peer."""

    def has(self, layer: int, expert: int) -> bool:
        """Returns whether the disk holds the expert."""

    async def part(self, layer: int, expert: int, offset: int, size_bytes: int) -> bytes:
        """Returns a part of an expert that is in memory or on the disk. Raises StoreError."""


class ExpertFetchServer:
    """Answers Fetch messages."""

    def __init__(self, shelf: ExpertSource, geometry: ExpertGeometry) -> None:
        self.sent_bytes = 0
        self._shelf, self._geometry = shelf, geometry

    async def serve(self, question: Question[BulkMessage]) -> Answer[BulkMessage]:
        fetch, sizes = question.message, self._geometry
        if not isinstance(fetch, FetchExpert):
            raise PeerRefused("not a question")
        end = fetch.offset + fetch.bytes
        there = fetch.layer < sizes.layers and fetch.expert < sizes.experts_of(fetch.layer)
        if not there or end > sizes.expert_bytes(fetch.layer):
            raise PeerRefused(f"there is no such part of expert {fetch.expert} of layer {fetch.layer}")
        wanted = self._shelf.checksum(fetch.layer, fetch.expert)
        if wanted is None:
            raise PeerRefused(f"expert {fetch.expert} of layer {fetch.layer} is not here")
        part = await self._shelf.part(fetch.layer, fetch.expert, fetch.offset, fetch.bytes)
        self.sent_bytes += len(part)
        return Answer(ExpertChunk(wanted), [memoryview(part)])


class PeerStore:
    """Implements `ExpertReader`: reads from the box's own store and, once joined, from peers."""

    def __init__(self, own: ExpertReader, shelf: ExpertSource, checksum: Checksum, geometry: ExpertGeometry) -> None:
        self.fetched = self.refused = 0  # experts fetched from peers; experts refused for a wrong checksum
        self._own, self._shelf, self._checksum, self._geometry = own, shelf, checksum, geometry
        self._channel: Channel[BulkMessage] | None = None
        # by peer, so that one that hangs holds up no other's
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(FETCHES))
        self.yields: Callable[[ExpertId], bool] = lambda _: False  # whether calls go before an expert's bytes

    def join(
        self, channel: Channel[BulkMessage], peers: Callable[[], dict[str, PeerEstimate]], timeout_s: float
    ) -> None:
        """Reads from peers too from now on."""
        self._channel, self._peers, self._timeout_s = channel, peers, timeout_s

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._geometry.expert_bytes(layer)

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """Reads an expert from the disk or a peer and verifies it. Raises CorruptExpert, MissingExpert."""
        damaged: CorruptExpert | None = None
        if self._shelf.has(layer, expert):
            try:
                await self._own.read(layer, expert, into)
                return
            except CorruptExpert as error:
                log.warning("a damaged expert is fetched from a peer", extra={"why": str(error)})
                damaged = error
        reasons = await self._fetch(layer, expert, into)
        if reasons is None:
            return
        if damaged is not None:
            raise damaged
        why = "; ".join(reasons) or "it is not on the disk, and no box that can be reached has it"
        peers = self._peers().values() if self._channel is not None else ()
        raise MissingExpert(layer, expert, why, away=[peer.node for peer in peers if peer.is_away_with(layer, expert)])

    async def _fetch(self, layer: int, expert: int, into: memoryview) -> list[str] | None:
        """Fetches the expert from a peer. Returns None on success, else the reasons of all failures.

        A late peer is left for the next one. All are tried again with longer deadlines, up to the full time-out.
        """
        reasons: list[str] = []
        factor, final, size_bytes = 1.0, False, self._geometry.expert_bytes(layer)
        while not final:
            sources = self._sources(layer, expert)
            usual = [max(LATE_S, LATE_FACTOR * self._expected_s(peer, layer)) for peer in sources]
            final = len(sources) <= 1 or factor * min(usual) >= self._timeout_s
            for peer, late_s in zip(sources, usual, strict=True):
                whole_s = self._timeout_s + max(late_s, size_bytes / LEAST_BYTES_PER_S)
                within_s = whole_s if final else min(whole_s, factor * late_s)
                try:
                    async with self._turns[peer.node]:
                        await self._fetch_from(peer, ExpertId(layer, expert), into[:size_bytes], within_s)
                except (PeerError, CorruptExpert) as error:
                    reasons.append(str(error))
                    if isinstance(error, PeerUnavailable):
                        peer.failed(min(self._timeout_s, within_s))
                    continue
                self.fetched += 1
                return None
            factor *= LATE_FACTOR
        return reasons

    def _sources(self, layer: int, expert: int) -> list[PeerEstimate]:
        """Returns the peers that have the expert: first by memory before disk, then by expected time."""
        if self._channel is None:
            return []
        ready = [peer for peer in self._peers().values() if peer.heard and peer.ready and not peer.cut]
        having = [peer for peer in ready if peer.ram[layer, expert] or peer.disk[layer, expert]]
        having.sort(key=lambda peer: (peer.silent, not peer.ram[layer, expert], self._expected_s(peer, layer)))
        return having

    def _expected_s(self, peer: PeerEstimate, layer: int) -> float:
        """Returns the expected time of a fetch beside FETCHES others of that layer, the peer's disk reads included."""
        return peer.latency_s + FETCHES * self._geometry.expert_bytes(layer) * (peer.s_per_byte + 1 / READ_BYTES_PER_S)

    async def _fetch_from(self, peer: PeerEstimate, whole: ExpertId, into: memoryview, within_s: float) -> None:
        """Fetches the whole expert within `within_s`. Raises PeerError, CorruptExpert.

        Fails earlier where one chunk exceeds the time-out.
        """
        node, (layer, expert) = peer.node, whole
        chunks, chunk_s = WINDOW, SHARE * self._timeout_s / (FETCHES * WINDOW)
        if self.yields(whole):
            chunks, chunk_s = YIELDING_WINDOW, min(chunk_s, YIELDING_S)
        most = min(CHUNK_BYTES, max(LEAST_BYTES, int(chunk_s / peer.s_per_byte)))
        window, sums, timeout_s = asyncio.Semaphore(chunks), set[str](), min(self._timeout_s, within_s)

        async def chunk(start: int) -> None:
            size = min(most, len(into) - start)
            async with window:
                assert self._channel is not None
                answer = await self._channel.ask(node, FetchExpert(layer, expert, start, size), timeout_s=timeout_s)
            if not isinstance(answer.message, ExpertChunk) or [t.nbytes for t in answer.tensors] != [size]:
                raise PeerRefused(f"{node} answered a fetch with something else")
            sums.add(answer.message.checksum)
            into[start : start + size] = answer.tensors[0]

        failure: PeerError | None = None
        try:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:  # after it, nothing writes to `into`
                for start in range(0, len(into), most):
                    group.create_task(chunk(start))
        except* PeerError as errors:
            failure = first_error(errors)
        except* TimeoutError:
            failure = PeerUnavailable(f"{node} did not bring the expert within {within_s:.3g} s")
        if failure is not None:
            raise failure
        self._verify(node, layer, expert, into, sums)

    def _verify(self, node: str, layer: int, expert: int, into: memoryview, sums: set[str]) -> None:
        """Checks the bytes by our manifest's checksum, or by the peer's where we have none. Raises CorruptExpert."""
        wanted = self._shelf.checksum(layer, expert) or (sums.pop() if len(sums) == 1 else "one sum for all chunks")
        found = self._checksum(into)
        if found != wanted:
            self.refused += 1
            raise CorruptExpert(f"from {node}", layer, expert, f"its checksum is {found}, not {wanted}")
        self._shelf.learn(layer, expert, wanted)
