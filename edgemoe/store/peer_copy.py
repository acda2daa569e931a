"""A store that comes from other boxes expert by expert, and can be served once its dense weights are there.

* packing.json: until the dense weights, headers and copied files are there
* dense.safetensors.part: grows in order, so that its length is the progress
* manifest.json: lists the experts that are on disk and verified; rewritten as they come
* pulled/: its lock excludes a second pull; gone when all has come
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from edgemoe.config.sizes import format_size
from edgemoe.durable import (
    NewFile,
    make_folder,
    open_kept,
    remove_file,
    remove_tree,
    rename_file,
    replace_file,
    sync,
    write_all,
)
from edgemoe.errors import StoreError
from edgemoe.store.checkpoint import COPIED_FILES
from edgemoe.store.files import (
    LOCK,
    SPARE_BYTES,
    PageFile,
    header_bytes,
    lock_store,
    os_errors_as_store_error,
    page_memory,
    range_checksum,
)
from edgemoe.store.manifest import (
    DENSE,
    JOURNAL,
    MANIFEST,
    FileEntry,
    Manifest,
    clear,
    content_digest,
    layer_file,
    spec_of,
)
from edgemoe.types.experts import padded

FOLDER = "pulled"
PART = f"{DENSE}.part"


@dataclass(frozen=True, slots=True)
class ExpertPiece:
    """One missing expert: `bytes` at `offset` of its layer's file."""

    layer: int
    expert: int
    file: str
    offset: int
    bytes: int
    digest: str


