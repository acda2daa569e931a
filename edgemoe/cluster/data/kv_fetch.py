"""Transfers entries of the prefix cache between boxes: blocks with their signatures, windows and states.

Blocks are requested by key in the order of the prompt, whose end the peer may still compute: it waits for them shortly.
Each part is verified before use. A missing, stale or corrupt entry ends the transfer; entries that have come are kept.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgemoe.cluster.data.messages import PART_BYTES, BulkMessage, FetchKV, KVPart
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.errors import HandOverFailed, PeerBusy, PeerError, PeerRefused, PeerUnavailable, first_error
from edgemoe.types.step import EntryKind

AT_ONCE = 4  # entries under way
READS = 4  # entries that are copied at once for peers
LOOK_S, WAIT_S = 0.01, 0.5  # how often, and for how long, a request waits for an entry that is not here yet
STALLED_S = 15.0  # without a new block, after which a transfer fails
REASONS = ("missing", "stale", "corrupt", "refused", "lost", "full", "late")

ByteArray = npt.NDArray[np.uint8]


class CopiedPrefix(NamedTuple):
    """A copy of one entry, and the generation of the place where it lay."""

    generation: int
    data: ByteArray


class PrefixSource(Protocol):
    """The prefix cache of this engine, for peers. Its sizes never change."""

    @property
    def encoding(self) -> str: ...
    @property
    def entry_bytes(self) -> Mapping[EntryKind, int]: ...
    def has(self, key: bytes, kind: EntryKind) -> bool: ...
    def needed_windows(self, count: int) -> range:
        """Returns of which of a prompt's first `count` blocks the windows are needed after them."""

    def read(self, key: bytes, kind: EntryKind) -> CopiedPrefix | None:
        """Returns a copy of an entry; None where it is not here. Called on any thread."""

    async def take_in(self, keys: Sequence[bytes], data: ByteArray, kind: EntryKind) -> bool:
        """Keeps an entry for the last of these keys. Returns False where it has no place."""


class KVFetchServer:
    """Answers FetchKV messages."""

    def __init__(self, source: PrefixSource) -> None:
        self.sent_bytes = 0
        self._source = source
        self._turns = asyncio.Semaphore(READS)

    async def serve(self, question: Question[BulkMessage], asked: FetchKV) -> Answer[BulkMessage]:
        """Raises PeerRefused, or PeerBusy for an entry that is not here, or not yet."""
        source = self._source
        if asked.encoding != source.encoding:
            raise PeerRefused("keys and values of another model or encoding; serve the same store in the same way")
        if asked.offset + asked.bytes > source.entry_bytes[asked.kind]:
            raise PeerRefused("there is no such part of an entry")
        await self._wait(asked, question.deadline)
        async with self._turns:
            entry = await asyncio.to_thread(source.read, asked.key, asked.kind)
        if entry is None:
            raise PeerBusy("that is not here")
        part = entry.data.data[asked.offset : asked.offset + asked.bytes]
        self.sent_bytes += part.nbytes
        return Answer(KVPart.of(asked, entry.generation, part), [part])

    async def _wait(self, asked: FetchKV, deadline: float) -> None:
        clock = asyncio.get_running_loop().time
        ends = min(clock() + WAIT_S, deadline)
        while not self._source.has(asked.key, asked.kind):
            if clock() >= ends:
                return
            await asyncio.sleep(LOOK_S)


