"""Records the routing of each step, in compressed files that are bounded and rotated.

Recordings hold users' texts: files are 0600, the oldest are deleted first, and recording is off unless configured.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from edgemoe.config.settings import RecordSettings
from edgemoe.durable import create_file, make_folder, remove_file
from edgemoe.errors import StoreError
from edgemoe.telemetry.routing_recording import (
    AHEAD,
    LENGTH,
    MAGIC,
    OWN,
    SUFFIX,
    RecordingHeader,
    RoutingBlock,
    upper_halves,
)
from edgemoe.types.arrays import FloatArray
from edgemoe.types.step import StepRouting

log = logging.getLogger(__name__)

BLOCK_STEPS = 1024  # steps per block; waking the writer costs the compute thread half a millisecond
BLOCK_BYTES = 8 << 20  # of one block, if that is reached first
FILE_BYTES = 64 << 20  # of one file; the oldest go first
WAITING_BYTES = 64 << 20  # that may wait for the writer; beyond it steps are dropped and counted
FLUSH_S = 5.0  # longest that a step waits for its block to fill


class ExtraRows:
    """Collects rows that only some steps have, [L, U, width] of their U tokens."""

    def __init__(self, layers: int, tokens: int, width: int, dtype: npt.DTypeLike) -> None:
        """Allocates room for `tokens` tokens. Rows of uint16 are the upper halves of float32."""
        self.has: list[bool] = []  # of each step
        self.rows: npt.NDArray[Any] = np.empty((layers, tokens, width), dtype)
        self._tokens = 0

    def fits(self, rows: FloatArray | None) -> bool:
        """Returns whether there is room for a step's rows."""
        return rows is None or self._tokens + rows.shape[1] <= self.rows.shape[1]

    def add(self, rows: FloatArray | None) -> None:
        """Copies a step's rows [L, T, width], if it has any."""
        self.has.append(rows is not None)
        if rows is not None:
            after = self._tokens + rows.shape[1]
            halved = self.rows.dtype == np.uint16
            self.rows[:, self._tokens : after] = upper_halves(rows) if halved else rows
            self._tokens = after

    @property
    def filled(self) -> npt.NDArray[Any]:
        return self.rows[:, : self._tokens]


class BlockBuffer:
    """Collects the steps of one block."""

    def __init__(self, header: RecordingHeader, tokens: int, extra: int) -> None:
        """Allocates room for `tokens` tokens, and for hints and hidden states of `extra` of them."""
        self.requests: list[tuple[str, ...]] = []
        self._rows = self._tokens = 0
        self._query_lens, self._decode = np.empty(tokens, np.int64), np.empty(tokens, np.bool_)
        self._conversations = np.empty(tokens, np.int64)
        self._inputs, self._positions = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
        self._ids = np.empty((header.layers, tokens, header.top_k), np.int16)
        self._weights = np.empty((header.layers, tokens, header.top_k), np.float32)
        layers, experts, hidden = header.layers, header.experts, header.hidden
        self._extra: dict[str, ExtraRows] = {}
        if header.hints:
            self._extra["hints"] = ExtraRows(layers, extra, experts, "<f2")
        if hidden:
            self._extra["gates"] = ExtraRows(layers, extra, experts, "<f2")
            self._extra["hidden"] = ExtraRows(layers, extra, hidden, "<u2" if header.bf16 else "<f4")

    @property
    def bytes(self) -> int:
        """Returns the memory that its arrays take, full or not."""
        rows = self._query_lens, self._decode, self._conversations
        tokens = self._inputs, self._positions, self._ids, self._weights
        extra = (each.rows for each in self._extra.values())
        return sum(column.nbytes for column in (*rows, *tokens, *extra))

    def fits(self, step: StepRouting) -> bool:
        """Returns whether there is room for the step."""
        rows, tokens = self._rows + len(step.meta.requests), self._tokens + len(step.meta.tokens)
        more = extra_rows(step) if self._extra else {}
        extra_fit = all(extra.fits(more[name]) for name, extra in self._extra.items())
        return len(self.requests) < BLOCK_STEPS and max(rows, tokens) <= len(self._inputs) and extra_fit

    def add(self, step: StepRouting) -> None:
        """Copies the step, on the compute thread: keeping it for another thread to convert would cost more there."""
        meta = step.meta
        self.requests.append(meta.requests)
        rows = slice(self._rows, self._rows + len(meta.requests))
        self._query_lens[rows], self._decode[rows] = meta.query_lens, meta.decode
        self._conversations[rows] = meta.conversations if len(meta.conversations) else 0
        at = slice(self._tokens, self._tokens + len(meta.tokens))
        self._inputs[at], self._positions[at] = meta.tokens, meta.positions
        self._ids[:, at], self._weights[:, at] = step.ids, step.weights
        self._rows, self._tokens = rows.stop, at.stop
        more = extra_rows(step) if self._extra else {}
        for name, extra in self._extra.items():
            extra.add(more[name])

    def block(self) -> RoutingBlock:
        """Returns the block of the steps copied so far."""
        return RoutingBlock(
            requests=tuple(self.requests),
            query_lens=self._query_lens[: self._rows].astype("<i4").tobytes(),
            decode=self._decode[: self._rows].tobytes(),
            tokens=self._inputs[: self._tokens].astype("<i4").tobytes(),
            positions=self._positions[: self._tokens].astype("<i4").tobytes(),
            ids=self._ids[:, : self._tokens].astype("<i2").tobytes(),
            weights=self._weights[:, : self._tokens].astype("<f2").tobytes(),
            conversations=self._conversations[: self._rows].astype("<i8").tobytes(),
            hinted=flags_of(self._extra.get("hints")),
            stated=flags_of(self._extra.get("hidden")),
            **{name: extra.filled.tobytes() for name, extra in self._extra.items()},
        )


