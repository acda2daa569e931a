"""One pull of a store from several boxes at once, by pieces."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from edgemoe.cli.pull.boxes import StoreBox, StoreFinder, experts_of
from edgemoe.errors import PeerError, PeerRefused, StoreError
from edgemoe.store.files import checksum
from edgemoe.store.packer import Progress
from edgemoe.store.peer_copy import ExpertPiece, PulledStore, absent

log = logging.getLogger(__name__)
LANES = 2  # pieces that come from one box at once
RETRY_S, LOOK_S = 1.0, 5.0
STALLED_S = 30.0  # without a byte from any box
MOST_REFUSALS = 3  # of one piece by one box, which then counts as damaged there
SAVE_S = 2.0  # between manifests, at least
MOST_SMALL_BYTES = 64 << 20


class StorePull:
    """One pull: lanes to each box take pieces from one list, which those that fail go back to."""

    def __init__(self, finder: StoreFinder, boxes: list[StoreBox], store: PulledStore, progress: Progress) -> None:
        self._finder, self._boxes, self._store, self._progress = finder, boxes, store, progress
        self._todo: deque[ExpertPiece] = deque()
        self._bad: dict[str, set[str]] = {}  # a piece's checksum -> boxes where it is damaged
        self._refusals: Counter[tuple[str, str]] = Counter()  # by a piece's checksum and box
        self._dense_header = b""
        self._under_way = 0
        self._dense = not store.has_base
        self._saved_s = self._heard_s = time.monotonic()
        self._done_bytes, self._total_bytes = 0, store.whole.total_bytes

    async def run(self) -> None:
        """Raises StoreError, PeerError where not all that boxes have has come."""
        if not self._store.has_base:
            await self._from_any(self._small_files)
        self._todo.extend(self._store.missing())
        self._done_bytes = self._total_bytes - sum(piece.bytes for piece in self._todo)
        if self._dense:
            self._done_bytes -= self._store.whole.dense.bytes
        lanes = [self._lane(box) for box in self._boxes for _ in range(LANES)]
        await _together([*lanes, self._watch()], first=self._all_came())
        await asyncio.to_thread(self._store.save)
        check_complete(self._store, self._bad)

    # --- what a lane does -------------------------------------------------------------------------------------

    async def _lane(self, box: StoreBox) -> None:
        node = box.peer.node
        while True:
            try:
                if not self._finder.is_up(node):
                    await asyncio.sleep(RETRY_S)
                    box.offer = await self._finder.locate(box.peer)
                if self._dense and node not in self._bad.get(self._store.whole.dense.xxh3_128, ()):
                    self._dense = False
                    await self._take_dense(box)
                elif (piece := self._next(box)) is not None:
                    await self._take(box, piece)
                else:
                    await asyncio.sleep(0.1)
                    await self._look_again(box)
            except (PeerError, StoreError) as error:
                log.warning("a box does not give what was asked for", extra={"box": node, "why": str(error)})
                await asyncio.sleep(RETRY_S)

    def _next(self, box: StoreBox) -> ExpertPiece | None:
        """Takes the next piece that this box has."""
        for _ in range(len(self._todo)):
            piece = self._todo.popleft()
            if piece.digest in box.has and box.peer.node not in self._bad.get(piece.digest, ()):
                return piece
            self._todo.append(piece)
        return None

    async def _take(self, box: StoreBox, piece: ExpertPiece) -> None:
        self._under_way += 1
        what, came = f"expert {piece.expert} of layer {piece.layer}", 0

        def take(offset: int, part: memoryview) -> None:
            nonlocal came
            self._store.write(piece, offset, part)
            came += len(part)
            self._hear(len(part))

        kept = False
        try:
            await self._finder.pieces.large(box.peer.node, piece.digest, piece.bytes, take)
            kept = await asyncio.to_thread(self._store.accept, piece)
            if not kept:
                self._damaged(box, piece.digest, what)
        except PeerRefused:
            box.has.discard(piece.digest)
            self._refused(box, piece.digest, what)
            raise
        finally:
            self._under_way -= 1
            if kept:
                self._store.note(piece)
            else:
                self._todo.append(piece)
                self._tell(-came)

    def _damaged(self, box: StoreBox, digest: str, what: str) -> None:
        self._bad.setdefault(digest, set()).add(box.peer.node)
        log.error("a piece is damaged there; it is taken from another box", extra={"box": box.peer.node, "piece": what})

    def _refused(self, box: StoreBox, digest: str, what: str) -> None:
        """Counts what may be there later, or cannot be read there."""
        key = digest, box.peer.node
        self._refusals[key] += 1
        if self._refusals[key] == MOST_REFUSALS:
            self._damaged(box, digest, what)

    # --- dense weights, headers, copied files -----------------------------------------------------------------

    async def _small_files(self, box: StoreBox) -> None:
        store, whole = self._store, self._store.whole
        for copied in whole.files:
            store.keep_copy(copied.file, await self._small(box, copied.xxh3_128, copied.file))
        for number, layer in enumerate(whole.layers):
            store.begin_layer(number, await self._small(box, layer.header, layer.file))

    async def _small(self, box: StoreBox, digest: str, what: str) -> bytes:
        data = await self._finder.pieces.small(box.peer.node, digest, MOST_SMALL_BYTES)
        if checksum(data) != digest:
            self._damaged(box, digest, what)
            raise PeerRefused(f"{box.peer.node} has a damaged {what}")
        self._heard_s = time.monotonic()
        return data

    async def _take_dense(self, box: StoreBox) -> None:
        store, entry = self._store, self._store.whole.dense
        self._under_way += 1
        done, came = store.has_dense, 0

        def take(_: int, part: memoryview) -> None:
            nonlocal came
            store.add_dense(part)
            came += len(part)
            self._hear(len(part))

        try:
            if not done:
                header = self._dense_header = self._dense_header or await self._small(box, entry.header, entry.file)
                start = came = store.begin_dense(header)
                self._tell(start)
                size = entry.bytes - len(header)
                await self._finder.pieces.large(box.peer.node, entry.xxh3_128, size, take, start)
                done = await asyncio.to_thread(store.finish_dense, len(header))
                if not done and not start:  # else the first part came from another
                    self._damaged(box, entry.xxh3_128, entry.file)
        except PeerRefused:
            self._refused(box, entry.xxh3_128, entry.file)
            raise
        finally:
            self._under_way -= 1
            self._dense = not done
            if not done:
                self._tell(-came)

    async def _from_any(self, work: Callable[[StoreBox], Awaitable[None]]) -> None:
        """Has one box after the other do it until one has. Raises what the last one raised."""
        for number, box in enumerate(self._boxes, start=1):
            try:
                await work(box)
            except PeerError:
                if number == len(self._boxes):
                    raise
            else:
                return

    # --- around it --------------------------------------------------------------------------------------------

    async def _look_again(self, box: StoreBox) -> None:
        """Looks whether a box that had not all has more by now."""
        if self._todo and time.monotonic() - box.looked_s > LOOK_S:
            box.looked_s = time.monotonic()
            box.has = experts_of(await self._finder.manifest(box.peer, box.offer))

    async def _watch(self) -> None:
        """Saves what has come, now and then. Raises PeerError where nothing comes any more."""
        while True:
            await asyncio.sleep(0.2)
            if time.monotonic() - self._saved_s > SAVE_S and self._store.has_news and self._store.has_dense:
                began_s = time.monotonic()
                await asyncio.to_thread(self._store.save)
                self._saved_s = time.monotonic() + 10 * (time.monotonic() - began_s)
            if time.monotonic() - self._heard_s > STALLED_S:
                raise StoreError(
                    f"nothing came for {STALLED_S:.0f} s, and {len(self._todo)} pieces are missing; see that the "
                    "boxes are up, and run it again: what has come is kept"
                )

    async def _all_came(self) -> None:
        """Returns when nothing is to come, or what is left is damaged wherever it is."""
        while True:
            await asyncio.sleep(0.05)
            if self._under_way:
                continue
            if self._dense:
                if self._is_bad_everywhere(self._store.whole.dense.xxh3_128):
                    raise StoreError("the dense weights are damaged on every box; mend one, and run it again")
            elif all(self._is_bad_everywhere(piece.digest) for piece in self._todo):
                return

    def _is_bad_everywhere(self, digest: str) -> bool:
        bad, is_dense = self._bad.get(digest, set()), digest == self._store.whole.dense.xxh3_128
        nodes = {box.peer.node for box in self._boxes if is_dense or digest in box.has}
        return bool(bad) and bad >= nodes | {node for refused, node in self._refusals if refused == digest}

    def _hear(self, more_bytes: int) -> None:
        self._heard_s = time.monotonic()
        self._tell(more_bytes)

    def _tell(self, more_bytes: int) -> None:
        self._done_bytes += more_bytes
        self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


async def _together(works: list[Coroutine[Any, Any, None]], first: Coroutine[Any, Any, None]) -> None:
    """Runs these until `first` ends. Raises what one of them raises."""
    tasks = [asyncio.ensure_future(work) for work in (first, *works)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_complete(store: PulledStore, bad: dict[str, set[str]]) -> None:
    """Raises StoreError where pieces are missing, with the boxes where they are damaged."""
    if not store.is_whole:
        left = list(store.missing())
        nodes = sorted({node for piece in left for node in bad.get(piece.digest, ())})
        raise StoreError(
            f"{store.directory}: {len(left)} experts are damaged on every box that has them ({', '.join(nodes)}); "
            "`edgemoe models verify` there names them"
        )
    if count := absent(store.whole):
        raise StoreError(f"{store.directory}: {count} experts are on no box; run it again when one has them")
