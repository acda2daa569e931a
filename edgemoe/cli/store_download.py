"""Downloads a store from the other boxes of a cluster: from all that have it at once, each piece verified.

Boxes are found on the control channel; pieces come over the bulk channel.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from edgemoe.cluster.control.messages import CONTROL, ControlMessage, StoreLocationReply, StoreLocationRequest
from edgemoe.cluster.data.messages import BULK, BulkMessage
from edgemoe.cluster.data.store_fetch import PieceChannel, TransferPace
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.keys import AllowList, Peer, load_secret
from edgemoe.cluster.rpc.transport import ChannelSettings, Transport
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import ConfigError, PeerError, PeerRefused, PeerUnavailable, StoreError
from edgemoe.front.peers_list import known
from edgemoe.store.files import checksum
from edgemoe.store.manifest import MAX_MANIFEST_BYTES, Manifest, model_of
from edgemoe.store.packer import Progress
from edgemoe.store.peer_copy import ExpertPiece, PeerCopy, check_manifest, count_unlisted, merge_manifests, open_copy

log = logging.getLogger(__name__)

MEET_S, ASK_S = 5.0, 10.0


@dataclass(slots=True)
class StoreBox:
    """A box that has the store, or some of it."""

    peer: Peer
    offer: StoreLocationReply
    manifest: Manifest
    has: set[str]  # checksums of experts
    looked_s: float = field(default_factory=time.monotonic)


class StoreFinder:
    """Meets boxes, on both channels."""

    def __init__(
        self, control: Channel[ControlMessage], bulk: Channel[BulkMessage], pieces: PieceChannel, model: str
    ) -> None:
        self.pieces = pieces
        self._control, self._bulk, self._model = control, bulk, model

    async def find(self, peers: dict[str, Peer]) -> list[StoreBox]:
        """Returns the boxes that have the model. Raises StoreError saying why none has."""
        found = await asyncio.gather(*map(self._meet, peers.values()), return_exceptions=True)
        boxes = [each for each in found if isinstance(each, StoreBox)]
        for each in found:
            if not isinstance(each, StoreBox | PeerError | StoreError):
                raise each
        if not boxes:
            raise StoreError(f"no box has {self._model}: " + "; ".join(map(str, found)))
        if len({box.offer.model for box in boxes}) > 1:
            raise StoreError(f"boxes have different models of the name {self._model}; name one by its store")
        return boxes

    async def locate(self, peer: Peer) -> StoreLocationReply:
        """Connects to a box and returns its offer. Raises PeerError, StoreError if it serves another model."""
        self._control.connect(peer)
        await _until_up(self._control, peer.node)
        answer = (await self._control.ask(peer.node, StoreLocationRequest(), timeout_s=ASK_S)).message
        if not isinstance(answer, StoreLocationReply):
            raise PeerRefused(f"{peer.node} answered with something else")
        if not _is_called(answer, self._model):
            raise StoreError(f"{peer.node} serves {answer.name} ({answer.store})")
        host = peer.address.rpartition(":")[0]
        self._bulk.connect(msgspec.structs.replace(peer, address=f"{host}:{answer.bulk_port}"))
        await _until_up(self._bulk, peer.node)
        return answer

    async def manifest(self, peer: Peer, offer: StoreLocationReply) -> Manifest:
        """Returns the manifest of a box's store. Raises PeerError, StoreError."""
        text = await self.pieces.small(peer.node, offer.model, MAX_MANIFEST_BYTES)
        manifest = Manifest.parse(text, f"what {peer.node} has")
        if manifest.digest != offer.model:
            raise StoreError(f"{peer.node} names model {offer.model[:12]} and has {manifest.digest[:12]}")
        return manifest

    def is_up(self, node: str) -> bool:
        return self._bulk.is_up(node)

    async def _meet(self, peer: Peer) -> StoreBox:
        offer = await self.locate(peer)
        manifest = await self.manifest(peer, offer)
        return StoreBox(peer, offer, manifest, experts_of(manifest))


def experts_of(manifest: Manifest) -> set[str]:
    """Returns the checksums of the experts that a manifest lists."""
    return {entry.xxh3_128 for layer in manifest.layers for entry in layer.experts}


def _is_called(offer: StoreLocationReply, model: str) -> bool:
    names = (offer.name, offer.store, model_of(offer.store), offer.model)
    return model in names


