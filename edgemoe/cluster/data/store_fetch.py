"""Passes stores between boxes: pieces by their checksums, in parts of at most a megabyte.

`StorePieceServer` answers for the store that an engine serves. `PieceChannel` asks; who asks verifies. The slower a
link is, the smaller the parts are, so that each comes in time however many lanes share the link.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Protocol

from edgemoe.cluster.data.messages import CHUNK_BYTES, BulkMessage, FetchPiece, PiecePart
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer
from edgemoe.errors import PeerError, PeerRefused, PeerUnavailable, first_error

WINDOW = 4  # parts of one piece under way; one where they are as small as can be
FIRST_BYTES = 64 << 10  # of the first part from a box, and of any part at least
PART_S = 1.0  # within which a part should come, with all others that are under way
Take = Callable[[int, memoryview], None]  # (offset, bytes at that offset), in order


class PieceSource(Protocol):
    """The pieces of this engine's store."""

    async def part(self, digest: str, offset: int, size_bytes: int) -> tuple[memoryview, int]:
        """Returns a part of a piece, up to its end, and the size of all of it. Raises StoreError."""


class StorePieceServer:
    """Answers FetchPiece messages."""

    def __init__(self, source: PieceSource) -> None:
        self.sent_bytes = 0
        self._source = source

    async def serve(self, asked: FetchPiece) -> Answer[BulkMessage]:
        part, size = await self._source.part(asked.digest, asked.offset, asked.bytes)
        self.sent_bytes += len(part)
        return Answer(PiecePart(size), [part])


class TransferPace:
    """Limits transfers to `bytes_per_s` over all callers of one event loop; 0: no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_s = 0.0  # when all reserved bytes have passed

    async def reserve(self, size_bytes: int) -> None:
        """Waits until these bytes may pass."""
        if not self._rate:
            return
        now = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now) + size_bytes / self._rate
        await asyncio.sleep(self._free_s - size_bytes / self._rate - now)

    def give_back(self, size_bytes: int) -> None:
        """Returns bytes that were reserved but not transferred."""
        if self._rate:
            self._free_s -= size_bytes / self._rate


class PieceChannel:
    """Fetches pieces over a bulk channel."""

    def __init__(self, channel: Channel[BulkMessage], pace: TransferPace, timeout_s: float) -> None:
        self.bytes = 0  # that came
        self._channel, self._pace, self._timeout_s = channel, pace, timeout_s
        self._part_bytes = defaultdict[str, int](lambda: FIRST_BYTES)  # asked for at once, by box

    async def small(self, node: str, digest: str, most_bytes: int) -> bytes:
        """Returns a piece of unknown size. Raises PeerError, also where it is longer than `most_bytes`."""
        first, size = await self._part(node, digest, 0, FIRST_BYTES)
        if size > most_bytes:
            raise PeerRefused(f"{node} has {size} bytes where at most {most_bytes} can be")
        whole = bytearray(first)

        def append_part(_: int, part: memoryview) -> None:
            whole.extend(part)

        await self.large(node, digest, size, append_part, len(first))
        return bytes(whole)

    async def large(self, node: str, digest: str, size_bytes: int, take: Take, start: int = 0) -> None:
        """Hands a piece of this size to `take`, in order from `start` on. Raises PeerError, OSError as `take`."""
        failure: PeerError | OSError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                coming: deque[tuple[int, asyncio.Task[memoryview]]] = deque()
                offset = start
                while offset < size_bytes:
                    while len(coming) >= self._window(node):
                        at, task = coming.popleft()
                        take(at, await task)
                    part_bytes = min(self._part_bytes[node], size_bytes - offset)
                    part = self._exactly(node, digest, offset, part_bytes, size_bytes)
                    coming.append((offset, group.create_task(part)))
                    offset += part_bytes
                for at, task in coming:
                    take(at, await task)
        except* (PeerError, OSError) as errors:
            failure = first_error(errors)
        if failure is not None:
            raise failure

    def _window(self, node: str) -> int:
        return WINDOW if self._part_bytes[node] > FIRST_BYTES else 1

    def _fit(self, node: str, part_bytes: int, seconds: float) -> None:
        """Makes the next parts as large as would come within PART_S, by one that took so long; twice as large at most.

        Shorter parts than are asked for now, such as the end of a piece, say nothing of that.
        """
        now_bytes = self._part_bytes[node]
        if part_bytes >= now_bytes:
            fit_bytes = int(part_bytes * PART_S / max(seconds, 1e-3))
            self._part_bytes[node] = max(FIRST_BYTES, min(fit_bytes, 2 * now_bytes, CHUNK_BYTES))

    async def _exactly(self, node: str, digest: str, offset: int, part_bytes: int, size_bytes: int) -> memoryview:
        part, size = await self._part(node, digest, offset, part_bytes)
        if size != size_bytes or len(part) != part_bytes:
            raise PeerRefused(f"{node} has a piece {digest[:12]} of {size} bytes, not {size_bytes}")
        return part

    async def _part(self, node: str, digest: str, offset: int, part_bytes: int) -> tuple[memoryview, int]:
        await self._pace.reserve(part_bytes)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        try:
            answer = await self._channel.ask(node, FetchPiece(digest, offset, part_bytes), timeout_s=self._timeout_s)
        except PeerUnavailable:
            self._part_bytes[node] = FIRST_BYTES
            raise
        self._fit(node, part_bytes, loop.time() - asked_s)
        if not isinstance(answer.message, PiecePart) or len(answer.tensors) != 1:
            raise PeerRefused(f"{node} answered with something else")
        part = answer.tensors[0]
        if len(part) > part_bytes:
            raise PeerRefused(f"{node} answered with more than was asked for")
        self._pace.give_back(part_bytes - len(part))
        self.bytes += len(part)
        return part, answer.message.size
