"""Copies tensors from a checkpoint into a file of the store: in blocks, off the page cache, all or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgemoe.errors import CheckpointError
from edgemoe.experts.files import BLOCK_BYTES, Checksum, sync_directory
from edgemoe.pack.layout import NO_DIGEST, FilePlan, Piece, Run


class _Span(NamedTuple):
    """At most a block of a piece; `run` counts the file's runs."""

    run: int
    piece: Piece
    offset: int
    bytes: int


def write_file(plan: FilePlan, directory: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
    """Writes one weight file of the store and returns its runs' checksums, which its header holds too.

    The file gets its name when it is whole and on disk. `advance` is told of bytes written. Raises CheckpointError.
    """
    digests = [Checksum() for _ in plan.runs]
    with _Output(directory / plan.file) as output, _Source() as source:
        output.write(plan.header([NO_DIGEST] * len(plan.runs)))
        ends = [start + run.bytes for start, run in zip(plan.offsets(), plan.runs, strict=True)]
        for index, block in source.read(plan.runs):
            digests[index].update(block)
            output.write(block)
            if output.position == ends[index]:
                output.write(bytes(plan.runs[index].padding))
            advance(len(block))
        found = tuple(digest.hexdigest() for digest in digests)
        output.finish(plan.header(found))
    return found


def copy_file(source: Path, target: Path) -> str:
    """Copies a small file as durably as the weights; returns its checksum."""
    digest = Checksum()
    with _Output(target) as output, source.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            output.write(block)
        output.finish(b"")
    return digest.hexdigest()


def to_bfloat16(halves: npt.NDArray[np.float16]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even."""
    bits = halves.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(halves), bits >> 16, rounded).astype(np.uint16)


class _Output:
    """A file under a temporary name; `finish` puts it in place, leaving without it removes it."""

    def __init__(self, path: Path) -> None:
        self.position = 0
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        os.close(self._fd)
        self._temporary.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self.position += written
            view = view[written:]
        # starts writing what is dirty and drops what is on disk
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self, header: bytes) -> None:
        """Puts the final header in the first one's place and the file where it belongs."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.write(header)
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._temporary.replace(self._path)
        sync_directory(self._path.parent)


class _Source:
    """Reads a checkpoint's tensors one block ahead of whoever consumes them."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
        self._reader = ThreadPoolExecutor(1, "pack-reader")

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._reader.shutdown(cancel_futures=True)
        for fd in self._fds.values():
            os.close(fd)

    def read(self, runs: Sequence[Run]) -> Iterator[tuple[int, memoryview]]:
        """The runs' bytes in order, as the store has them, with the run's index; a block is valid until the next."""
        pending: Future[tuple[int, memoryview]] | None = None
        for count, span in enumerate(_spans(runs)):
            following = self._reader.submit(self._read_span, span, self._buffers[count % 2][: span.bytes])
            if pending:
                yield pending.result()  # while the other buffer is being filled
            pending = following
        if pending:
            yield pending.result()

    def _read_span(self, span: _Span, into: memoryview) -> tuple[int, memoryview]:
        tensor = span.piece.tensor
        fd = self._open(tensor.file)
        done = 0
        while done < span.bytes:
            try:
                got = os.preadv(fd, [into[done:]], span.offset + done)
            except OSError as error:
                raise CheckpointError(f"{tensor.file} cannot be read: {error.strerror}") from error
            if not got:
                raise CheckpointError(f"{tensor.file} was cut short while it was read, within tensor {tensor.name}")
            done += got
        os.posix_fadvise(fd, span.offset, span.bytes, os.POSIX_FADV_DONTNEED)
        if tensor.dtype == "F16":
            into.cast("B")[:] = to_bfloat16(np.frombuffer(into, np.float16)).data.cast("B")
        return span.run, into

    def _open(self, path: Path) -> int:
        if path not in self._fds:
            self._fds[path] = os.open(path, os.O_RDONLY)
            os.posix_fadvise(self._fds[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._fds[path]


def _spans(runs: Sequence[Run]) -> Iterator[_Span]:
    for index, run in enumerate(runs):
        for piece in run.pieces:
            for at in range(0, piece.bytes, BLOCK_BYTES):
                yield _Span(index, piece, piece.offset + at, min(BLOCK_BYTES, piece.bytes - at))
