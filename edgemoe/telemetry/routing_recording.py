"""Recordings of routing: the format of their files, and how they are read.

A file is MAGIC, then blocks: four bytes of length (little-endian) and a zlib stream of that length, which holds a
MessagePack array. The first block of a file is a `RecordingHeader`, each other one is a `RoutingBlock`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from edgemoe.durable import open_plain
from edgemoe.errors import StoreError
from edgemoe.types.arrays import FloatArray, IntArray
from edgemoe.types.step import StepMeta, StepRouting

MAGIC = b"EDGEMOE\x02"
SUFFIX = ".routes"
AHEAD, OWN = 1, 0  # layers: the distances of the hints that are recorded; OWN are of the layer's own gate
MAX_BLOCK = 256 << 20  # decompressed bytes of one block that a reader accepts
MOST = (1 << 12, 1 << 15, 1 << 8, 1 << 20)  # layers, experts, chosen experts, width of hidden states
ZEROS = 16  # bytes at a block's end by which power loss is known
LENGTH = struct.Struct("<I")
T = TypeVar("T")


class RecordingHeader(msgspec.Struct, frozen=True, array_like=True):
    """The model that a file's steps were recorded from."""

    digest: str  # of the model
    layers: int
    experts: int
    top_k: int
    hints: bool = False  # steps that only decode hold each gate's output a layer early
    hidden: int = 0  # width of the hidden states, with gate outputs, in steps that only decode; 0: none
    bf16: bool = False  # these are bfloat16, else float32


class RoutingBlock(msgspec.Struct, frozen=True, array_like=True):
    """Several steps' `StepRouting`, with S sequences and T tokens in all; arrays are little-endian bytes."""

    requests: tuple[tuple[str, ...], ...]  # of each step
    query_lens: bytes  # [S] int32
    decode: bytes  # [S] bool
    tokens: bytes  # [T] int32
    positions: bytes  # [T] int32
    ids: bytes  # [L, T, k] int16
    weights: bytes  # [L, T, k] float16
    conversations: bytes = b""  # [S] int64; empty in older recordings
    hinted: bytes = b""  # [steps] bool, which of them have hints; empty where none has
    hints: bytes = b""  # [L, U, E] float16, of the U tokens of these steps; see `AHEAD`
    stated: bytes = b""  # [steps] bool, which of them have hidden states; empty where none has
    gates: bytes = b""  # [L, V, E] float16, of the V tokens of these steps; see `OWN`
    hidden: bytes = b""  # [L, V, H] float32, or the upper halves of such numbers; the input of each layer's experts


def recordings_in(folder: Path) -> list[Path]:
    """Returns a folder's recordings, the oldest first, without files that a crash ended within their header."""
    return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if not _is_begun_only(path)]


def _is_begun_only(path: Path) -> bool:
    """Returns whether a file ends within its header, or begins with zeros, which power loss leaves."""
    with open_plain(path) as file:
        head = file.read(len(MAGIC))
        return not head.strip(b"\0") or (MAGIC.startswith(head) and not _block(path, file))


def read_recording(path: Path) -> tuple[RecordingHeader, Iterator[StepRouting]]:
    """Returns a recording's header and its steps in order. Raises StoreError.

    A file that a crash cut short ends with its last complete block.
    """
    with open_plain(path) as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise StoreError(f"{path} is no recording of routing, or of a later version")
        header = _decode(path, _block(path, file), RecordingHeader)
    sizes = (header.layers, header.experts, header.top_k, header.hidden + 1)
    if not all(1 <= size <= most for size, most in zip(sizes, MOST, strict=True)) or header.top_k > header.experts:
        raise StoreError(f"{path} is damaged: {header}")
    return header, _steps(path, header)


def _steps(path: Path, header: RecordingHeader) -> Iterator[StepRouting]:
    with open_plain(path) as file:
        file.seek(len(MAGIC))
        _block(path, file)
        while block := _block(path, file):
            yield from _unpack(path, header, _decode(path, block, RoutingBlock))


def _block(path: Path, file: BinaryIO) -> bytes:
    """Returns the next block, decompressed; empty at the end, or where the last one is incomplete.

    Power loss may leave zeros in place of the bytes written last.
    """
    prefix = file.read(LENGTH.size)
    if len(prefix) < LENGTH.size:
        return b""
    length = LENGTH.unpack(prefix)[0]
    data = file.read(length)
    if len(data) < length:
        return b""
    stream, why = zlib.decompressobj(), f"a block is larger than {MAX_BLOCK} bytes, or cut short"
    try:
        whole = stream.decompress(data, MAX_BLOCK)
    except zlib.error as error:
        why = str(error)
    if stream.eof:
        return whole
    if _ends_in_zeros(data, file):
        return b""
    raise StoreError(f"{path} is damaged: {why}")