async def _until_up(channel: Channel[Any], node: str) -> None:
    ends = time.monotonic() + MEET_S
    while not channel.is_up(node):
        if time.monotonic() > ends:
            why = "is its daemon up, and is this box in its list?"
            raise PeerUnavailable(f"{node} cannot be reached on its {channel.name} channel; {why}")
        await asyncio.sleep(0.02)


LANES = 2  # pieces that come from one box at once
RETRY_S, REFRESH_S = 1.0, 5.0
STALLED_S = 30.0  # without a byte from any box
MOST_REFUSALS = 3  # of one piece by one box, which then counts as damaged there
SAVE_S = 2.0  # between manifests, at least
MOST_SMALL_BYTES = 64 << 20


class StoreDownload:
    """Downloads one store: each box's lanes take pieces from one list, to which failed pieces return."""

    def __init__(self, finder: StoreFinder, boxes: list[StoreBox], store: PeerCopy, progress: Progress) -> None:
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

    # --- a lane's work ----------------------------------------------------------------------------------------

    async def _lane(self, box: StoreBox) -> None:
        node = box.peer.node
        while True:
            try:
                if not self._finder.is_up(node):
                    await asyncio.sleep(RETRY_S)
                    box.offer = await self._finder.locate(box.peer)
                if self._dense and node not in self._bad.get(self._store.whole.dense.xxh3_128, ()):
                    self._dense = False
                    await self._fetch_dense(box)
                elif (piece := self._next(box)) is not None:
                    await self._fetch_piece(box, piece)
                else:
                    await asyncio.sleep(0.1)
                    await self._refresh_offer(box)
            except (PeerError, StoreError) as error:
                log.warning("a box does not give what was asked for", extra={"box": node, "why": str(error)})
                await asyncio.sleep(RETRY_S)

    def _next(self, box: StoreBox) -> ExpertPiece | None:
        """Removes and returns the next piece that this box has; None for none."""
        for _ in range(len(self._todo)):
            piece = self._todo.popleft()
            if piece.digest in box.has and box.peer.node not in self._bad.get(piece.digest, ()):
                return piece
            self._todo.append(piece)
        return None

    async def _fetch_piece(self, box: StoreBox, piece: ExpertPiece) -> None:
        self._under_way += 1
        what, came = f"expert {piece.expert} of layer {piece.layer}", 0

        def write_part(offset: int, part: memoryview) -> None:
            nonlocal came
            self._store.write(piece, offset, part)
            came += len(part)
            self._note_arrival(len(part))

        kept = False
        try:
            await self._finder.pieces.large(box.peer.node, piece.digest, piece.bytes, write_part)
            kept = await asyncio.to_thread(self._store.is_intact, piece)
            if not kept:
                self._damaged(box, piece.digest, what)
        except PeerRefused:
            box.has.discard(piece.digest)
            self._refused(box, piece.digest, what)
            raise
        finally:
            self._under_way -= 1
            if kept:
                self._store.mark_present(piece)
            else:
                self._todo.append(piece)
                self._show_progress(-came)

    def _damaged(self, box: StoreBox, digest: str, what: str) -> None:
        self._bad.setdefault(digest, set()).add(box.peer.node)
        log.error("a piece is damaged there; it is taken from another box", extra={"box": box.peer.node, "piece": what})

    def _refused(self, box: StoreBox, digest: str, what: str) -> None:
        """Counts a box's refusals of a piece, which may be there later or be unreadable there."""
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

    async def _fetch_dense(self, box: StoreBox) -> None:
        store, entry = self._store, self._store.whole.dense
        self._under_way += 1
        done, came = store.has_dense, 0

        def append_part(_: int, part: memoryview) -> None:
            nonlocal came
            store.add_dense(part)
            came += len(part)
            self._note_arrival(len(part))

        try:
            if not done:
                header = self._dense_header = self._dense_header or await self._small(box, entry.header, entry.file)
                start = came = store.begin_dense(header)
                self._show_progress(start)
                size = entry.bytes - len(header)
                await self._finder.pieces.large(box.peer.node, entry.xxh3_128, size, append_part, start)
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
                self._show_progress(-came)

    async def _from_any(self, work: Callable[[StoreBox], Awaitable[None]]) -> None:
        """Does the work with one box after the other until one succeeds. Raises the last box's error."""
        for number, box in enumerate(self._boxes, start=1):
            try:
                await work(box)
            except PeerError:
                if number == len(self._boxes):
                    raise
            else:
                return

    # --- around it --------------------------------------------------------------------------------------------

    async def _refresh_offer(self, box: StoreBox) -> None:
        """Fetches the manifest of a box again, which may have more pieces by now."""
        if self._todo and time.monotonic() - box.looked_s > REFRESH_S:
            box.looked_s = time.monotonic()
            box.has = experts_of(await self._finder.manifest(box.peer, box.offer))

    async def _watch(self) -> None:
        """Saves the manifest of arrived pieces from time to time. Raises StoreError if nothing arrives for long."""
        while True:
            await asyncio.sleep(0.2)
            if time.monotonic() - self._saved_s > SAVE_S and self._store.has_unsaved and self._store.has_dense:
                began_s = time.monotonic()
                await asyncio.to_thread(self._store.save)
                self._saved_s = time.monotonic() + 10 * (time.monotonic() - began_s)
            if time.monotonic() - self._heard_s > STALLED_S:
                raise StoreError(
                    f"nothing came for {STALLED_S:.0f} s, and {len(self._todo)} pieces are missing; see that the "
                    "boxes are up, and run it again: arrived pieces are kept"
                )

    async def _all_came(self) -> None:
        """Returns once nothing is missing, or the rest is damaged on every box that has it."""
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

    def _note_arrival(self, more_bytes: int) -> None:
        self._heard_s = time.monotonic()
        self._show_progress(more_bytes)

    def _show_progress(self, more_bytes: int) -> None:
        self._done_bytes += more_bytes
        self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


