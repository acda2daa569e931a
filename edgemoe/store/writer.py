"""Writes a file of the store from a checkpoint's tensors: in blocks, off the page cache, all or nothing."""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.durable import NewFile
from edgemoe.encodings.bfloat import from_bf16
from edgemoe.errors import CheckpointError
from edgemoe.store.checkpoint import CheckpointTensor
from edgemoe.store.files import (
    BLOCK_BYTES,
    SEAL_BYTES,
    BlockChecksum,
    Buffer,
    PageFile,
    blocks,
    open_direct,
    page_memory,
    range_checksum,
    row_seal,
)
from edgemoe.store.layout import NO_DIGEST, FilePlan
from edgemoe.store.pieces import ByteRun, FilePiece
from edgemoe.store.sources import EXPONENTS, EncodedRows, not_finite
from edgemoe.types.experts import PAGE_BYTES, padded

NO_NUMBER = 255  # as an exponent
EXPONENT_BITS = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}
log = logging.getLogger(__name__)
AHEAD = 4  # blocks read, or encoded, before they are wanted


class _Span(NamedTuple):
    """At most a block of a copy, or a whole transformation; `run` counts the file's runs."""

    run: int
    piece: FilePiece
    offset: int
    bytes: int


def write_file(plan: FilePlan, directory: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
    """Writes one weight file of the store and returns its runs' checksums, which its header holds too.

    The file gets its name when it is whole and on disk. `advance` is told of bytes written. Raises CheckpointError.
    """
    digests = [BlockChecksum() for _ in plan.runs]
    with _Output(directory / plan.file) as output, CheckpointReader(finite=plan.finite) as source:
        output.write(plan.header([NO_DIGEST] * len(plan.runs)))
        ends = [start + plan.stored_bytes(run) for start, run in zip(plan.offsets(), plan.runs, strict=True)]
        sealer = RowSealer(plan.row_bytes) if plan.row_bytes else None
        for index, block in source.read(plan.runs):
            stored = block if sealer is None else sealer.sealed(block)
            digests[index].update(stored)
            output.write(stored)
            if output.position == ends[index]:
                output.write(bytes(plan.runs[index].padding))
            advance(len(block))
        found = tuple(digest.hexdigest() for digest in digests)
        output.finish(plan.header(found))
    return found


def check_scales(plans: Iterable[FilePlan]) -> None:
    """Reads the exponents that files will be made of. Raises CheckpointError where one stands for no number.

    Logs how many scales in bfloat16 an encoding rounds, whose own are float16.
    """
    runs = [run for plan in plans for run in plan.runs]
    pieces = [piece for run in runs for piece in run.pieces if isinstance(piece, EncodedRows)]
    scales = {piece.source.scales for piece in pieces}
    with CheckpointReader() as reader:
        _tell_rounded(pieces, reader)
        for tensor in sorted((each for each in scales if each is not None), key=lambda each: each.name):
            for block in blocks(tensor.bytes) if tensor.dtype in EXPONENTS else ():
                if (reader.stretch(tensor, block.start, block.stop - block.start) == NO_NUMBER).any():
                    raise CheckpointError(f"{tensor.file}: {tensor.name} has a scale that is no number (E8M0 255)")


def _tell_rounded(pieces: Iterable[EncodedRows], reader: CheckpointReader) -> None:
    narrow = {
        tensor
        for piece in pieces
        if piece.encoding.is_affine and piece.source.keeps(piece.encoding)
        for tensor in piece.source.factors
        if tensor.dtype == "BF16"
    }
    rounded = count = 0
    for tensor in sorted(narrow, key=lambda each: (each.file, each.offset)):
        values = from_bf16(reader.stretch(tensor, 0, tensor.bytes).view(np.uint16))
        with np.errstate(over="ignore"):
            rounded += int((values.astype(np.float16).astype(np.float32) != values).sum())
        count += values.size
    if rounded:
        log.warning("%d of %d scales in bfloat16 are no numbers of float16, and are rounded", rounded, count)


def intact(store: Path, file: FilePlan, *, thorough: bool) -> tuple[str, ...] | None:
    """Returns the checksums in the header of a file that is there and whole; `thorough` compares them to the bytes."""
    path = store / file.file
    if not path.is_file() or path.stat().st_size != file.bytes:
        return None
    with PageFile(path) as opened:
        header = bytearray(file.header_bytes)
        opened.fill(memoryview(header), len(header), 0)
        start = header.find(b'"xxh3_128":"') + len(b'"xxh3_128":"')
        found = header[start : header.find(b'"', start)].decode("ascii", "replace").split(" ")
        if len(found) != len(file.runs) or file.header(found) != header:
            return None
        for run, offset, digest in zip(file.runs, file.offsets(), found, strict=True):
            if thorough and range_checksum(opened, offset, file.stored_bytes(run)) != digest:
                log.warning("%s is damaged and will be written anew", path)
                return None
    return tuple(found)


class RowSealer:
    """Puts a checksum behind each row of a table whose bytes come in blocks."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes, self._number, self._rest = row_bytes, 0, b""

    def sealed(self, block: Buffer) -> bytes:
        """Returns the rows that end in this block, sealed; the rest of it waits for the next."""
        data = self._rest + bytes(block)
        count = len(data) // self._row_bytes
        cuts = range(0, count * self._row_bytes, self._row_bytes)
        rows = (memoryview(data)[at : at + self._row_bytes] for at in cuts)
        sealed = [
            part
            for number, row in enumerate(rows, start=self._number)
            for part in (row, row_seal(row, number).to_bytes(SEAL_BYTES, "little"))
        ]
        self._number, self._rest = self._number + count, data[count * self._row_bytes :]
        return b"".join(sealed)


def copy_file(source: Path, target: Path) -> str:
    """Copies a small file as durably as the weights; returns its checksum."""
    digest = BlockChecksum()
    with _Output(target) as output, source.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            output.write(block)
        output.finish(b"")
    return digest.hexdigest()


def to_bfloat16(halves: npt.NDArray[np.float16]) -> npt.NDArray[np.uint16]:
    """Returns the bits of the nearest bfloat16, ties to even."""
    bits = halves.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(halves), (bits >> 16) | 0x40, rounded).astype(np.uint16)


class _Output:
    """A file under a temporary name; `finish` puts it in place, leaving without it removes it."""

    def __init__(self, path: Path) -> None:
        self.position = 0
        self._file = NewFile(path, 0o644)
        self._fd = self._file.fd
        self._direct = open_direct(Path(f"/proc/self/fd/{self._fd}"), os.O_WRONLY)
        self._pages = page_memory(BLOCK_BYTES)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._direct is not None:
            os.close(self._direct)
        self._file.__exit__(None, None, None)

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        while view:
            filled = self.position % BLOCK_BYTES
            part = view[: BLOCK_BYTES - filled]
            self._pages[filled : filled + len(part)] = part
            self.position += len(part)
            if filled + len(part) == BLOCK_BYTES:
                self._put(self._pages, self.position - BLOCK_BYTES)
            view = view[len(part) :]

    def finish(self, header: bytes) -> None:
        """Puts the final header in the first one's place and the file where it belongs."""
        filled = self.position % BLOCK_BYTES
        whole = filled // PAGE_BYTES * PAGE_BYTES
        self._put(self._pages[:whole], self.position - filled)
        self._put_rest(self._pages[whole:filled], self.position - filled + whole)
        self._put_rest(memoryview(header), 0)
        self._file.put_in_place()

    def _put(self, pages: memoryview, offset: int) -> None:
        """Writes whole pages past the page cache, as far as the file system has such a thing."""
        done = 0
        try:
            while self._direct is not None and done < len(pages):
                done += os.pwrite(self._direct, pages[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self._put_rest(pages[done:], offset + done)

    def _put_rest(self, view: memoryview, offset: int) -> None:
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written


class CheckpointReader:
    """Reads a checkpoint's tensors, and encodes them, ahead of the consumer."""

    def __init__(self, *, finite: bool = False) -> None:
        """Refuses weights that are not numbers or infinite, if all must be `finite`."""
        self._finite = finite
        self._files: dict[Path, PageFile] = {}
        self._opening = Lock()
        self._buffers = [page_memory(BLOCK_BYTES + PAGE_BYTES) for _ in range(1 + AHEAD)]
        self._workers = ThreadPoolExecutor(AHEAD, "pack-reader")

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._workers.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()

    def read(self, runs: Sequence[ByteRun]) -> Iterator[tuple[int, memoryview]]:
        """Yields the runs' bytes in order, as stored, with the run's index; a block is valid until the next."""
        pending: deque[Future[tuple[int, memoryview]]] = deque()
        for span, buffer in zip(_spans(runs), cycle(self._buffers), strict=False):
            if len(pending) == len(self._buffers) - 1:
                yield pending.popleft().result()
            pending.append(self._workers.submit(self._make, span, buffer))
        while pending:
            yield pending.popleft().result()

    def _make(self, span: _Span, buffer: memoryview) -> tuple[int, memoryview]:
        if isinstance(span.piece, EncodedRows):
            return span.run, span.piece.run(self.stretch, finite=self._finite).data.cast("B")
        tensor = span.piece.tensor
        block = self._read(tensor, span.offset, span.bytes, buffer)
        if self._finite and tensor.dtype in EXPONENT_BITS and _has_nonfinite(block, tensor.dtype):
            raise not_finite(tensor, tensor.name)
        if tensor.dtype == "F16":
            block[:] = to_bfloat16(np.frombuffer(block, np.float16)).data.cast("B")
        return span.run, block

    def stretch(self, tensor: CheckpointTensor, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Returns some bytes of a tensor. Raises CheckpointError."""
        room = page_memory(padded(size) + PAGE_BYTES)
        return np.frombuffer(self._read(tensor, offset, size, room), np.uint8)

    def _read(self, tensor: CheckpointTensor, offset: int, size: int, room: memoryview) -> memoryview:
        """Reads the pages that a stretch of a tensor lies in; returns the stretch."""
        start = tensor.offset + offset
        before = start % PAGE_BYTES
        try:
            self._open(tensor.file).fill(room[: padded(before + size)], before + size, start - before)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{tensor.file} cannot be read, within tensor {tensor.name}: {error}") from error
        return room[before : before + size]

    def _open(self, path: Path) -> PageFile:
        with self._opening:
            if path not in self._files:
                self._files[path] = PageFile(path)
            return self._files[path]


def _has_nonfinite(block: memoryview, dtype: str) -> bool:
    """Returns whether numbers, in their bytes, are not numbers or infinite: all bits of their exponents are set."""
    kind, mask = EXPONENT_BITS[dtype]
    return bool(((np.frombuffer(block, kind) & mask) == mask).any())


def _spans(runs: Sequence[ByteRun]) -> Iterator[_Span]:
    for index, run in enumerate(runs):
        for piece in run.pieces:
            if isinstance(piece, EncodedRows):
                yield _Span(index, piece, 0, piece.bytes)
                continue
            for block in blocks(piece.bytes):
                yield _Span(index, piece, piece.offset + block.start, block.stop - block.start)
