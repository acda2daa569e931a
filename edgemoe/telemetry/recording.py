"""Recordings of routing: the format of their files, and how they are read.

A file is MAGIC, then blocks: four bytes of length (little-endian) and a zlib stream of that length, which holds a
MessagePack array. The first block of a file is a `Header`, each other one is a `RoutingBlock`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np

from edgemoe.errors import StoreError
from edgemoe.types.routing import StepMeta, StepRouting

MAGIC = b"EDGEMOE\x02"
SUFFIX = ".routes"
AHEAD = 1  # layer: the distance of the hints that are recorded
MAX_BLOCK = 256 << 20  # decompressed bytes of one block that a reader accepts
LENGTH = struct.Struct("<I")
T = TypeVar("T")


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The model that a file's steps were recorded from."""

    digest: str  # of the model
    layers: int
    experts: int
    top_k: int
    hints: bool = False  # steps that only decode hold what each gate said a layer early


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


def read_recording(path: Path) -> tuple[Header, Iterator[StepRouting]]:
    """Returns a recording's header and its steps in order. Raises StoreError.

    A file that a crash cut short ends with its last complete block.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise StoreError(f"{path} is no recording of routing, or of a later version")
        header = _decode(path, _block(path, file), Header)
    if min(header.layers, header.experts, header.top_k) < 1 or header.top_k > header.experts:
        raise StoreError(f"{path} is damaged: {header}")
    return header, _steps(path, header)


def _steps(path: Path, header: Header) -> Iterator[StepRouting]:
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        _block(path, file)
        while block := _block(path, file):
            yield from _unpack(path, header, _decode(path, block, RoutingBlock))


def _block(path: Path, file: BinaryIO) -> bytes:
    """Returns the next block, decompressed; empty at the end, or where the last one is incomplete."""
    prefix = file.read(LENGTH.size)
    if len(prefix) < LENGTH.size:
        return b""
    length = LENGTH.unpack(prefix)[0]
    data = file.read(length)
    if len(data) < length:
        return b""
    try:
        stream = zlib.decompressobj()
        whole = stream.decompress(data, MAX_BLOCK)
    except zlib.error as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    if not stream.eof:
        raise StoreError(f"{path} is damaged: a block is larger than {MAX_BLOCK} bytes, or cut short")
    return whole


def _decode(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise StoreError(f"{path} is damaged: {error}") from error


def _unpack(path: Path, header: Header, block: RoutingBlock) -> Iterator[StepRouting]:
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
        hinted = np.frombuffer(block.hinted or bytes(len(block.requests)), np.bool_)
        hints = np.frombuffer(block.hints, "<f2").reshape(header.layers, -1, header.experts)
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    sizes = sum(map(len, block.requests)), len(query_lens), len(decode), len(conversations) or len(decode)
    inside = not ids.size or (ids.min() >= 0 and ids.max() < header.experts)
    lens_fit = not query_lens.size or (query_lens.min() >= 0 and query_lens.sum() == len(tokens))
    fits = len(set(sizes)) == 1 and lens_fit and len(positions) == len(tokens) and len(hinted) == len(block.requests)
    if not fits or not inside:
        raise StoreError(f"{path} is damaged: the parts of a block do not fit together")
    row = token = hint = 0
    for requests, has_hints in zip(block.requests, hinted.tolist(), strict=True):
        rows = slice(row, row + len(requests))
        at = slice(token, token + int(query_lens[rows].sum()))
        mine = slice(hint, hint + (at.stop - at.start) * has_hints)
        if mine.stop > hints.shape[1]:
            raise StoreError(f"{path} is damaged: a block lacks hints of its steps")
        yield StepRouting(
            meta=StepMeta(requests, query_lens[rows], decode[rows], tokens[at], positions[at], conversations[rows]),
            ids=ids[:, at],
            weights=weights[:, at],
            hints={AHEAD: hints[:, mine].astype(np.float32)} if has_hints else {},
            step_s=0.0,
            stall_s=0.0,
        )
        row, token, hint = rows.stop, at.stop, mine.stop
