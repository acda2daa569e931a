"""The NVMe tier: experts read from a packed store straight into the caller's memory, and verified.

Reads go around the page cache (O_DIRECT) where the file system lets them and the memory is page-aligned, else
through it. A large expert is read in blocks, side by side; each is hashed by the thread that read it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiofiles.os
import xxhash

from edgemoe.errors import CorruptExpert, MissingExpert, StoreError
from edgemoe.store.files import LOCK, PageFile, blocks, combine, lock_store
from edgemoe.store.manifest import ExpertEntry, Manifest
from edgemoe.types.experts import padded


class ExpertStore:
    """An open store: implements `types.Store`. Close it, or use it as a context manager.

    Reads without a copy into memory that starts at a page and has the expert's size rounded up to pages, as a slab's
    slot. The bytes beyond the expert are set to zero.
    """

    def __init__(self, directory: str | Path, manifest: Manifest, *, threads: int = 8) -> None:
        """Opens every layer's file and keeps others from changing the store. Raises StoreError."""
        self.manifest = manifest
        self._closing = ExitStack()
        self._directory = directory = Path(directory)
        with ExitStack() as opened:
            if (directory / LOCK).exists():
                opened.enter_context(lock_store(directory, exclusive=False))
            try:
                self._files = [
                    opened.enter_context(PageFile(directory / layer.file)) if layer.experts else None
                    for layer in manifest.layers
                ]
            except OSError as error:
                raise StoreError(f"{error.filename} cannot be opened: {error.strerror}") from error
            self._threads = opened.enter_context(ThreadPoolExecutor(threads, "expert-reader"))
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
        files = list(self._files)
        for number, layer in enumerate(manifest.layers):
            if layer.experts and files[number] is None:
                try:
                    files[number] = self._closing.enter_context(PageFile(self._directory / layer.file))
                except OSError as error:
                    raise StoreError(f"{error.filename} cannot be opened: {error.strerror}") from error
        self._files, self.manifest = files, manifest

    def expert_bytes(self, layer: int, expert: int) -> int:
        """Returns the size of one expert as stored, padding excluded. Raises MissingExpert."""
        return self._find(layer, expert)[1].bytes

    async def read(self, layer: int, expert: int, into: memoryview) -> None:
        """Reads one expert into `into` and verifies it. Raises CorruptExpert, MissingExpert.

        When it returns or raises, even by cancellation, nothing writes into `into` any more.
        """
        reading = self._reading(layer, expert, into)
        work = asyncio.gather(
            *(_read_block(reading, block, executor=self._threads) for block in blocks(reading.entry.bytes)),
            return_exceptions=True,
        )
        try:
            found = await asyncio.shield(work)
        except asyncio.CancelledError:
            reading.abandoned = True
            await _ended(work)
            raise
        reading.verify(found)

    def read_into(self, layer: int, expert: int, into: memoryview) -> None:
        """Reads an expert as `read` does, on the calling thread."""
        reading = self._reading(layer, expert, into)
        reading.verify([reading.block(block) for block in blocks(reading.entry.bytes)])

    def _find(self, layer: int, expert: int) -> tuple[PageFile, ExpertEntry]:
        if not self.manifest.present(layer, expert):
            raise MissingExpert(layer, expert, f"the store of {self.manifest.name} does not hold it")
        file = self._files[layer]
        assert file is not None
        return file, self.manifest.entry(layer, expert)

    def _reading(self, layer: int, expert: int, into: memoryview) -> _Reading:
        file, entry = self._find(layer, expert)
        if into.nbytes < entry.bytes:
            raise ValueError(f"expert {expert} of layer {layer} has {entry.bytes} bytes, the memory {into.nbytes}")
        return _Reading(file, layer, entry, into.cast("B"))


@dataclass
class _Reading:
    """One expert on its way into memory."""

    file: PageFile
    layer: int
    entry: ExpertEntry
    into: memoryview
    abandoned: bool = False  # blocks that have not begun need not begin

    def block(self, block: slice) -> bytes:
        """Reads one block and returns its digest; nothing once the reading is abandoned."""
        if self.abandoned:
            return b""
        room = self.into[block.start : padded(block.stop)]
        size = block.stop - block.start
        try:
            self.file.fill(room, size, self.entry.offset + block.start)
        except (OSError, EOFError) as error:
            self.abandoned = True
            raise self._corrupt(str(error)) from error
        return xxhash.xxh3_128_digest(room[:size])

    def verify(self, digests: list[bytes | BaseException]) -> None:
        """Raises a block's exception, or CorruptExpert if the blocks' digests do not match the manifest."""
        for digest in digests:
            if isinstance(digest, BaseException):
                raise digest
        found = combine([digest for digest in digests if isinstance(digest, bytes)])
        if found != self.entry.xxh3_128:
            raise self._corrupt(f"its checksum is {found}, not {self.entry.xxh3_128}")

    def _corrupt(self, why: str) -> CorruptExpert:
        return CorruptExpert(str(self.file.path), self.layer, self.entry.expert, why)


_read_block = aiofiles.os.wrap(_Reading.block)


async def _ended(work: asyncio.Future[list[bytes | BaseException]]) -> None:
    """Waits for the end of the work, even if cancelled: threads that write cannot be stopped."""
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            continue
