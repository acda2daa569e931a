"""Hands out the pieces of a store by their checksums: experts, headers, dense weights, copied files, the manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edgemoe.errors import StoreError
from edgemoe.store.files import PageFile, header_bytes, page_memory
from edgemoe.store.manifest import MANIFEST, FileEntry, Manifest
from edgemoe.types.experts import padded

READS = 4  # at once


class _Place(NamedTuple):
    """Where a piece lies."""

    file: str
    offset: int
    bytes: int


class ServedPieces:
    """The pieces of one store. Used on one event loop; reads pass by the page cache where they can."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._found: tuple[Manifest, dict[str, _Place]] | None = None  # where the pieces of which manifest lie
        self._turns = asyncio.Semaphore(READS)

    def grow(self, manifest: Manifest) -> None:
        """Hands out what this manifest of the same store names, from now on."""
        self._manifest = manifest

    async def part(self, digest: str, offset: int, size_bytes: int) -> tuple[memoryview, int]:
        """Returns a part of the piece with this checksum, up to its end, and the size of all of it.

        The model's digest names the manifest. Raises StoreError.
        """
        async with self._turns:
            return await asyncio.to_thread(self._part, digest, offset, size_bytes)

    def _part(self, digest: str, offset: int, size_bytes: int) -> tuple[memoryview, int]:
        manifest = self._manifest
        if digest == manifest.digest:
            text = (self._directory / MANIFEST).read_bytes()
            return memoryview(text)[offset : offset + size_bytes], len(text)
        found = self._found
        if found is None or found[0] is not manifest:
            found = self._found = manifest, dict(_pieces(self._directory, manifest))
        if (place := found[1].get(digest)) is None:
            raise StoreError(f"the store of {manifest.name} has no piece {digest} here")
        size = max(0, min(size_bytes, place.bytes - offset))
        room = page_memory(padded(max(size, 1)))
        try:
            with PageFile(self._directory / place.file) as file:
                file.fill(room, size, place.offset + offset)
        except (OSError, EOFError) as error:
            raise StoreError(f"{self._directory / place.file} cannot be read: {error}") from error
        return room[:size], place.bytes


def _pieces(directory: Path, manifest: Manifest) -> Iterator[tuple[str, _Place]]:
    for copied in manifest.files:
        yield copied.xxh3_128, _Place(copied.file, 0, copied.bytes)
    if header := _header(directory, manifest.dense):
        yield manifest.dense.header, _Place(manifest.dense.file, 0, header)
        yield manifest.dense.xxh3_128, _Place(manifest.dense.file, header, manifest.dense.bytes - header)
    for layer in manifest.layers:
        if header := _header(directory, layer):
            yield layer.header, _Place(layer.file, 0, header)
        for expert in layer.experts:
            yield expert.xxh3_128, _Place(layer.file, expert.offset, expert.bytes)


def _header(directory: Path, entry: FileEntry) -> int:
    """Returns where a file's tensors begin; 0 where it is not here."""
    try:
        with PageFile(directory / entry.file, direct=False) as file:
            return min(header_bytes(file), entry.bytes)
    except (OSError, EOFError):
        return 0
