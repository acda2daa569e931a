"""Keeps the prefix cache on disk: saves the blocks of requests that have ended, restores them for later prompts.

A prompt whose blocks are on disk waits until they are in memory. The engine then finds them in its prefix cache. It
computes blocks that are missing or damaged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, islice, takewhile

import msgspec
import numpy as np

from edgemoe.engine.engine import Engine
from edgemoe.helper.turns import TaskTurns
from edgemoe.ipc.messages import Submit
from edgemoe.telemetry import metrics as names
from edgemoe.types.request import Emission
from edgemoe.types.step import BLOCK_TOKENS, EntryKind
from edgemoe.worker.prefix_files import ByteArray, EntryName, PrefixFiles

log = logging.getLogger(__name__)

LEAST_BLOCKS = 8  # to save or to restore: fewer are computed as fast
RESTORES_AT_ONCE, MOST_WAITING = 2, 64
MOST_UNSAVED = 64  # requests that have ended; more are not saved
SAVED_STATES = 2  # of a request, the last ones: at the end of its prompt and at the end of its answer
BATCH_BYTES = 32 << 20  # of blocks that are stored between two steps, while the next ones are read
READERS = 4  # threads: a fast disk wants several reads at once
PLACE_BYTES = 64  # that each block begins at a multiple of, in memory
RESTORE_S = 60.0  # after which a prompt goes on without the rest, its turn included
STEP_S = 30.0  # that a batch waits for the end of a step


@dataclass(slots=True)
class _Running:
    """The tokens of a request that runs."""

    attempt: int
    salt: bytes
    prompt_tokens: int
    tokens: list[int]


@dataclass(slots=True)
class DiskFigures:
    """Counts for /metrics."""

    saved_bytes: int = 0
    restored_tokens: int = 0
    restore_seconds: float = 0.0
    failures: int = 0


class DiskPrefixes:
    """Passes requests to `submit`. A request whose blocks are on disk is passed on after they are restored."""

    def __init__(self, engine: Engine, files: PrefixFiles, submit: Callable[[Submit], None]) -> None:
        self._engine, self._files, self._submit = engine, files, submit
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, _Running] = {}
        self._ended: asyncio.Queue[_Running] = asyncio.Queue(MOST_UNSAVED)
        self._turns = TaskTurns(RESTORES_AT_ONCE, each=1)
        self._readers = ThreadPoolExecutor(READERS, "kv-read")
        self._tasks: asyncio.TaskGroup | None = None  # while `run` runs
        self.figures = DiskFigures()

    def accept(self, message: Submit) -> None:
        """Submits a request, at once or after its blocks have been restored."""
        request = message.request
        running = _Running(message.attempt, request.salt, len(request.prompt), [*request.prompt, *message.emitted])
        self._running[request.id] = running
        if self._tasks is None or len(self._turns) >= MOST_WAITING or not self._may_restore(running):
            self._submit(message)
        else:
            self._tasks.create_task(self._restore_first(message, running))

    def cancel(self, request: str, attempt: int) -> None:
        """Saves the blocks of a cancelled request. A request that waits for its blocks is not submitted."""
        running = self._running.get(request)
        if running is not None and running.attempt == attempt:
            del self._running[request]
            self._note_ended(running)

    def on_emissions(self, items: Sequence[Emission]) -> None:
        """Follows the tokens of requests. On the compute thread."""
        for item in items:
            running = self._running.get(item.request)
            if running is None or running.attempt != item.attempt:
                continue
            if item.token is not None:
                running.tokens.append(item.token)
            if item.finish:
                self._running.pop(item.request, None)
                self._loop.call_soon_threadsafe(self._note_ended, running)

    async def forget_all(self) -> None:
        """Deletes all saved blocks, because they may be wrong."""
        try:
            await asyncio.to_thread(self._files.remove_all)
        except OSError as error:
            self.figures.failures += 1
            log.error("saved KV blocks that may be wrong were not deleted", extra={"why": str(error)})

    async def run(self) -> None:
        """Saves and restores until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._save_ended())
        finally:
            self._readers.shutdown(wait=False, cancel_futures=True)

    def metrics(self) -> dict[str, float]:
        """Returns numbers for /metrics by their final names."""
        figures = self.figures
        return {
            names.KV_DISK_SAVED_BYTES: figures.saved_bytes,
            names.KV_DISK_RESTORED_TOKENS: figures.restored_tokens,
            names.KV_DISK_RESTORE_SECONDS: figures.restore_seconds,
            names.KV_DISK_FAILURES: figures.failures + self._files.corrupt,
        }

    def _note_ended(self, running: _Running) -> None:
        if not self._ended.full():
            self._ended.put_nowait(running)

    async def _save_ended(self) -> None:
        while True:
            running = await self._ended.get()
            try:
                self.figures.saved_bytes += await asyncio.to_thread(self._save, running)
            except OSError as error:  # a full disk costs the cache on it, nothing else
                self.figures.failures += 1
                log.warning("KV blocks were not saved", extra={"why": str(error)})

    def _save(self, running: _Running) -> int:
        prefixes = self._engine.prefixes
        keys = prefixes.keys(running.tokens, running.salt)
        keys = keys[: prefixes.known(keys)]
        wanted: list[EntryName] = [(key, EntryKind.BLOCK) for key in keys]
        wanted = [name for name in wanted if not self._files.has(name)]
        if len(wanted) < LEAST_BLOCKS:
            return 0
        ends = {prefixes.with_window(keys[:count]) for count in (running.prompt_tokens // BLOCK_TOKENS, len(keys))}
        windows = sorted({place for end in ends for place in prefixes.needed_windows(end)})
        states = (key for key in reversed(keys) if prefixes.has(key, EntryKind.STATE))
        wanted += ((keys[place], EntryKind.WINDOW) for place in windows)
        wanted += ((key, EntryKind.STATE) for key in islice(states, SAVED_STATES))
        return self._files.save(wanted, self._read)

    def _read(self, name: EntryName) -> ByteArray | None:
        found = self._engine.prefixes.read(*name)
        return None if found is None else found.data

    def _may_restore(self, running: _Running) -> bool:
        """Returns whether the first blocks of a request are here, and their next one may be on disk. Looks at few."""
        prefixes = self._engine.prefixes
        keys = prefixes.keys(running.tokens[: LEAST_BLOCKS * BLOCK_TOKENS + 1], running.salt)
        here = prefixes.known(keys)
        return len(keys) == LEAST_BLOCKS and (here == LEAST_BLOCKS or self._files.has((keys[here], EntryKind.BLOCK)))

    async def _restore_first(self, message: Submit, running: _Running) -> None:
        """Restores the blocks of a request when its principal's turn comes, and submits it unless it was cancelled."""
        began_s, request = self._loop.time(), message.request
        try:
            async with asyncio.timeout(RESTORE_S), self._turns.turn(request.identity.principal):
                if self._running.get(request.id) is running:
                    await asyncio.to_thread(self._restore, running)
        except Exception as error:  # the prompt is computed instead
            self.figures.failures += 1
            log.warning("KV blocks were not restored", extra={"why": str(error) or type(error).__name__})
        if self._running.get(request.id) is running:
            waited_ms = message.waited_ms + 1e3 * (self._loop.time() - began_s)
            self._submit(msgspec.structs.replace(message, waited_ms=waited_ms))

    def _restore(self, running: _Running) -> None:
        """Copies blocks from disk into the prefix cache, a batch between two steps each."""
        began_s, prefixes = time.monotonic(), self._engine.prefixes
        keys = prefixes.keys(running.tokens, running.salt)
        here = prefixes.known(keys)
        usable = prefixes.with_window(keys[:here])
        keys = keys[: here + self._files.run_length(keys, here)]
        keys = keys[: self._last_start(keys)]
        if len(keys) - usable < LEAST_BLOCKS:
            return
        here = self._restore_blocks(keys, here, began_s + RESTORE_S)
        keys = keys[: self._last_start(keys[:here])]
        self._restore_windows(keys)
        self._restore_state(keys)
        self._files.touch([(key, EntryKind.BLOCK) for key in reversed(keys)])
        self.figures.restore_seconds += time.monotonic() - began_s

    def _restore_blocks(self, keys: Sequence[bytes], here: int, until_s: float) -> int:
        """Restores blocks from `here` on. Returns how many leading keys are in memory then.

        While one batch is stored, the next one is read, in one of two buffers that are used by turns.
        """
        size = self._engine.prefixes.entry_bytes[EntryKind.BLOCK]
        most, stride = max(1, BATCH_BYTES // size), -(-size // PLACE_BYTES) * PLACE_BYTES
        buffers = [np.empty((min(most, len(keys) - here), stride), np.uint8) for _ in range(2)]
        firsts = range(here, len(keys), most)
        coming = self._begin_batch(keys[here : here + most], buffers[0][:, :size])
        try:
            for turn, first in enumerate(firsts, 1):
                found = chain.from_iterable(future.result() for future in coming)
                entries = list(takewhile(lambda entry: entry is not None, found))
                wanted, coming = len(keys[first : first + most]), []
                if len(entries) == wanted:
                    after = first + wanted
                    coming = self._begin_batch(keys[after : after + most], buffers[turn % 2][:, :size])
                before, here = here, self._store_batch(keys, first, entries)
                self.figures.restored_tokens += BLOCK_TOKENS * max(0, here - before)
                if here < first + wanted or time.monotonic() > until_s:
                    break
        finally:
            wait(coming)  # they write to the buffers
        return here

    def _begin_batch(self, keys: Sequence[bytes], buffer: ByteArray) -> list[Future[list[ByteArray | None]]]:
        """Begins to read blocks into the rows of `buffer`, each thread a part of them in order."""
        names, part = [(key, EntryKind.BLOCK) for key in keys], max(1, -(-len(keys) // READERS))
        return [
            self._readers.submit(
                self._files.read_run, names[at : at + part], list(buffer[at : min(at + part, len(keys))])
            )
            for at in range(0, len(keys), part)
        ]

    def _store_batch(self, keys: Sequence[bytes], first: int, entries: Sequence[ByteArray | None]) -> int:
        """Stores blocks between two steps. Returns how many leading keys are in memory then."""
        there = [entry for entry in entries if entry is not None]
        take_in = self._engine.prefixes.take_in_run
        return self._engine.loop.ask(lambda: take_in(keys, first, there)).result(STEP_S)

    def _last_start(self, keys: Sequence[bytes]) -> int:
        """Returns after how many blocks window and state are known, in memory or on disk, as many as possible."""
        count, before = len(keys), -1
        while count != before:
            before = count
            if self._engine.prefixes.entry_bytes[EntryKind.STATE]:
                places = range(count, 0, -1)
                count = next((n for n in places if self._is_known(keys[n - 1], EntryKind.STATE)), 0)
            count = self._engine.prefixes.with_window(
                keys[:count], lambda key: self._files.has((key, EntryKind.WINDOW))
            )
        return count

    def _is_known(self, key: bytes, kind: EntryKind) -> bool:
        return self._files.has((key, kind)) or self._engine.prefixes.has(key, kind)

    def _restore_windows(self, keys: Sequence[bytes]) -> None:
        prefixes, size = self._engine.prefixes, self._engine.prefixes.entry_bytes[EntryKind.WINDOW]
        missing = [n for n in prefixes.needed_windows(len(keys)) if not prefixes.has(keys[n], EntryKind.WINDOW)]
        most = max(1, BATCH_BYTES // size) if missing else 1
        for first in range(0, len(missing), most):
            read = [(n, self._files.read((keys[n], EntryKind.WINDOW))) for n in missing[first : first + most]]
            there = [(keys[: n + 1], data) for n, data in read if data is not None]
            self._take_in(there, EntryKind.WINDOW)

    def _restore_state(self, keys: Sequence[bytes]) -> None:
        prefixes = self._engine.prefixes
        if not keys or not prefixes.entry_bytes[EntryKind.STATE] or prefixes.has(keys[-1], EntryKind.STATE):
            return
        if (data := self._files.read((keys[-1], EntryKind.STATE))) is not None:
            self._take_in([(keys, data)], EntryKind.STATE)

    def _take_in(self, entries: Sequence[tuple[Sequence[bytes], ByteArray]], kind: EntryKind) -> None:
        """Stores entries between two steps."""
        take_in = self._engine.prefixes.take_in
        self._engine.loop.ask(lambda: [take_in(keys, data, kind) for keys, data in entries]).result(STEP_S)