def flags_of(extra: ExtraRows | None) -> bytes:
    """Returns a flag for each step that has such rows, as bytes of the file."""
    return b"" if extra is None else np.array(extra.has, np.bool_).tobytes()


def extra_rows(step: StepRouting) -> dict[str, FloatArray | None]:
    """Returns the rows that only some steps have, by their names in `RoutingBlock`."""
    return {"hints": step.hints.get(AHEAD), "gates": step.hints.get(OWN), "hidden": step.hidden}


class Recorder:
    """Owns the newest file and the thread that writes it. `add` never waits; `close` writes the last block."""

    def __init__(self, settings: RecordSettings, header: RecordingHeader, file_bytes: int = FILE_BYTES) -> None:
        """Opens a file and starts the thread. Raises StoreError where the directory cannot be written."""
        self.dropped = 0  # steps lost because the writer was too slow
        self._settings, self._header = settings, header
        self._file_bytes = min(file_bytes, settings.max_bytes)
        self._directory = Path(settings.dir)
        self._encode = msgspec.msgpack.Encoder().encode
        self._file: BinaryIO | None = None
        try:
            make_folder(self._directory, 0o700)
            self._open()
        except OSError as error:
            raise StoreError(f"cannot record to record.dir {self._directory}: {error.strerror}") from error
        block_bytes = min(BLOCK_BYTES, self._file_bytes)
        said = 2 * header.experts * (header.hints + (header.hidden > 0))  # bytes a token and layer
        self._extra_bytes = header.layers * (said + (2 if header.bf16 else 4) * header.hidden)
        token_bytes = header.layers * 6 * header.top_k + 33 + self._extra_bytes
        self._room = max(1, block_bytes // token_bytes)  # tokens
        self._filling = self._empty()
        self._full: deque[BlockBuffer] = deque()
        self._lock, self._closed = threading.Lock(), False
        self._wake = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def add(self, step: StepRouting) -> None:
        """Records one step, or counts it as dropped. May be called from any thread."""
        with self._lock:
            if self._closed or not (self._filling.fits(step) or self._begin_block(step)):
                self.dropped += 1
                return
            self._filling.add(step)

    def _empty(self, tokens: int = 0, extra: int = 0) -> BlockBuffer:
        """Returns an empty block with room for the usual number of tokens, or for `tokens` if that is more."""
        return BlockBuffer(self._header, max(self._room, tokens), max(self._room, extra))

    def _begin_block(self, step: StepRouting) -> bool:
        """Hands the current block to the writer and begins one with room for the step.

        Returns False, and does neither, where too many bytes wait for the writer, or the step has too many by itself.
        """
        extra = max((rows.shape[1] for rows in extra_rows(step).values() if rows is not None), default=0)
        waiting_bytes = sum(filled.bytes for filled in (*self._full, self._filling))
        if max(waiting_bytes, extra * self._extra_bytes) > WAITING_BYTES:
            return False
        if self._filling.requests:
            self._full.append(self._filling)
            self._wake.notify()
        self._filling = self._empty(len(step.meta.tokens), extra)
        return True

    def close(self) -> None:
        """Writes the last block and ends the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(10.0)

    # --- the writer's thread

    def _run(self) -> None:
        try:
            while (filled := self._next_block()) is not None:
                if filled.requests:
                    self._put(filled)
        except OSError as error:
            log.error(f"recording to {self._directory} stopped: {error}")
            with self._wake:
                self._closed = True
                self._full.clear()
        finally:
            if self._file is not None:
                self._file.close()

    def _put(self, filled: BlockBuffer) -> None:
        self._write(filled.block())

    def _next_block(self) -> BlockBuffer | None:
        """Returns the next block, full or not; None after `close`."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._full, FLUSH_S)
            if self._full:
                return self._full.popleft()
            filled = self._filling
            if not filled.requests:
                return None if self._closed else filled
            self._filling = self._empty()
            return filled

    def _write(self, steps: RoutingBlock) -> None:
        block = zlib.compress(self._encode(steps), 1)
        assert self._file is not None
        if len(block) > self._file_bytes:
            self._make_room(len(block))
        if self._file.tell() + len(block) > self._file_bytes and self._file.tell() > len(MAGIC) + 512:
            self._file.close()
            self._open()
        self._file.write(LENGTH.pack(len(block)) + block)
        self._file.flush()

    def _open(self) -> None:
        """Opens a new file, after making room for it. File names sort by age."""
        self._make_room(self._file_bytes)
        name = f"{time.time_ns():020d}{SUFFIX}"
        self._file = os.fdopen(create_file(self._directory / name), "wb")
        block = zlib.compress(self._encode(self._header), 1)
        try:
            self._file.write(MAGIC + LENGTH.pack(len(block)) + block)
            self._file.flush()
        except OSError:
            remove_file(self._directory / name, missing_ok=True)
            raise

    def _make_room(self, more_bytes: int) -> None:
        """Deletes the oldest files, except the open one, until `more_bytes` fit."""
        sizes = dict[Path, int]()
        for file in sorted(self._directory.glob(f"*{SUFFIX}")):
            with contextlib.suppress(FileNotFoundError):  # somebody has just deleted it
                sizes[file] = file.stat().st_size
        kept = 0 if self._file is None or self._file.closed else 1
        while len(sizes) > kept and sum(sizes.values()) + more_bytes > self._settings.max_bytes:
            remove_file(oldest := next(iter(sizes)), missing_ok=True)
            del sizes[oldest]