class PeerCopy:
    """A store on its way here. Made under `open_copy`."""

    def __init__(self, directory: Path, whole: Manifest) -> None:
        """Opens the copy; `whole` is the boxes' merged manifest. Keeps experts that are here. Raises StoreError."""
        self.directory, self.whole = directory, whole
        self._have: list[set[int]] = [set() for _ in whole.layers]
        self._changed: set[str] = set()  # files of experts that the next manifest is the first to list
        self._noting = threading.Lock()  # experts and their files at once
        self._saving = threading.Lock()  # the last manifest written must list the most
        if (directory / MANIFEST).is_file():
            found = Manifest.load(directory)
            if found.digest != whole.digest:
                raise StoreError(f"{directory} is the store of another model ({found.name}); remove it first")
            self.whole = merge_manifests([whole, found])
            self._have = [set(layer.by_expert) for layer in found.layers]

    @property
    def has_base(self) -> bool:
        """Returns whether all but experts is there."""
        return (self.directory / MANIFEST).is_file()

    @property
    def is_whole(self) -> bool:
        return all(len(have) == len(layer.experts) for have, layer in zip(self._have, self.whole.layers, strict=True))

    def missing(self) -> Iterator[ExpertPiece]:
        """Yields the missing experts."""
        for number, layer in enumerate(self.whole.layers):
            for entry in layer.experts:
                if entry.expert not in self._have[number]:
                    yield ExpertPiece(number, entry.expert, layer.file, entry.offset, entry.bytes, entry.xxh3_128)

    def check_room(self) -> None:
        """Raises StoreError, saying how many bytes are missing, where the rest does not fit on the disk."""
        there = sum(path.stat().st_blocks * 512 for path in self.directory.rglob("*") if path.is_file())
        disk = os.statvfs(self.directory)
        short = self.whole.total_bytes + SPARE_BYTES - there - disk.f_bavail * disk.f_frsize
        if short > 0:
            raise StoreError(
                f"{self.directory}: the store needs {short} bytes ({format_size(short)}) more than the disk has; free "
                "them, or name another model.store_dir"
            )

    # --- all but experts --------------------------------------------------------------------------------------

    def keep_copy(self, name: str, data: bytes) -> None:
        """Keeps a file that boxes have as it was in the checkpoint."""
        replace_file(self.directory / name, data, 0o644)

    def begin_layer(self, number: int, header: bytes) -> None:
        """Makes a layer's file, with its header and room for its experts."""
        layer = self.whole.layers[number]
        with NewFile(self.directory / layer.file, 0o644) as file:
            os.ftruncate(file.fd, layer.bytes)
            write_all(file.fd, header)
            file.put_in_place()

    def begin_dense(self, header: bytes) -> int:
        """Returns how many bytes of the dense weights have come, where this is how their file begins."""
        part = self.directory / PART
        with os.fdopen(open_kept(part, 0o644), "r+b") as file:
            if file.read(len(header)) != header:
                file.seek(0)
                file.truncate(0)
                file.write(header)
        return part.stat().st_size - len(header)

    def add_dense(self, data: memoryview) -> None:
        """Appends the next bytes of the dense weights."""
        with os.fdopen(open_kept(self.directory / PART, 0o644), "r+b", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            write_all(file.fileno(), data)

    def finish_dense(self, header_bytes: int) -> bool:
        """Gives the dense weights their name; false, with nothing left of them, where their checksum is wrong."""
        part, entry = self.directory / PART, self.whole.dense
        with PageFile(part, direct=False) as file:
            intact = part.stat().st_size == entry.bytes
            intact = intact and range_checksum(file, header_bytes, entry.bytes - header_bytes) == entry.xxh3_128
        if intact:
            sync(part)
            rename_file(part, DENSE)
        else:
            remove_file(part)
        return intact

    @property
    def has_dense(self) -> bool:
        return (self.directory / DENSE).is_file()

    # --- experts ----------------------------------------------------------------------------------------------

    def write(self, piece: ExpertPiece, offset: int, data: memoryview) -> None:
        """Writes a part of an expert to its place."""
        fd = open_kept(self.directory / piece.file, 0o644)
        try:
            os.lseek(fd, piece.offset + offset, os.SEEK_SET)
            write_all(fd, data)
        finally:
            os.close(fd)

    def is_intact(self, piece: ExpertPiece) -> bool:
        """Returns whether an expert's file part has the right checksum."""
        with PageFile(self.directory / piece.file, direct=False) as file:
            return range_checksum(file, piece.offset, piece.bytes) == piece.digest

    def mark_present(self, piece: ExpertPiece) -> None:
        """Lists an expert in the next manifest."""
        with self._noting:
            self._have[piece.layer].add(piece.expert)
            self._changed.add(piece.file)

    @property
    def has_unsaved(self) -> bool:
        """Whether the manifest lacks an expert that is here."""
        return bool(self._changed)

    def save(self) -> None:
        """Writes a manifest of the experts that are here, once they are on disk. On any thread."""
        with self._saving:
            with self._noting:
                layers = tuple(
                    msgspec.structs.replace(layer, experts=tuple(one for one in layer.experts if one.expert in have))
                    for layer, have in zip(self.whole.layers, self._have, strict=True)
                )
                changed, self._changed = self._changed, set()
            for file in sorted(changed):
                sync(self.directory / file)
            msgspec.structs.replace(self.whole, layers=layers).save(self.directory)
            clear(self.directory)


@contextlib.contextmanager
def open_copy(directory: Path, whole: Manifest) -> Iterator[PeerCopy]:
    """Holds a store that is pulled against removal and a second pull; a daemon may serve it. Raises StoreError."""
    with os_errors_as_store_error(directory, "pulling"), contextlib.ExitStack() as held:
        for folder in (FOLDER, "experts"):
            make_folder(directory / folder)
        held.enter_context(lock_store(directory / FOLDER, exclusive=True))
        os.close(open_kept(directory / LOCK, 0o644))
        held.enter_context(lock_store(directory, exclusive=False))
        if not (directory / MANIFEST).is_file():
            replace_file(directory / JOURNAL, msgspec.json.encode({"pulled": whole.digest}), 0o644)
        store = PeerCopy(directory, whole)
        yield store
        if store.is_whole:
            remove_tree(directory / FOLDER)


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Returns the manifest of all boxes' experts together. Raises StoreError if the manifests are of several models."""
    first = manifests[0]
    for other in manifests[1:]:
        if _bare(other) != _bare(first):
            raise StoreError(
                f"the boxes' stores of {first.name} are laid out differently; pull from boxes that are alike"
            )
    layers = []
    for several in zip(*(manifest.layers for manifest in manifests), strict=True):
        entries = {entry.expert: entry for layer in several for entry in layer.experts}
        layers.append(msgspec.structs.replace(several[0], experts=tuple(entries[key] for key in sorted(entries))))
    return msgspec.structs.replace(first, layers=tuple(layers))


def check_manifest(whole: Manifest) -> None:
    """Raises StoreError for a manifest of other boxes that cannot be, or is not of the model whose digest it names."""
    name = f"what boxes list of {whole.name}"
    if whole.dense.file != DENSE or any(copied.file not in COPIED_FILES for copied in whole.files):
        raise StoreError(f"{name} has files that no store has")
    if whole.tables:
        raise StoreError(f"{whole.name} has tables of rows, which boxes do not hand over; pull it from its source")
    spec = spec_of(whole)
    if len(whole.layers) != spec.geometry.layers:
        raise StoreError(f"{name} has {len(whole.layers)} layers of experts, not {spec.geometry.layers}")
    for number, layer in enumerate(whole.layers):
        ends = [entry.offset + padded(entry.bytes) for entry in layer.experts]
        if layer.file != layer_file(number) or max(ends, default=0) > layer.bytes:
            raise StoreError(f"{name} has an impossible layer {number}")
    digests = [whole.dense.xxh3_128, *(entry.xxh3_128 for layer in whole.layers for entry in layer.experts)]
    if (
        not count_unlisted(whole)
        and content_digest(whole.config, whole.dtype, whole.encodings, digests) != whole.digest
    ):
        raise StoreError(f"{name} is not the model {whole.digest[:12]} that they name")


def count_unlisted(whole: Manifest) -> int:
    """Returns how many of the model's experts are not listed."""
    geometry = spec_of(whole).geometry
    return sum(geometry.experts_of(number) - len(layer.experts) for number, layer in enumerate(whole.layers))


def _bare(manifest: Manifest) -> tuple[object, ...]:
    """Returns the parts that are the same in all manifests of one model: all but the list of experts."""
    layers = tuple((layer.file, layer.bytes, layer.header, layer.encoding) for layer in manifest.layers)
    return manifest.digest, manifest.config, manifest.dtype, manifest.dense, manifest.files, layers


READS = 4  # at once


class _Place(NamedTuple):
    """The file and offset of a piece."""

    file: str
    offset: int
    bytes: int


class StorePieces:
    """The pieces of one store. Used on one event loop; reads pass by the page cache where they can."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._found: tuple[Manifest, dict[str, _Place]] | None = None  # a manifest, and the places of its pieces
        self._turns = asyncio.Semaphore(READS)

    def grow(self, manifest: Manifest) -> None:
        """Serves this larger manifest of the same store from now on."""
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
    """Returns the offset of a file's tensors; 0 if it is not here."""
    try:
        with PageFile(directory / entry.file, direct=False) as file:
            return min(header_bytes(file), entry.bytes)
    except (OSError, EOFError):
        return 0
