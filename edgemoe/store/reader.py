"""The NVMe tier: experts read from a packed store straight into the caller's memory, and verified.

Reads go around the page cache (O_DIRECT) where the file system lets them and the memory is page-aligned, else
through it. A large expert is read in blocks, side by side; each is hashed by the thread that read it. Where the store
has mirrors, blocks come from all disks, and a damaged one is read again from another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import aiofiles.os
import xxhash

from edgemoe.errors import CorruptExpert, MissingExpert, StoreError
from edgemoe.store.files import PageFile, blocks, combine
from edgemoe.store.manifest import ExpertEntry, Manifest
from edgemoe.store.mirrors import StoreCopies, StoreCopy, open_copy, open_mirrors
from edgemoe.types.experts import padded

log = logging.getLogger(__name__)

Digests = list[bytes | BaseException]  # of blocks, or why one could not be read


class ExpertStore:
    """An open store: implements `types.Store`. Close it, or use it as a context manager.

    Reads without a copy into memory that starts at a page and has the expert's size rounded up to pages, as a slab's
    slot. The bytes beyond the expert are set to zero.
    """

    def __init__(
        self, directory: str | Path, manifest: Manifest, *, threads: int = 8, mirrors: Sequence[str | Path] = ()
    ) -> None:
        """Opens every layer's file and keeps others from changing the store. Raises StoreError.

        `threads` read from each disk. `mirrors` are folders on other disks with a copy of the store under its name.
        """
        self.manifest = manifest
        self._closing = ExitStack()
        self._directory = directory = Path(directory)
        with ExitStack() as opened:
            own = open_copy(directory, manifest, opened)
            found = [own, *open_mirrors(map(Path, mirrors), directory, manifest, opened)]
            self._copies = StoreCopies(found)
            self._threads = opened.enter_context(ThreadPoolExecutor(threads * len(found), "expert-reader"))
            self._closing = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the reads in flight, then frees files and threads."""
        self._closing.close()

    def grow(self, manifest: Manifest) -> None:
        """Reads from this larger manifest of the same store from now on. Raises StoreError."""
        own = self._copies.copies[0]  # mirrors of a store that grows stay as they are
        files = list(own.files)
        for number, layer in enumerate(manifest.layers):
            if layer.experts and files[number] is None:
                try:
                    files[number] = self._closing.enter_context(PageFile(self._directory / layer.file))
                except OSError as error:
                    raise StoreError(f"{error.filename} cannot be opened: {error.strerror}") from error
        own.files, self.manifest = files, manifest

    @property
    def read_bytes(self) -> dict[str, int]:
        """Returns the bytes read since it was opened, by the folder of the copy."""
        return {str(copy.directory): copy.read_bytes for copy in self._copies.copies}

    def expert_bytes(self, layer: int, expert: int) -> int:
        """Returns the size of one expert as stored, padding excluded. Raises MissingExpert."""
        return self._find(layer, expert).bytes

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """Reads one expert into `into` and verifies it. Raises CorruptExpert, MissingExpert.

        When it returns or raises, even by cancellation, nothing writes into `into` any more.
        """
        reading = self._reading(layer, expert, into)
        found = await self._read_blocks(reading)
        for again in reading.repeated(found):
            digests = await self._read_blocks(again)
            if again.fault(digests) is None:
                reading.log_damage(found, digests)
                return
        reading.verify(found)

    def read_into(self, layer: int, expert: int, into: memoryview) -> None:
        """Reads an expert as `read` does, on the calling thread."""
        reading = self._reading(layer, expert, into)
        found = reading.try_blocks()
        for again in reading.repeated(found):
            digests = again.try_blocks()
            if again.fault(digests) is None:
                reading.log_damage(found, digests)
                return
        reading.verify(found)

    async def _read_blocks(self, reading: _Reading) -> Digests:
        work = asyncio.gather(
            *(_read_block(reading, block, executor=self._threads) for block in blocks(reading.entry.bytes)),
            return_exceptions=True,
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            reading.abandoned = True
            await _ended(work)
            raise

    def _find(self, layer: int, expert: int) -> ExpertEntry:
        if not self.manifest.present(layer, expert):
            raise MissingExpert(layer, expert, f"the store of {self.manifest.name} does not hold it")
        return self.manifest.entry(layer, expert)

    def _reading(self, layer: int, expert: int, into: memoryview) -> _Reading:
        entry = self._find(layer, expert)
        if into.nbytes < entry.bytes:
            raise ValueError(f"expert {expert} of layer {layer} has {entry.bytes} bytes, the memory {into.nbytes}")
        return _Reading(self._copies, layer, entry, into.cast("B"))


@dataclass
class _Reading:
    """One expert on its way into memory."""

    copies: StoreCopies
    layer: int
    entry: ExpertEntry
    into: memoryview
    abandoned: bool = False  # blocks that have not begun need not begin
    came_from: dict[int, StoreCopy] = field(default_factory=dict)  # by the first byte of a block

    def block(self, block: slice) -> bytes:
        """Reads one block and returns its digest; nothing once the reading is abandoned."""
        room = self.into[block.start : padded(block.stop)]
        size = block.stop - block.start
        failed: CorruptExpert | None = None
        for copy in self.copies.soonest(size):
            if self.abandoned or (file := copy.files[self.layer]) is None:
                continue
            try:
                with self.copies.reading(copy, size):
                    file.fill(room, size, self.entry.offset + block.start)
            except (OSError, EOFError) as error:
                failed = self._corrupt(copy, str(error))
                failed.__cause__ = error
                if len(self.copies.copies) > 1:
                    log.warning("%s", self._corrupt(copy, f"{error}; another disk is asked"))
            else:
                self.came_from[block.start] = copy
                return xxhash.xxh3_128_digest(room[:size])
        if failed is None:
            return b""
        self.abandoned = True
        raise failed

    def try_blocks(self) -> Digests:
        """Reads all blocks, one after the other. Returns their digests, or why one could not be read."""
        try:
            return [self.block(block) for block in blocks(self.entry.bytes)]
        except CorruptExpert as error:
            return [error]

    def fault(self, digests: Digests) -> BaseException | None:
        """Returns a block's exception, or CorruptExpert if the blocks' digests do not match the manifest."""
        for digest in digests:
            if isinstance(digest, BaseException):
                return digest
        found = combine([digest for digest in digests if isinstance(digest, bytes)])
        if found == self.entry.xxh3_128:
            return None
        return self._corrupt(self.came_from[0], f"its checksum is {found}, not {self.entry.xxh3_128}")

    def repeated(self, found: Digests) -> Iterator[_Reading]:
        """Yields the same reading from each copy alone, if there are several and the blocks found are wrong."""
        if len(self.copies.copies) > 1 and self.fault(found) is not None:
            for copy in self.copies.copies:
                if copy.files[self.layer] is not None:
                    yield replace(self, copies=self.copies.only(copy), abandoned=False, came_from={})

    def log_damage(self, found: Digests, right: Digests) -> None:
        """Logs the copies whose blocks were wrong."""
        for block, first, second in zip(blocks(self.entry.bytes), found, right, strict=False):
            if first != second and (copy := self.came_from.get(block.start)) is not None:
                self.copies.log_once(self._corrupt(copy, "another disk has it"))

    def verify(self, digests: Digests) -> None:
        """Raises the fault of the blocks, if there is one."""
        if (fault := self.fault(digests)) is not None:
            raise fault

    def _corrupt(self, copy: StoreCopy, why: str) -> CorruptExpert:
        file = copy.files[self.layer]
        assert file is not None
        return CorruptExpert(str(file.path), self.layer, self.entry.expert, why)


_read_block = aiofiles.os.wrap(_Reading.block)


async def _ended(work: asyncio.Future[Digests]) -> None:
    """Waits for the end of the work, even if cancelled: threads that write cannot be stopped."""
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            continue
