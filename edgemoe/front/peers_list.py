"""Reads the list of peers, and follows its changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from edgemoe.cluster.control.admission import KEPT_BOXES, KeptWords, read_seeds, select_peers
from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.rpc.keys import Peer, load_peers, load_secret
from edgemoe.cluster.rpc.roster import KEPT_ROSTER, KeptRoster
from edgemoe.config.settings import ClusterSettings
from edgemoe.errors import ConfigError
from edgemoe.ticking import until_tick

log = logging.getLogger(__name__)
LOOK_S = 1.0  # between looks at the file
WILDCARDS = ("0.0.0.0", "::", "*")


def listed(settings: ClusterSettings) -> Mapping[str, Peer]:
    """Returns the boxes in the list of peers, or by which this one joins. Raises ConfigError.

    Once members are agreed, they count, and a fault of the list keeps nothing from its work.
    """
    try:
        return _listed(settings)
    except ConfigError as error:
        if KeptRoster(Path(settings.state_dir) / KEPT_ROSTER).roster is None:
            raise
        log.warning("the list of peers is not used", extra={"why": str(error)})
        return {}


def _listed(settings: ClusterSettings) -> Mapping[str, Peer]:
    """Raises ConfigError if the list names this box with another key."""
    if settings.join:
        if not address_of(settings):
            raise ConfigError("cluster.join needs cluster.address: the address at which the others reach this box")
        return read_seeds(settings.join)
    if not settings.peers_file:
        return {}
    path = Path(settings.peers_file)
    peers = load_peers(path)
    own = load_secret(Path(settings.key_file)).public.decode()
    if settings.node in peers and own not in peers[settings.node].keys:
        raise ConfigError(f"{path}: {settings.node} is this box, but {settings.key_file} belongs to the key {own}")
    return peers


def known(settings: ClusterSettings) -> Mapping[str, Peer]:
    """Returns the other boxes that this box lets in: listed, or learnt from listed ones. Raises ConfigError."""
    roster = KeptRoster(Path(settings.state_dir) / KEPT_ROSTER).roster
    if roster is not None:
        return {box.node: box for box in roster.boxes if box.node != settings.node}
    words = KeptWords(Path(settings.state_dir) / KEPT_BOXES).words
    return select_peers(settings.node, listed(settings), words, joining=bool(settings.join))


async def follow_list(settings: ClusterSettings, plane: ControlPlane) -> None:
    """Passes each changed list of peers to the control plane. A faulty list changes nothing."""
    if not settings.peers_file:
        return
    read_at = _stamp(settings)
    while True:
        await asyncio.sleep(until_tick(LOOK_S))
        if (now := _stamp(settings)) != read_at:
            read_at = now
            try:
                peers = listed(settings)
                if not peers:  # a file that is just being written
                    raise ConfigError(f"{settings.peers_file}: lists nobody; stop the daemon to take its box out")
                plane.set_peers(peers)
                log.info("list of peers read again", extra={"file": settings.peers_file})
            except ConfigError as error:
                log.error("the list of peers is left as it was", extra={"why": str(error)})


def _stamp(settings: ClusterSettings) -> tuple[int, int]:
    try:
        info = Path(settings.peers_file).stat()
    except OSError:
        return (0, 0)
    return (info.st_mtime_ns, info.st_size)


def address_of(settings: ClusterSettings) -> str:
    """Returns the address of this box's control channel for others; "" if the settings do not say."""
    host = settings.listen.rpartition(":")[0].strip("[]")
    return settings.address or ("" if host in WILDCARDS else settings.listen)
