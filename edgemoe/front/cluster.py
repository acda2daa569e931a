"""The front among other boxes' fronts: tells them of its engine, and its engine of them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from edgemoe import __version__
from edgemoe.cluster.control.plane import ControlPlane
from edgemoe.cluster.wire.control_messages import Announce, EngineCard
from edgemoe.cluster.wire.keys import Peer, load_peers, load_secret
from edgemoe.cluster.wire.messages import Holds, Listening, Peers, PeerSeen, Plan, ToEngine
from edgemoe.config import ClusterSettings
from edgemoe.errors import ConfigError
from edgemoe.types import PlacementPlan

log = logging.getLogger(__name__)
WILDCARDS = ("0.0.0.0", "::", "*")


class Cluster:
    """Made on the front's event loop. `run` until cancelled, after `leave`."""

    def __init__(self, settings: ClusterSettings, devices: tuple[str, ...], send: Callable[[ToEngine], bool]) -> None:
        """`send` hands a message to our engine. Raises ConfigError, ServiceError."""
        self.settings = settings
        self.seen: dict[str, PeerSeen] = {}  # links between our engine and others, by node
        self._send = send
        self._listening: Listening | None = None
        self._holds: Holds | None = None
        self._boot = ""  # of our engine
        self._peers = Peers()  # as our engine was told
        self.plane = ControlPlane(
            settings,
            secrets.token_hex(8),
            load_secret(Path(settings.key_file)),
            listed(settings),
            Announce(release=__version__, role="box", address=address_of(settings), devices=devices),
        )
        self.plane.on_change = self._tell_peers
        self.plane.on_plan = self._tell_plan

    def listen(self) -> None:
        """Opens the control lane. Raises PeerRefused where the address cannot be had."""
        self.plane.listen()

    async def run(self) -> None:
        """Until cancelled."""
        await self.plane.run()

    async def leave(self) -> None:
        """Tells the others that this box goes."""
        await self.plane.leave()

    # --- our engine -------------------------------------------------------------------------------------------

    def hear(self, boot: str, message: Listening | Holds | PeerSeen) -> None:
        """What our engine says of itself and its links."""
        match message:
            case Listening():
                self._boot, self._listening, self._holds, self._peers = boot, message, None, Peers()
                self._tell_peers()
                if self.plane.plans.plan is not None:
                    self._tell_plan(self.plane.plans.plan)
            case Holds():
                self._holds = message
                self._announce()
            case PeerSeen():
                self.seen[message.node] = message

    def engine_ended(self) -> None:
        """What it held is held no more."""
        self._listening = self._holds = None
        self.seen.clear()
        self._announce()

    def _announce(self) -> None:
        engine = None
        if (ports := self._listening) is not None and (holds := self._holds) is not None:
            model = ports.model
            engine = EngineCard(
                boot=self._boot,
                calls_port=ports.calls_port,
                bulk_port=ports.bulk_port,
                model=model.digest,
                layers=model.layers,
                experts=model.experts,
                expert_bytes=model.expert_bytes,
                budget_experts=holds.budget_experts,
                disk=holds.disk,
                ram=holds.ram,
                shares=self.settings.share_experts,
            )
        self.plane.say(msgspec.structs.replace(self.plane.announce, engine=engine))

    def _tell_peers(self) -> None:
        if self._listening is None or not self.settings.share_experts:
            return
        peers = Peers(peers=self.plane.members.engines())
        if peers != self._peers and self._send(peers):
            self._peers = peers

    def _tell_plan(self, plan: PlacementPlan) -> None:
        listening = self._listening
        if listening is not None and self.settings.share_experts and plan.model == listening.model.digest:
            self._send(Plan(plan=plan))


def listed(settings: ClusterSettings) -> Mapping[str, Peer]:
    """The boxes in the list of peers. Raises ConfigError where this one stands in it with another key."""
    if not settings.peers_file:
        return {}
    path = Path(settings.peers_file)
    peers = load_peers(path)
    own = load_secret(Path(settings.key_file)).public.decode()
    if settings.node in peers and peers[settings.node].key != own:
        raise ConfigError(f"{path}: {settings.node} is this box, but {settings.key_file} belongs to the key {own}")
    return peers


def address_of(settings: ClusterSettings) -> str:
    """Where the others reach this box's control lane, as far as the settings say so; else ""."""
    host = settings.listen.rpartition(":")[0].strip("[]")
    return settings.address or ("" if host in WILDCARDS else settings.listen)