async def _together(works: list[Coroutine[Any, Any, None]], first: Coroutine[Any, Any, None]) -> None:
    """Runs all until `first` ends or one raises. Raises that error."""
    tasks = [asyncio.ensure_future(work) for work in (first, *works)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_complete(store: PeerCopy, bad: dict[str, set[str]]) -> None:
    """Raises StoreError where pieces are missing, with the boxes where they are damaged."""
    if not store.is_whole:
        left = list(store.missing())
        nodes = sorted({node for piece in left for node in bad.get(piece.digest, ())})
        raise StoreError(
            f"{store.directory}: {len(left)} experts are damaged on every box that has them ({', '.join(nodes)}); "
            "`edgemoe models verify` there names them"
        )
    if count := count_unlisted(store.whole):
        raise StoreError(f"{store.directory}: {count} experts are on no box; run it again when one has them")


async def pull(settings: ClusterSettings, store_dir: Path, model: str, rate: float, progress: Progress) -> Path:
    """Returns the store of `model`, with every expert that any box has. Raises StoreError, PeerError, ConfigError."""
    if not settings.node:
        raise ConfigError("--from-peers: this box is in no cluster; set cluster.node, key_file, listen and peers_file")
    peers = {name: peer for name, peer in known(settings).items() if peer.address}
    if not peers:
        raise StoreError(
            "there is no other box to pull from: set cluster.join, or list one with its address in peers_file"
        )
    transport = Transport(settings.node, secrets.token_hex(8), load_secret(Path(settings.key_file)), AllowList({}))
    control: Channel[ControlMessage] = Channel(transport, "control", CONTROL, _refuse, ChannelSettings(heartbeat_s=0.5))
    # no heartbeats on bulk: over a slow link they would wait behind a part of a piece until they time out
    bulk: Channel[BulkMessage] = Channel(transport, "bulk", BULK, _refuse)
    work = [transport.run(), control.run(), bulk.run()]
    running = [asyncio.ensure_future(each) for each in work]
    try:
        finder = StoreFinder(control, bulk, PieceChannel(bulk, TransferPace(rate), ASK_S), model)
        boxes = await finder.find(peers)
        whole = merge_manifests([box.manifest for box in boxes])
        check_manifest(whole)
        directory = store_dir / _name_of(boxes[0].offer)
        with open_copy(directory, whole) as store:
            store.check_room()
            await StoreDownload(finder, boxes, store, progress).run()
        return directory
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        transport.close()


def _name_of(offer: StoreLocationReply) -> str:
    """Returns the store's name here: its name there, if that is a store's name."""
    return offer.store if model_of(offer.store) != offer.store else f"{offer.store}-v2-{offer.model[:12]}"


async def _refuse(question: Question[Any]) -> Answer[Any] | None:
    raise PeerRefused("nothing is served here")