def _ends_in_zeros(block: bytes, file: BinaryIO) -> bool:
    """Returns whether a block ends in zeros, and nothing but zeros follows it."""
    if block[-ZEROS:].strip(b"\0"):
        return False
    while rest := file.read(1 << 20):
        if rest.strip(b"\0"):
            return False
    return True


def _decode(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise StoreError(f"{path} is damaged: {error}") from error


def _unpack(path: Path, header: RecordingHeader, block: RoutingBlock) -> Iterator[StepRouting]:
    """Yields a block's steps. Raises StoreError."""
    try:
        query_lens = np.frombuffer(block.query_lens, "<i4").astype(np.int64)
        decode = np.frombuffer(block.decode, np.bool_)
        tokens = np.frombuffer(block.tokens, "<i4").astype(np.int64)
        positions = np.frombuffer(block.positions, "<i4").astype(np.int64)
        conversations = np.frombuffer(block.conversations, "<i8").astype(np.int64)
        shape = (header.layers, len(tokens), header.top_k)
        ids = np.frombuffer(block.ids, "<i2").astype(np.int16).reshape(shape)
        weights = np.frombuffer(block.weights, "<f2").astype(np.float32).reshape(shape)
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    row_ends = np.cumsum([len(requests) for requests in block.requests], dtype=np.int64)
    sizes = row_ends[-1:].sum(), len(query_lens), len(decode), len(conversations) or len(decode)
    inside = not ids.size or (ids.min() >= 0 and ids.max() < header.experts)
    lens_fit = not query_lens.size or (query_lens.min() >= 0 and query_lens.sum() == len(tokens))
    if len(set(sizes)) > 1 or not lens_fit or len(positions) != len(tokens) or not inside:
        raise StoreError(f"{path} is damaged: the parts of a block do not fit together")
    ends = np.append(0, np.cumsum(query_lens))[row_ends]  # of each step's tokens
    try:
        extra = _extra(header, block, np.diff(ends, prepend=0))
    except ValueError as error:
        raise StoreError(f"{path} is damaged: a block's hints or hidden states do not fit its steps") from error
    for requests, row_end, end, (hints, hidden) in zip(block.requests, row_ends, ends, extra, strict=True):
        rows = slice(row_end - len(requests), row_end)
        at = slice(end - int(query_lens[rows].sum()), end)
        yield StepRouting(
            meta=StepMeta(requests, query_lens[rows], decode[rows], tokens[at], positions[at], conversations[rows]),
            ids=ids[:, at],
            weights=weights[:, at],
            hints=hints,
            step_s=0.0,
            stall_s=0.0,
            hidden=hidden,
        )


def _extra(
    header: RecordingHeader, block: RoutingBlock, counts: IntArray
) -> list[tuple[dict[int, FloatArray], FloatArray | None]]:
    """Returns the hints and hidden states of each step; `counts` are the steps' tokens. Raises ValueError."""

    def parts(rows: bytes, flags: bytes, width: int, dtype: str) -> list[npt.NDArray[Any] | None]:
        has = np.frombuffer(flags or bytes(len(counts)), np.bool_)
        ends = np.cumsum(counts * has)
        every = np.frombuffer(rows, dtype).reshape(header.layers, ends[-1:].sum(), width)
        columns = zip(has, ends, counts, strict=True)
        return [every[:, end - count : end] if one else None for one, end, count in columns]

    ahead = parts(block.hints, block.hinted, header.experts, "<f2")
    own = parts(block.gates, block.stated, header.experts, "<f2")
    hidden = parts(block.hidden, block.stated, header.hidden, "<u2" if header.bf16 else "<f4")
    found = []
    for hint, gate, state in zip(ahead, own, hidden, strict=True):
        said = {AHEAD: hint, OWN: gate}
        hints = {distance: rows.astype(np.float32) for distance, rows in said.items() if rows is not None}
        found.append((hints, None if state is None else _float32(state)))
    return found


def upper_halves(numbers: FloatArray) -> npt.NDArray[np.uint16]:
    """Returns the bits of bfloat16 numbers that are here as float32."""
    return (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _float32(numbers: npt.NDArray[Any]) -> FloatArray:
    """Returns the numbers, of which 16 bits are upper halves."""
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return numbers.astype(np.float32)
