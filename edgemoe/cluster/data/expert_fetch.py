"""Experts as bytes, from box to box: in chunks of at most a megabyte, each expert verified as a whole.

`PeerStore` is the store of a box among others: what its own disk lacks, or has damaged, comes from a peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from edgemoe.cluster.data.messages import CHUNK_BYTES, BulkMessage, Chunk, Fetch
from edgemoe.cluster.data.peer_estimate import READ_BYTES_PER_S, PeerEstimate
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.transport import Answer, Question
from edgemoe.errors import CorruptExpert, MissingExpert, PeerError, PeerRefused, PeerUnavailable
from edgemoe.types.experts import Store

log = logging.getLogger(__name__)
WINDOW = 4  # chunks of one expert under way
FETCHES = 4  # experts under way
LATE_FACTOR, LATE_S = 4.0, 0.25  # a fetch that takes so many times what was expected is tried elsewhere
LEAST_BYTES_PER_S = 5e6  # of a fetch; whoever is slower without having been measured so is given up in the end, too

Checksum = Callable[[memoryview], str]


class ExpertSource(Protocol):
    """Experts of this box, to be handed out. Called on the event loop."""

    def checksum(self, layer: int, expert: int) -> str | None:
        """What the expert must hash to; None where nobody said so yet."""

    def learn(self, layer: int, expert: int, checksum: str) -> None:
        """An expert with this checksum arrived from a peer."""

    def has(self, layer: int, expert: int) -> bool:
        """Whether the disk holds it."""

    async def part(self, layer: int, expert: int, offset: int, size_bytes: int) -> bytes:
        """A part of an expert that is in memory or on the disk. Raises StoreError."""


class ExpertFetchServer:
    """Answers Fetches."""

    def __init__(self, shelf: ExpertSource, layers: int, experts: int, expert_bytes: int) -> None:
        self.sent_bytes = 0
        self._shelf, self._sizes = shelf, (layers, experts, expert_bytes)

    async def serve(self, question: Question[BulkMessage]) -> Answer[BulkMessage]:
        fetch, (layers, experts, expert_bytes) = question.message, self._sizes
        if not isinstance(fetch, Fetch):
            raise PeerRefused("not a question")
        if fetch.layer >= layers or fetch.expert >= experts or fetch.offset + fetch.bytes > expert_bytes:
            raise PeerRefused(f"there is no such part of expert {fetch.expert} of layer {fetch.layer}")
        wanted = self._shelf.checksum(fetch.layer, fetch.expert)
        if wanted is None:
            raise PeerRefused(f"expert {fetch.expert} of layer {fetch.layer} is not here")
        part = await self._shelf.part(fetch.layer, fetch.expert, fetch.offset, fetch.bytes)
        self.sent_bytes += len(part)
        return Answer(Chunk(wanted), [memoryview(part)])


class PeerStore:
    """Implements `types.Store`. Without a channel it is the box's own store and nothing more."""

    def __init__(self, own: Store, shelf: ExpertSource, checksum: Checksum, expert_bytes: int) -> None:
        self.fetched = self.refused = 0  # experts from peers; those whose bytes were not what they must be
        self._own, self._shelf, self._checksum, self._size = own, shelf, checksum, expert_bytes
        self._channel: Channel[BulkMessage] | None = None
        self._turns = asyncio.Semaphore(FETCHES)

    def join(
        self, channel: Channel[BulkMessage], peers: Callable[[], dict[str, PeerEstimate]], timeout_s: float
    ) -> None:
        """From here on peers are asked too."""
        self._channel, self._peers, self._timeout_s = channel, peers, timeout_s

    def expert_bytes(self, layer: int, expert: int) -> int:
        return self._size

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """From the disk or a peer, verified. Raises CorruptExpert, MissingExpert."""
        damaged: CorruptExpert | None = None
        if self._shelf.has(layer, expert):
            try:
                await self._own.read(layer, expert, into)
                return
            except CorruptExpert as error:
                log.warning("a damaged expert is fetched from a peer", extra={"why": str(error)})
                damaged = error
        async with self._turns:
            reasons = await self._fetch(layer, expert, into)
        if reasons is None:
            return
        if damaged is not None:
            raise damaged
        raise MissingExpert(layer, expert, "; ".join(reasons) or "it is not on the disk, and no peer has it")

    async def _fetch(self, layer: int, expert: int, into: memoryview) -> list[str] | None:
        """None when it is there, else why not. Who does not answer as usual is left for another, then tried again."""
        reasons: list[str] = []
        patience, patient = 1.0, False
        while not patient:
            sources = self._sources(layer, expert)
            usual = [max(LATE_S, LATE_FACTOR * self._expected_s(peer)) for peer in sources]
            patient = len(sources) <= 1 or patience * min(usual) >= self._timeout_s
            for peer, late_s in zip(sources, usual, strict=True):
                whole_s = self._timeout_s + max(late_s, self._size / LEAST_BYTES_PER_S)
                within_s = whole_s if patient else min(whole_s, patience * late_s)
                try:
                    await self._fetch_from(peer.node, layer, expert, into[: self._size], within_s)
                except (PeerError, CorruptExpert) as error:
                    reasons.append(str(error))
                    if isinstance(error, PeerUnavailable):
                        peer.failed(min(self._timeout_s, within_s))
                    continue
                self.fetched += 1
                return None
            patience *= LATE_FACTOR
        return reasons

    def _sources(self, layer: int, expert: int) -> list[PeerEstimate]:
        """Peers that have it, in memory first, then by how near they are."""
        if self._channel is None:
            return []
        ready = [peer for peer in self._peers().values() if peer.heard and peer.ready]
        having = [peer for peer in ready if peer.ram[layer, expert] or peer.disk[layer, expert]]
        having.sort(key=lambda peer: (peer.silent, not peer.ram[layer, expert], self._expected_s(peer)))
        return having

    def _expected_s(self, peer: PeerEstimate) -> float:
        """That a fetch takes beside those that may be under way, the peer's reads included."""
        return peer.latency_s + FETCHES * self._size * (peer.s_per_byte + 1 / READ_BYTES_PER_S)

    async def _fetch_from(self, node: str, layer: int, expert: int, into: memoryview, within_s: float) -> None:
        """All of it within so long; a chunk that takes a whole time-out ends it earlier."""
        window, sums, timeout_s = asyncio.Semaphore(WINDOW), set[str](), min(self._timeout_s, within_s)

        async def chunk(start: int) -> None:
            size = min(CHUNK_BYTES, self._size - start)
            async with window:
                assert self._channel is not None
                answer = await self._channel.ask(node, Fetch(layer, expert, start, size), timeout_s=timeout_s)
            if not isinstance(answer.message, Chunk) or [t.nbytes for t in answer.tensors] != [size]:
                raise PeerRefused(f"{node} answered a fetch with something else")
            sums.add(answer.message.checksum)
            into[start : start + size] = answer.tensors[0]

        failure: PeerError | None = None
        try:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:  # left, nothing writes into `into`
                for start in range(0, self._size, CHUNK_BYTES):
                    group.create_task(chunk(start))
        except* PeerError as errors:
            failure = _first(errors)
        except* TimeoutError:
            failure = PeerUnavailable(f"{node} did not bring the expert within {within_s:.3g} s")
        if failure is not None:
            raise failure
        self._verify(node, layer, expert, into, sums)

    def _verify(self, node: str, layer: int, expert: int, into: memoryview, told: set[str]) -> None:
        """Our own manifest says what it must hash to; where it lacks the expert, the peer's does."""
        wanted = self._shelf.checksum(layer, expert) or (told.pop() if len(told) == 1 else "one sum for all chunks")
        found = self._checksum(into)
        if found != wanted:
            self.refused += 1
            raise CorruptExpert(f"from {node}", layer, expert, f"its checksum is {found}, not {wanted}")
        self._shelf.learn(layer, expert, wanted)


def _first(errors: BaseExceptionGroup[PeerError]) -> PeerError:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
