"""Has a store come from the other boxes of a cluster: from all that have it at once, each piece verified."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

from edgemoe.cli.pull.boxes import ASK_S, StoreFinder
from edgemoe.cli.pull.store_pull import StorePull
from edgemoe.cluster.control.messages import CONTROL, ControlMessage, StoreAt
from edgemoe.cluster.data.messages import BULK, BulkMessage
from edgemoe.cluster.data.store_fetch import Pace, PieceChannel
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.cluster.rpc.envelope import Answer, Question
from edgemoe.cluster.rpc.keys import AllowList, load_secret
from edgemoe.cluster.rpc.transport import ChannelSettings, Transport
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import ConfigError, PeerRefused, StoreError
from edgemoe.front.peers_list import listed
from edgemoe.store.manifest import model_of
from edgemoe.store.packer import Progress
from edgemoe.store.peer_copy import check, merged, opened


async def pull(settings: ClusterSettings, store_dir: Path, model: str, rate: float, progress: Progress) -> Path:
    """Returns the store of `model`, with every expert that any box has. Raises StoreError, PeerError, ConfigError."""
    if not settings.node:
        raise ConfigError("--from-peers: this box is in no cluster; set cluster.node, key_file, listen and peers_file")
    peers = {name: peer for name, peer in listed(settings).items() if name != settings.node and peer.address}
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
        finder = StoreFinder(control, bulk, PieceChannel(bulk, Pace(rate), ASK_S), model)
        boxes = await finder.find(peers)
        whole = merged([box.manifest for box in boxes])
        check(whole)
        directory = store_dir / _name_of(boxes[0].offer)
        with opened(directory, whole) as store:
            store.check_room()
            await StorePull(finder, boxes, store, progress).run()
        return directory
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        transport.close()


def _name_of(offer: StoreAt) -> str:
    """Returns what the store is called here: as there, where that is a store's name."""
    return offer.store if model_of(offer.store) != offer.store else f"{offer.store}-v2-{offer.model[:12]}"


async def _refuse(question: Question[Any]) -> Answer[Any] | None:
    raise PeerRefused("nothing is served here")
