"""Records what the gates chose at each step, in compressed files that are bounded and rotated.

Recordings hold what users wrote: files are 0600, the oldest are deleted first, and recording is off unless it is
configured.
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
from typing import BinaryIO

import msgspec
import numpy as np

from edgemoe.config.settings import RecordSettings
from edgemoe.errors import StoreError
from edgemoe.telemetry.recording import AHEAD, LENGTH, MAGIC, SUFFIX, Header, RoutingBlock
from edgemoe.types.routing import StepRouting

log = logging.getLogger(__name__)

BLOCK_STEPS = 1024  # steps per block; waking the writer costs the compute thread half a millisecond
BLOCK_BYTES = 8 << 20  # of one block, if that is reached first
WAITING_BYTES = 64 << 20  # that may wait for the writer; beyond it steps are dropped and counted
FLUSH_S = 5.0  # longest that a step waits for its block to fill


class Filling:
    """Collects the steps of one block."""

    def __init__(self, header: Header, tokens: int, hinted: int) -> None:
        """Allocates room for `tokens` tokens, and for the hints of `hinted` of them."""
        self.requests: list[tuple[str, ...]] = []
        self._rows = self._tokens = 0
        self._query_lens, self._decode = np.empty(tokens, np.int64), np.empty(tokens, np.bool_)
        self._conversations = np.empty(tokens, np.int64)
        self._inputs, self._positions = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
        self._ids = np.empty((header.layers, tokens, header.top_k), np.int16)
        self._weights = np.empty((header.layers, tokens, header.top_k), np.float32)
        self._keeps_hints, self._hinted, self._hint_tokens = header.hints, list[bool](), 0
        self._hints = np.empty((header.layers, hinted, header.experts), np.float16)

    @property
    def bytes(self) -> int:
        """Returns the memory that its arrays take, full or not."""
        rows = self._query_lens, self._decode, self._conversations
        tokens = self._inputs, self._positions, self._ids, self._weights, self._hints
        return sum(column.nbytes for column in (*rows, *tokens))

    def fits(self, step: StepRouting) -> bool:
        """Returns whether there is room for the step."""
        rows, tokens = self._rows + len(step.meta.requests), self._tokens + len(step.meta.tokens)
        hinted = self._hint_tokens + hinted_tokens(step)
        hints_fit = not self._keeps_hints or hinted <= self._hints.shape[1]
        return len(self.requests) < BLOCK_STEPS and max(rows, tokens) <= len(self._inputs) and hints_fit

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
        if self._keeps_hints:
            hints = step.hints.get(AHEAD)
            self._hinted.append(hints is not None)
            if hints is not None:
                after = self._hint_tokens + hints.shape[1]
                self._hints[:, self._hint_tokens : after] = hints
                self._hint_tokens = after

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
            hinted=np.array(self._hinted, np.bool_).tobytes(),
            hints=self._hints[:, : self._hint_tokens].astype("<f2").tobytes(),
        )


def hinted_tokens(step: StepRouting) -> int:
    """Counts the tokens of the step that have hints: all or none."""
    return len(step.meta.tokens) if AHEAD in step.hints else 0


class Recorder:
    """Owns the newest file and the thread that writes it. `add` never waits; `close` writes what is left."""

    def __init__(self, settings: RecordSettings, header: Header) -> None:
        """Opens a file and starts the thread. Raises StoreError where the directory cannot be written."""
        self.dropped = 0  # steps lost because the writer was too slow
        self._settings, self._header = settings, header
        self._directory = Path(settings.dir)
        self._encode = msgspec.msgpack.Encoder().encode
        self._file: BinaryIO | None = None
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise StoreError(f"cannot record to record.dir {self._directory}: {error.strerror}") from error
        block_bytes = min(BLOCK_BYTES, settings.file_bytes)
        token_bytes = header.layers * (6 * header.top_k + 2 * header.experts * header.hints) + 33
        self._room = max(1, block_bytes // token_bytes)  # tokens
        self._filling = self._empty()
        self._full: deque[Filling] = deque()
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

    def _empty(self, tokens: int = 0, hinted: int = 0) -> Filling:
        """Returns a block with room for the usual number of tokens, at least so many."""
        return Filling(self._header, max(self._room, tokens), max(self._room, hinted) if self._header.hints else 0)

    def _begin_block(self, step: StepRouting) -> bool:
        """Hands the current block to the writer and begins one with room for the step.

        Returns False, and does neither, where too many bytes wait for the writer.
        """
        if sum(filled.bytes for filled in (*self._full, self._filling)) > WAITING_BYTES:
            return False
        if self._filling.requests:
            self._full.append(self._filling)
            self._wake.notify()
        self._filling = self._empty(len(step.meta.tokens), hinted_tokens(step))
        return True

    def close(self) -> None:
        """Writes what is left and ends the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(10.0)

    # --- the writer's thread

    def _run(self) -> None:
        try:
            while (filled := self._take()) is not None:
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

    def _put(self, filled: Filling) -> None:
        self._write(filled.block())

    def _take(self) -> Filling | None:
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
        if len(block) > self._settings.file_bytes:
            self._make_room(len(block))
        if self._file.tell() + len(block) > self._settings.file_bytes and self._file.tell() > len(MAGIC) + 512:
            self._file.close()
            self._open()
        self._file.write(LENGTH.pack(len(block)) + block)
        self._file.flush()

    def _open(self) -> None:
        """Opens a new file, after making room for it. File names sort by age."""
        self._make_room(self._settings.file_bytes)
        name = f"{time.time_ns():020d}{SUFFIX}"
        descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        block = zlib.compress(self._encode(self._header), 1)
        self._file.write(MAGIC + LENGTH.pack(len(block)) + block)
        self._file.flush()

    def _make_room(self, more_bytes: int) -> None:
        """Deletes the oldest files, except the open one, until `more_bytes` fit."""
        files = sorted(self._directory.glob(f"*{SUFFIX}"))
        sizes = [file.stat().st_size for file in files]
        kept = 0 if self._file is None or self._file.closed else 1
        while len(files) > kept and sum(sizes) + more_bytes > self._settings.max_bytes:
            with contextlib.suppress(FileNotFoundError):
                files[0].unlink()
            del files[0], sizes[0]
