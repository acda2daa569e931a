"""Runs a voter without a model, so that two boxes can still decide when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from pathlib import Path

from edgemoe import __version__
from edgemoe.cluster.control.control_plane import ControlPlane
from edgemoe.cluster.control.messages import Announce
from edgemoe.cluster.rpc.keys import load_secret
from edgemoe.config.settings import ClusterSettings
from edgemoe.front.peers_list import address_of, follow_list, listed

log = logging.getLogger(__name__)


async def witness(settings: ClusterSettings) -> None:
    """Votes until SIGTERM or SIGINT. Raises ConfigError for wrong settings, PeerRefused for a taken address."""
    announce = Announce(release=__version__, role="witness", address=address_of(settings))
    secret = load_secret(Path(settings.key_file))
    plane = ControlPlane(settings, secrets.token_hex(8), secret, listed(settings), announce)
    plane.listen()
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    log.info("witness", extra={"node": settings.node, "listen": settings.listen})
    following = asyncio.ensure_future(follow_list(settings, plane))
    running = asyncio.ensure_future(plane.run())
    stopping = asyncio.ensure_future(stopped.wait())
    await asyncio.wait([running, following, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if following.done():
        running.cancel()
        await following  # it ends only by an error
    following.cancel()
    if not running.done():
        await plane.leave()
        running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