class KVFetcher:
    """Fetches prefixes from peers into this engine's prefix cache."""

    def __init__(self, channel: Channel[BulkMessage], source: PrefixSource, timeout_s: float) -> None:
        self.blocks = self.bytes = 0  # that came
        self.seconds = 0.0
        self.failures = Counter[str]()  # by reason
        self._channel, self._source, self._timeout_s = channel, source, timeout_s

    async def fetch(self, node: str, keys: Sequence[bytes], kept: Sequence[bytes], within_s: float) -> None:
        """Fetches the blocks with these keys, and the window and the state after them. Raises HandOverFailed.

        They are kept here by the keys `kept`, by which some may be here already.
        """
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            async with asyncio.timeout(within_s):
                await self._fetch(node, keys, kept)
        except TimeoutError:
            self._fail("late", f"{node} did not bring the prefix within {within_s:.3g} s")
        except HandOverFailed as failure:
            self.failures[failure.reason] += 1
            raise
        except PeerUnavailable as error:
            self._fail("lost", str(error))
        except PeerError as error:
            self._fail("refused", str(error))
        finally:
            self.seconds += clock() - began_s

    def _fail(self, reason: str, why: str) -> None:
        self.failures[reason] += 1
        raise HandOverFailed(reason, why)

    async def _fetch(self, node: str, keys: Sequence[bytes], kept: Sequence[bytes]) -> None:
        source = self._source
        here = next((n for n, key in enumerate(kept) if not source.has(key, EntryKind.BLOCK)), len(keys))
        await self._fetch_kind(node, keys, kept, range(here, len(keys)), EntryKind.BLOCK)
        windows = [n for n in source.needed_windows(len(keys)) if not source.has(kept[n], EntryKind.WINDOW)]
        await self._fetch_kind(node, keys, kept, windows, EntryKind.WINDOW)
        if keys and source.entry_bytes[EntryKind.STATE] and not source.has(kept[-1], EntryKind.STATE):
            await self._fetch_kind(node, keys, kept, [len(keys) - 1], EntryKind.STATE)

    async def _fetch_kind(
        self, node: str, keys: Sequence[bytes], kept: Sequence[bytes], wanted: Sequence[int], kind: EntryKind
    ) -> None:
        """Fetches the entries of a kind for the blocks with these numbers, a few at a time."""
        for first in range(0, len(wanted), AT_ONCE):
            group = wanted[first : first + AT_ONCE]
            for n, data in zip(group, await self._entries(node, [keys[n] for n in group], kind), strict=True):
                await self._keep(kept[: n + 1], data, kind)
                self.blocks += kind == EntryKind.BLOCK

    async def _keep(self, keys: Sequence[bytes], data: ByteArray, kind: EntryKind) -> None:
        if not await self._source.take_in(keys, data, kind):
            raise HandOverFailed("full", "there is no room for another block here")
        self.bytes += data.nbytes

    async def _entries(self, node: str, keys: Sequence[bytes], kind: EntryKind) -> list[ByteArray]:
        failure: PeerError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._entry(node, key, kind)) for key in keys]
        except* PeerError as errors:
            failure = first_error(errors)
        if failure is not None:
            raise failure
        return [task.result() for task in tasks]

    async def _entry(self, node: str, key: bytes, kind: EntryKind) -> ByteArray:
        size = self._source.entry_bytes[kind]
        whole = np.empty(size, np.uint8)
        generations = set[int]()
        for offset in range(0, size, PART_BYTES):
            state, window = kind == EntryKind.STATE, kind == EntryKind.WINDOW
            asked = FetchKV(self._source.encoding, key, state, offset, min(PART_BYTES, size - offset), window)
            into = whole[offset : offset + asked.bytes]
            generations.add(await self._part(node, asked, into))
        if len(generations) > 1:
            raise HandOverFailed("stale", f"{node} reused the memory of a block while it was read")
        return whole

    async def _part(self, node: str, asked: FetchKV, into: ByteArray) -> int:
        """Copies the part into `into`; returns its generation."""
        clock = asyncio.get_running_loop().time
        ends = clock() + STALLED_S
        while True:
            try:
                answer = await self._channel.ask(node, asked, timeout_s=self._timeout_s)
                break
            except PeerBusy as error:
                if clock() > ends:
                    raise HandOverFailed("missing", str(error)) from error
                await asyncio.sleep(LOOK_S)
        part = answer.message
        if not isinstance(part, KVPart) or [tensor.nbytes for tensor in answer.tensors] != [asked.bytes]:
            raise PeerRefused(f"{node} answered with something else")
        into[:] = np.frombuffer(answer.tensors[0], np.uint8)
        if not part.is_intact(asked, into.data):
            raise HandOverFailed("corrupt", f"a block from {node} has another checksum than it should")
        return part.generation
