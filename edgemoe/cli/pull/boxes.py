"""The boxes of a cluster that have a store: found on the control channel, met on the bulk channel."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from edgemoe.cluster.control.messages import ControlMessage, FindStore, StoreAt, Welcome
from edgemoe.cluster.data.messages import BulkMessage
from edgemoe.cluster.data.store_fetch import PieceChannel
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.keys import Peer
from edgemoe.errors import PeerError, PeerRefused, PeerUnavailable, StoreError
from edgemoe.store.manifest import MAX_MANIFEST_BYTES, Manifest, model_of

MEET_S, ASK_S = 5.0, 10.0


@dataclass(slots=True)
class StoreBox:
    """A box that has the store, or some of it."""

    peer: Peer
    offer: StoreAt
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

    async def locate(self, peer: Peer) -> StoreAt:
        """Connects to what a box serves. Raises PeerError, StoreError where it is another model."""
        self._control.connect(peer)
        await _until_up(self._control, peer.node)
        with suppress(PeerRefused):  # any answer tells which versions it speaks
            await self._control.ask(peer.node, Welcome(), timeout_s=ASK_S)
        answer = (await self._control.ask(peer.node, FindStore(), timeout_s=ASK_S)).message
        if not isinstance(answer, StoreAt):
            raise PeerRefused(f"{peer.node} answered with something else")
        if not _is_called(answer, self._model):
            raise StoreError(f"{peer.node} serves {answer.name} ({answer.store})")
        host = peer.address.rpartition(":")[0]
        self._bulk.connect(msgspec.structs.replace(peer, address=f"{host}:{answer.bulk_port}"))
        await _until_up(self._bulk, peer.node)
        await self.pieces.greet(peer.node)
        return answer

    async def manifest(self, peer: Peer, offer: StoreAt) -> Manifest:
        """Returns what a box has. Raises PeerError, StoreError."""
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


def _is_called(offer: StoreAt, model: str) -> bool:
    names = (offer.name, offer.store, model_of(offer.store), offer.model)
    return model in names


async def _until_up(channel: Channel[Any], node: str) -> None:
    ends = time.monotonic() + MEET_S
    while not channel.is_up(node):
        if time.monotonic() > ends:
            why = "is its daemon up, and is this box in its list?"
            raise PeerUnavailable(f"{node} cannot be reached on its {channel.name} channel; {why}")
        await asyncio.sleep(0.02)
